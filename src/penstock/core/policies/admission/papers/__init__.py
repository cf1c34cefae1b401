"""Admission policies exactly as their papers state them."""
