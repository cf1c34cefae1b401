"""Penstock against other programs on one machine: `python -m lab.bench.peers`, docs/peers.md."""
