"""Bundled models and prompts."""
