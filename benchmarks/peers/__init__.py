"""Penstock against other programs on one machine: `python -m benchmarks.peers`.

How it measures: docs/reproduce.md.
"""
