"""Simulator: the engine's loop and policies on a virtual clock, without a model."""
