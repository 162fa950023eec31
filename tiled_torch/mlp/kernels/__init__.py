"""Triton kernels of the MLP: one kernel and its launch wrapper a file."""
