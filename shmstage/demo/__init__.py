"""The embedded default: a small language model, an arithmetic task and a bundle of recorded rollouts."""
