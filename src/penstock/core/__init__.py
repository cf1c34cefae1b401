"""Decisions: who runs, who drafts, how far. No clock, no I/O, no tensors."""
