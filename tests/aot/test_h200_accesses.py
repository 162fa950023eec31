"""Which bytes of device memory the elementwise kernels touch, in the program compiled for an H200."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shared_specs.kernels.blocks import CANDIDATES, Blocks
from tests.aot import h200, ptx
from tests.aot.conftest import DUMP
from tiled_jax.mlp.kernels.glu_elementwise import glu, glu_backward

W = 28672  # Llama-3-70B


def compiled_ptx(fn: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> str:
    before = set(DUMP.glob("*.ptx"))
    h200.compiled(fn, *shapes)
    (found,) = set(DUMP.glob("*.ptx")) - before
    return found.read_text()


# A shard may be as long as the sequence.
@pytest.mark.parametrize("tokens", [8192, 131072, 262144], ids=["", "past 2^31", "past 2^32"])
@pytest.mark.parametrize(("fn", "operands"), [(glu, 2), (glu_backward, 3)])
@pytest.mark.parametrize("blocks", CANDIDATES["pallas"]["glu_elementwise"], ids=str)
def test_the_last_program_ends_where_the_arrays_end(fn: Any, operands: int, tokens: int, blocks: Blocks) -> None:
    """And the first begins where they begin."""
    run = partial(fn, activation="silu", blocks=blocks)
    text = compiled_ptx(run, *[h200.shape(jnp.bfloat16, tokens, W)] * operands)
    elements = tokens * W
    first = ptx.accesses(text, program=0, thread=0)
    last = ptx.accesses(text, program=elements // blocks.columns - 1, thread=127)
    assert min(access.first for access in first) == 0
    assert max(access.first + access.size for access in last) == 2 * elements
    between = 2 * (elements - blocks.columns)
    assert {access.first for access in last} == {access.first + between + 127 * access.size for access in first}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("fn", "operands"), [(glu, 2), (glu_backward, 3)])
@pytest.mark.parametrize("blocks", CANDIDATES["pallas"]["glu_elementwise"], ids=str)
def test_a_thread_reads_and_writes_16_bytes_at_once(fn: Any, operands: int, blocks: Blocks, dtype: Any) -> None:
    a = h200.shape(dtype, 8192, W)
    assert set(ptx.counts(compiled_ptx(partial(fn, activation="silu", blocks=blocks), *[a] * operands))) == {16}
