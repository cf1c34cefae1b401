"""Building blocks that several pipelines share."""
