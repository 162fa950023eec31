"""What the tests of the Triton kernels start from: small blocks, drawn operands, and a watch over every address."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder
from triton.tools.tensor_descriptor import TensorDescriptor

import tests.triton_interpreter  # noqa: F401
from shared_specs.core.rounding import relative_error
from shared_specs.kernels.blocks import Blocks
from shared_specs.tolerances import limit
from tiled_torch.core import launch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The interpreter computes with NumPy, which warns where a GPU just returns infinity.
NUMPY_WARNINGS = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def set_blocks(monkeypatch: pytest.MonkeyPatch, *, halves: int = 1, persistent: bool = False) -> None:
    """Blocks so small that every kernel needs several in each dim."""

    def blocks(op: str, a: Tensor, shape: tuple[int, ...]) -> Blocks:
        if op in ("glu_elementwise", "cross_entropy"):
            return Blocks(rows=1, columns=32)
        return Blocks(rows=32, columns=32, depth=16, group=2, halves=halves, persistent=persistent)

    monkeypatch.setattr(launch, "blocks", blocks)


def draw(*shape: int, dtype: str, scale: float = 1.0, seed: int = 0) -> Tensor:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape) * scale
    return torch.from_numpy(values).to(DTYPES[dtype])


def empty(*shape: int, dtype: str) -> Tensor:
    return torch.full(shape, torch.nan, dtype=DTYPES[dtype])


def assert_close(found: Tensor, truth: Tensor, baseline: Tensor, dtype: str) -> None:
    """As exact as the baseline, which rounds where a plain implementation does. dtype: of the operands."""
    wide = truth.double().numpy()
    error = relative_error(found.double().numpy(), wide)
    assert error <= limit(relative_error(baseline.double().numpy(), wide), dtype)


def assert_same_specials(found: Tensor, truth: Tensor, baseline: Tensor) -> None:
    """NaN and infinities where the baseline has them, and the numbers between as exact as its."""
    assert torch.equal(found.isnan(), baseline.isnan())
    assert torch.equal(found[found.isinf()], baseline[baseline.isinf()])
    assert torch.equal(found.isinf(), baseline.isinf())
    finite = baseline.isfinite()
    if finite.any():
        assert_close(found[finite], truth[finite], baseline[finite], "float32")


def inside(addresses: np.ndarray, tensors: Sequence[Tensor]) -> np.ndarray:
    """Which addresses are those of an element of one of the tensors, of at most two dims with contiguous rows."""
    found = np.zeros(addresses.shape, bool)
    for a in tensors:
        offset = addresses.astype(np.int64) - a.data_ptr()
        rows, columns = (1, a.numel()) if a.ndim < 2 else a.shape
        pitch = max(1, a.stride(0) if a.ndim == 2 else columns) * a.itemsize
        found |= (offset >= 0) & (offset // pitch < rows) & (offset % pitch < columns * a.itemsize)
    return found


def watch_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter fail where a kernel reads or writes anything but elements of the tensors it was given."""
    given: list[Tensor] = []
    start, load, store = (
        launch.start,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def watched_start(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        given[:] = [b for a in args if isinstance(b := a.base if isinstance(a, TensorDescriptor) else a, Tensor)]
        start(kernel, programs, *args, **constants)

    def check(what: str, pointers: Any, mask: Any) -> None:
        if not np.all(inside(pointers.data[mask.data], given)):
            raise AssertionError(f"a kernel {what} outside its tensors")

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check("reads", pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("writes", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(launch, "start", watched_start)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
