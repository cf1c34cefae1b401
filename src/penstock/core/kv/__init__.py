"""KV memory by its blocks: pools, prefix cache, and blocks that a plan in flight may read."""
