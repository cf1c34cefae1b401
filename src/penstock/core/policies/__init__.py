"""Policies: one file each, in a folder for each kind."""
