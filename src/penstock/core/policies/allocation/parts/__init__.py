"""Building blocks that several allocation policies share."""
