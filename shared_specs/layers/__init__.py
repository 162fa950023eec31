"""Tensor-parallel layers: checks, attention heads, streams of random numbers."""
