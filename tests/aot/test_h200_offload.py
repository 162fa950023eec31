"""`Checkpointing(offload=True)` compiled for an H200: what layers keep is in host memory, and not on the device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shared_specs.config import Checkpointing
from tests.aot import h200
from tiled_jax.parallel import scan_layers

T, H, W = 4096, 1024, 2048
X, PRODUCT = 2 * T * H, 2 * T * W  # bytes: a layer's input, and its first product
KEPT = {"full": X, "products": X + PRODUCT}


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def temporary_bytes(mode: Any, layers: int, offload: bool) -> tuple[int, int]:
    """On the device and in host memory, of forward and backward."""
    fn = partial(scan_layers, layer, checkpointing=Checkpointing(mode=mode, offload=offload))
    x = h200.shape(jnp.bfloat16, T, H)
    w = {"up": h200.shape(jnp.bfloat16, layers, H, W), "down": h200.shape(jnp.bfloat16, layers, W, H)}
    found = h200.compiled(lambda x, w: jax.vjp(fn, x, w)[1](x), x, w).memory_analysis()
    return found.temp_size_in_bytes, found.host_temp_size_in_bytes


@pytest.mark.parametrize("mode", KEPT)
def test_what_layers_keep_waits_in_host_memory(mode: str) -> None:
    """To the byte; the device's share does not depend on the number of layers."""
    few, many = (temporary_bytes(mode, layers, offload=True) for layers in (8, 16))
    print(mode, few, many)
    assert few[1] == 8 * KEPT[mode]
    assert many == (few[0], 16 * KEPT[mode])
    kept_few, kept_many = (temporary_bytes(mode, layers, offload=False) for layers in (8, 16))
    assert kept_few[1] == kept_many[1] == 0
    assert kept_many[0] - kept_few[0] == 8 * KEPT[mode]
    assert few[0] < kept_few[0]
