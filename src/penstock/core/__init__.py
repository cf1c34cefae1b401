"""Decisions: which requests run, which drafter drafts, how far. No clock, I/O or tensors."""
