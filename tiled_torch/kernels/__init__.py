"""Triton kernels: one kernel and its launch wrapper per file. No autograd."""
