"""How far it is from the module's call to the first product: a reader follows every frame of it."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def frames(half: str) -> list[str]:
    """Return the library's own functions on the stack, from the outermost to the one that calls it."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / half):
            found.append(f"{path.relative_to(ROOT / half)}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def of_torch(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    import torch

    from tiled_torch import TiledMLP

    seen, product = [], torch.mm

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(frames("tiled_torch"))
        return product(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", spy)
    TiledMLP(3, 5, num_shards=2)(torch.ones(4, 3, requires_grad=True))
    return seen


def of_jax(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from tiled_jax import TiledMLP

    seen, products = [], importlib.import_module("tiled_jax.core.products")
    product = products.lax.dot_general

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(frames("tiled_jax"))
        return product(*args, **kwargs)

    monkeypatch.setattr(products.lax, "dot_general", spy)
    mlp = TiledMLP(3, 5, num_shards=2, rngs=nnx.Rngs(0))
    jax.linearize(lambda x: mlp(x), jnp.ones((4, 3)))
    return seen


@pytest.mark.parametrize(("route", "most"), [(of_torch, 8), (of_jax, 12)], ids=["torch", "jax"])
def test_frames_from_the_module_to_the_product(route: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = route(monkeypatch)
    assert calls
    assert all(names[0].startswith("mlp/module.py") for names in calls), calls[0]
    assert max(map(len, calls)) <= most, max(calls, key=len)
