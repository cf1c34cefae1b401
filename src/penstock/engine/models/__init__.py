"""Checkpoints and the eager decoder."""
