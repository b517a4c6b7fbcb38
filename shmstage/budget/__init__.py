"""Does it fit: what a run needs, in bytes, against the limits of the machine."""
