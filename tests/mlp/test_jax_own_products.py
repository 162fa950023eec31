"""`TiledMLP` with a dot_general or promote_dtype of one's own, as Flax's layers take them; and metadata of its variables."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from shared_specs.tolerances import MODEL_FLOAT32
from tests.asserting import assert_within
from tiled_jax import TiledMLP, Tiling, UnsupportedError, linen, tiling_paths

H, WIDTH, T = 8, 12, 11


def of_eight_bits(x: jax.Array) -> jax.Array:
    """Rounded to steps of its largest row value, with the gradient of x: what a quantised training does."""
    step = jnp.max(jnp.abs(lax.stop_gradient(x)), axis=-1, keepdims=True) / 127
    return x + lax.stop_gradient(jnp.round(x / step) * step - x)


def quantised(x: jax.Array, w: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    return lax.dot_general(of_eight_bits(x), w, *args, **kwargs)


def in_bfloat16(values: tuple[Any, ...], *, dtype: Any = None, inexact: bool = True) -> list[Any]:
    del dtype, inexact
    return [None if a is None else a + lax.stop_gradient(a.astype(jnp.bfloat16).astype(a.dtype) - a) for a in values]


PRODUCTS: dict[str, dict[str, Callable[..., Any]]] = {
    "dot_general": {"dot_general": quantised},
    "promote_dtype": {"promote_dtype": in_bfloat16},
    "both": {"dot_general": quantised, "promote_dtype": in_bfloat16},
}


def untiled(weights: dict[str, jax.Array], x: jax.Array, own: dict[str, Any]) -> jax.Array:
    """The same MLP of Flax's own layers."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        w, b = weights[f"w_{name}"], weights[f"b_{name}"]
        layer: Any = nnx.Linear(*w.shape, **own, rngs=nnx.Rngs(0))
        layer.kernel, layer.bias = nnx.Param(w), nnx.Param(b)
        return layer(x)

    return linear("down", nnx.silu(linear("gate", x)) * linear("up", x))


def parts(params: dict[str, jax.Array], *, fused: bool) -> dict[str, jax.Array]:
    if not fused:
        return params
    halves = {f"{kind}_gate_up": jnp.split(params[f"{kind}_gate_up"], 2, axis=-1) for kind in ("w", "b")}
    found = {
        f"{kind[0]}_{name}": half
        for kind, pair in halves.items()
        for name, half in zip(("gate", "up"), pair, strict=True)
    }
    return {**found, "w_down": params["w_down"], "b_down": params["b_down"]}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("dot_general", False),
        ("promote_dtype", True),
        *((name, True) for name in ("dot_general", "both")),
        ("both", False),
    ],
)
def test_every_projection_is_computed_by_them(name: str, fused: bool) -> None:
    """Values and gradients of x and of all parameters, nnx and linen, are those of Flax's layers with the same functions."""
    own: dict[str, Any] = PRODUCTS[name]
    options: dict[str, Any] = {"bias": True, "fused_gate_up": fused, "tiling": Tiling(shard_tokens=4)}
    x, dy = (jax.random.normal(jax.random.key(seed), (T, H)) for seed in (1, 2))
    bias_init = nnx.initializers.normal(0.3)
    module = TiledMLP(H, WIDTH, **options, **own, bias_init=bias_init, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    params = {str(path[0]): variable[...] for path, variable in nnx.to_flat_state(state)}
    twin = linen.TiledMLP(H, WIDTH, **options, **own)

    def of_nnx(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        held = nnx.merge(graph, state)
        for key, value in params.items():
            setattr(held, key, nnx.Param(value))
        return held(x)

    forms = {
        "nnx": of_nnx,
        "linen": lambda params, x: twin.apply({"params": params}, x),
        "untiled": lambda params, x: untiled(parts(params, fused=fused), x, own),
    }
    found: dict[str, Any] = {}
    for form, fn in forms.items():
        y, pull = jax.vjp(fn, params, x)
        found[form] = {"y": y, "dx": (grads := pull(dy))[1], **grads[0]}
    for form in ("nnx", "linen"):
        assert set(found[form]) == set(found["untiled"])
        for key, expected in found["untiled"].items():
            assert_within(np.asarray(found[form][key]), np.asarray(expected), MODEL_FLOAT32, f"{form} {key}")
    plain = TiledMLP(H, WIDTH, **options, bias_init=bias_init, rngs=nnx.Rngs(0))(x)
    assert jnp.max(jnp.abs(plain - found["nnx"]["y"])) > 0, "nothing of one's own was used"


def test_the_path_says_so_and_flaxs_own_functions_change_nothing() -> None:
    own = TiledMLP(H, WIDTH, dot_general=quantised, rngs=nnx.Rngs(0))
    assert tiling_paths(own) == {"": "tile: the module has a dot_general of its own"}
    same = TiledMLP(
        H, WIDTH, dot_general=lax.dot_general, promote_dtype=dtypes.promote_dtype, kernel_metadata={}, rngs=nnx.Rngs(0)
    )
    assert tiling_paths(same) == {"": "tiled_mlp"}


def test_the_layers_of_a_module_keep_them() -> None:
    gate, up, down = TiledMLP(H, WIDTH, dot_general=quantised, rngs=nnx.Rngs(0)).to_linears()
    assert {layer.dot_general for layer in (gate, up, down)} == {quantised}


def test_metadata_is_that_of_the_variables() -> None:
    """Optimizers that group parameters by it find it."""
    module = TiledMLP(
        H, WIDTH, bias=True, kernel_metadata={"decay": True}, bias_metadata={"decay": False}, rngs=nnx.Rngs(0)
    )
    decays = {str(path[0]): v.get_metadata()["decay"] for path, v in nnx.to_flat_state(nnx.state(module))}
    assert decays == {f"{kind}_{name}": kind == "w" for kind in ("w", "b") for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dot_general": 3}, TypeError, "TiledMLP: dot_general must be a function such as lax.dot_general, got int"),
        ({"promote_dtype": "bfloat16"}, TypeError, "TiledMLP: promote_dtype must be a function such as flax.nnx"),
        ({"kernel_metadata": 3}, TypeError, "TiledMLP: kernel_metadata must be a mapping of names, or None, got int"),
        (
            {"bias_metadata": {"out_sharding": ("x",)}},
            UnsupportedError,
            "TiledMLP: bias_metadata must be without mesh axes of its own, got out_sharding. Pass sharding=",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_none_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        TiledMLP(H, WIDTH, **options, rngs=nnx.Rngs(0))
