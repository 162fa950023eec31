"""Mosaic GPU kernels of the loss: one kernel and its launch wrapper a file."""
