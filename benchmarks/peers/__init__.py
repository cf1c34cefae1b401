"""Penstock against other programs on one machine: `python -m benchmarks.peers`, docs/reproduce.md."""
