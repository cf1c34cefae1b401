"""Allocation policies: draft tokens of each request in a round."""
