"""The GPU backend: CUDA graphs, Triton kernels, drafts that stay on the device, rounds ahead.

Only `penstock.engine.backends` imports from this folder, and only what is chosen.
"""
