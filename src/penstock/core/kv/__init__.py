"""KV memory by its blocks: pools, the prefix cache, and what waits until nobody reads it."""
