"""The laboratory: the papers' experiments, measurements, and the bundled family's training."""
