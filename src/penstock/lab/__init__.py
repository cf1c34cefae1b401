"""The laboratory: scenes, oracles, statistics and reports, shared by `penstock reproduce` and the
benchmarks. An experiment is one file that says its name, its run and its claims.
"""
