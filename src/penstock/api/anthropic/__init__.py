"""Anthropic's messages over the same engine."""
