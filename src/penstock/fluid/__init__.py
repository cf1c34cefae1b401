"""Pure mathematics: step-time profiles and, later, equilibria, thresholds and bounds."""
