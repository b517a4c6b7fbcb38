"""The slot protocol of ``native/slots.cpp`` and ``native/cells.cpp`` as explicit state machines, walked to the end."""
