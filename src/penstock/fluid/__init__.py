"""Pure mathematics: step-time profiles, equilibria, thresholds, capacity, fair shares, packing."""
