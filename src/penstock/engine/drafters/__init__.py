"""Drafters: models with their own paged KV cache, and look-up, behind one interface."""
