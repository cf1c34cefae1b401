"""Runs the scheduler on a virtual clock: the same loop and policies, no model."""
