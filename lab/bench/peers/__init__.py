"""Penstock against other programs on one machine: `python -m lab.bench.peers`.

How it measures: docs/reproduce.md.
"""
