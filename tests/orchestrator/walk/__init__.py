"""An exhaustive walk over the step boundary: every order of events that a run can see, against the contract."""
