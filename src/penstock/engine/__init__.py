"""Torch side of Penstock: models, paged KV cache, attention, sampling, drafters, executor."""
