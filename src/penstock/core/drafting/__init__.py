"""Drafting for requests that are verified elsewhere, whatever the drafter."""
