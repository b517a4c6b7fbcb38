"""Who stages: the process that owns the devices, and the engine it drives."""
