"""Bytes of the backward of one layer of a plan, in PyTorch and compiled by XLA."""
