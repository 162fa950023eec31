"""Mosaic GPU kernels for NVIDIA Hopper: one kernel and its launch wrapper per file, no differentiation, no plans."""
