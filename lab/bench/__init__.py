"""Measurements, each a program: `python -m lab.bench.NAME`."""
