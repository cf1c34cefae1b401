"""What experiments and measurements share: scenes, oracles, statistics, reports, pages."""
