"""Ollama's endpoints over the same engine."""
