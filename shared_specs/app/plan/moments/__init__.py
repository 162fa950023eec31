"""Bytes of the moments of a planned step: the backward of a layer, in PyTorch and as XLA compiles it, and the compiled loss."""
