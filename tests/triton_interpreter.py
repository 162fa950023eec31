"""Triton's interpreter, made faithful for bfloat16; imported before any kernel is.

As it comes it multiplies the bits of bfloat16 operands as integers and cuts float32 off where it should round, both in
silence (Triton 3.6, 3.8 and 3.9). This patches private names of these versions and of no other.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tiled_torch.core import launch

if not triton.__version__.startswith(("3.6.", "3.8.", "3.9.")):
    raise ImportError(f"tests/triton_interpreter.py: written for Triton 3.6, 3.8 and 3.9, found {triton.__version__}")

_builder = interpreter.InterpreterBuilder
_dot, _cast, _between_floats = _builder.create_dot, _builder.cast_impl, _builder.create_fp_to_fp


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits, to the nearest and ties to even."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return rounded.reshape(values.shape)


def _create_dot(self, a, b, d, *rest):  # type: ignore[no-untyped-def]
    if a.dtype.scalar != tl.bfloat16:
        return _dot(self, a, b, d, *rest)
    total = np.matmul(_widened(a.data), _widened(b.data), dtype=np.float32) + d.data
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _cast_impl(self, source, target):  # type: ignore[no-untyped-def]
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return interpreter.TensorHandle(_rounded(source.data), tl.bfloat16)
    return _cast(self, source, target)


def _create_fp_to_fp(self, source, target, mode):  # type: ignore[no-untyped-def]
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return _cast_impl(self, source, target)
    return _between_floats(self, source, target, mode)


_builder.create_dot, _builder.cast_impl, _builder.create_fp_to_fp = _create_dot, _cast_impl, _create_fp_to_fp
launch.bfloat16_in_interpreter = True
