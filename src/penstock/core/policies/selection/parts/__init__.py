"""Building blocks that several selection policies share."""
