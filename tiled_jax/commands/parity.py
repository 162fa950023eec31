"""The cases of the specification in JAX, for `parity`: on its first device, with every backend that can run."""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.app.parity import Place
from shared_specs.collectives.partitions import bounds
from shared_specs.config import DIFFERENTIABLE_OUTPUTS, LossResult, Tiling
from shared_specs.core.rounding import Array, compute_dtype
from shared_specs.linear.cases import LinearCase, make_linear_inputs
from shared_specs.loss.cases import LossCase, loss_options, make_loss_inputs
from shared_specs.mlp.cases import MLPCase, make_inputs
from tiled_jax import (
    TiledLinear,
    TiledLinearReturnBias,
    TiledMLP,
    backends,
    tile,
    tiled_linear_cross_entropy,
    tiled_mlp,
)

# The framework's own functions, which the cases of `tile` are made of.
FUNCTIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}
Operands = dict[str, Any]


class JaxRunner:
    """See `shared_specs.app.parity.Runner`."""

    def places(self, group: str) -> Iterable[Place]:
        usable = [name for name, reason in backends.usable_backends().items() if reason is None]
        for backend in ["xla"] if group in ("linear", "tile") else usable:
            yield Place(device=jax.devices()[0].platform, backend=backend)

    def run(self, group: str, case: Any, place: Place) -> Mapping[str, Array | None]:
        runs: Mapping[str, Callable[[Any, Place], Operands]]
        runs = {"mlp": _mlp, "tile": _tiled, "loss": _loss, "linear": _linear}
        with jax.enable_x64(case.dtype == "float64"):
            return {name: np.asarray(array) for name, array in runs[group](case, place).items()}


def _operands(arrays: Mapping[str, Array], frozen: Iterable[str]) -> tuple[Operands, Operands]:
    """Return what gradients are wanted of, and the rest."""
    given = {name: jnp.asarray(array) for name, array in arrays.items()}
    wanted = {name: given.pop(name) for name in list(given) if name[0] in "xwb" and name not in frozen}
    return wanted, given


def _mlp(case: MLPCase, place: Place) -> Operands:
    wanted, fixed = _operands(make_inputs(case), case.frozen)
    options: dict[str, Any] = {"num_shards": case.num_shards, "keep": case.keep, "backend": place.backend}
    options |= {"activation": case.activation}

    def call(wanted: Operands) -> jax.Array:
        given = fixed | wanted
        biases = {name[2:]: array for name, array in given.items() if name.startswith("b_")}
        weights = (given.get("w_gate"), given["w_up"], given["w_down"])
        if not case.fused:
            return tiled_mlp(given["x"], *weights, biases=biases, **options)
        # The module's parameters are copies of concrete arrays: they are put in place of those that it was made of.
        module = TiledMLP.from_weights(*_like(weights), biases=_like(biases), fused_gate_up=True, **options)
        for kind in ("w", "b"):
            if f"{kind}_gate" in given:
                both = jnp.concatenate([given[f"{kind}_gate"], given[f"{kind}_up"]], -1)
                getattr(module, f"{kind}_gate_up").set_value(both)
        for name in ("w_down", "b_down"):
            if name in given:
                getattr(module, name).set_value(given[name])
        return module(given["x"])

    return _gradients(call, wanted, fixed.pop("dy"))


def _like(arrays: Any) -> Any:
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), arrays)


def _tiled(case: MLPCase, place: Place) -> Operands:
    wanted, fixed = _operands(make_inputs(case), case.frozen)

    def call(wanted: Operands) -> jax.Array:
        given = fixed | wanted

        def product(x: jax.Array, name: str) -> jax.Array:
            y = x @ given[f"w_{name}"]
            return y + given[f"b_{name}"] if f"b_{name}" in given else y

        def plain(x: jax.Array) -> jax.Array:
            up = product(x, "up")
            h = FUNCTIONS[case.activation](product(x, "gate")) * up if case.gated else FUNCTIONS[case.activation](up)
            return product(h, "down")

        return tile(plain, num_shards=case.num_shards)(given["x"])

    return _gradients(call, wanted, fixed.pop("dy"))


def _loss(case: LossCase, place: Place) -> Operands:
    wanted, fixed = _operands(make_loss_inputs(case), case.frozen)
    wanted, fixed = {name: a for name, a in wanted.items() if name in ("x", "weight", "bias")}, fixed | wanted
    tiling: dict[str, Any] = {"num_shards": case.num_shards}
    if case.vocab_shards is not None:
        tiling = {"tiling": Tiling(num_shards=case.num_shards, vocab_shards=case.vocab_shards)}
    names = ["loss", *(name for name in case.outputs if name in DIFFERENTIABLE_OUTPUTS)]

    def call(wanted: Operands) -> Operands:
        given = fixed | wanted
        result = tiled_linear_cross_entropy(
            given["x"],
            given["weight"],
            given["targets"],
            bias=given.get("bias"),
            loss=loss_options(case, given.get("class_weight")),
            backend=place.backend,
            **tiling,
        )
        every = result._asdict() if isinstance(result, LossResult) else {"loss": result}
        return {name: value for name, value in every.items() if value is not None}

    @jax.jit
    def results(wanted: Operands) -> Operands:
        found, pull = jax.vjp(call, wanted)
        upstream = {name: jnp.zeros_like(value) for name, value in found.items()}
        (gradients,) = pull(upstream | {name: fixed[f"d{name}"] for name in names})
        return found | {f"d{name}": gradient for name, gradient in gradients.items()}

    return results(wanted)


def _linear(case: LinearCase, place: Place) -> Operands:
    wanted, fixed = _operands(make_linear_inputs(case), case.frozen)
    dtype, wide = jnp.dtype(case.dtype), compute_dtype(case.dtype)

    def call(wanted: Operands) -> jax.Array:
        given = fixed | wanted
        sizes = (case.in_features, case.out_features)
        plain: Any = nnx.Linear(*sizes, use_bias=case.bias, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        plain.kernel.set_value(given["weight"])
        if case.bias:
            plain.bias.set_value(given["bias"])
        layer: Any = (TiledLinearReturnBias if case.return_bias else TiledLinear).from_linear(
            plain,
            in_splits=case.in_splits,
            out_splits=case.out_splits,
            input_is_already_split=case.already_split,
            combine_out_splits=case.combined,
        )
        edges = pairwise(bounds(case.in_features, case.in_splits))
        x = given["x"]
        result, biases = layer([x[..., start:stop] for start, stop in edges] if case.already_split else x), None
        if case.return_bias:
            result, biases = result
        parts, added = (result, biases) if not case.combined else ([result], [biases])
        added = [None] * len(parts) if added is None else added
        pairs = zip(parts, added, strict=True)
        # The caller's sum of a bias that is returned, which the case does not measure, is in float32.
        return jnp.concatenate(
            [y if b is None else (y.astype(wide) + b.astype(wide)).astype(y.dtype) for y, b in pairs], -1
        )

    return _gradients(call, wanted, fixed.pop("dy"))


def _gradients(call: Callable[[Operands], jax.Array], wanted: Operands, dy: jax.Array) -> Operands:
    @jax.jit
    def results(wanted: Operands, dy: jax.Array) -> Operands:
        y, pull = jax.vjp(call, wanted)
        return {"y": y} | {f"d{name}": gradient for name, gradient in pull(dy)[0].items()}

    return results(wanted, dy)
