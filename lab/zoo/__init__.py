"""Training, growing and judging the bundled family of models."""
