"""Fakes, oracles and small engines, shipped so that users can test their own loops."""
