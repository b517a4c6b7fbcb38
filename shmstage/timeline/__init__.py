"""What happened: pure estimators over raw instants."""
