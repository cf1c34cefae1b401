"""Triton kernels. Importing a module of this folder imports triton: only whoever chose it does."""
