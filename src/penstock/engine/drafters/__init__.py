"""Drafters: models with their own paged KV, and n-gram look-up, behind one interface."""
