"""Pipelines: when drafters draft and the target verifies."""
