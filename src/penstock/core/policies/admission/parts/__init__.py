"""Building blocks that several admission policies share."""
