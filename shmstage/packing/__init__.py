"""What is trained: trajectories, the plan that packs them, the native fill, and bundles on disk."""
