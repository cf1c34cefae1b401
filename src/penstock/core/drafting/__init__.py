"""Drafting for requests that are verified on another machine, for any drafter."""
