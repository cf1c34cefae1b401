"""To the letter of their papers."""
