"""OpenAI-compatible HTTP: endpoints, metrics, dashboard."""
