"""`TiledMLP` for Flax nnx: the parameters of a token-wise MLP and one call of `tiled_mlp`. No math."""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from shared_specs.config import JAX, Tiling
from shared_specs.errors import fail
from shared_specs.mlp import checks as mlp_checks
from tiled_jax.core.activation_functions import activation_name
from tiled_jax.core.arrays import array, operands
from tiled_jax.core.params import (
    Sharding,
    as_variable,
    check_dtypes,
    check_initialisers,
    check_metadata,
    check_precision,
    chosen_bias,
    init_bias,
    init_weight,
    refuse_partitioned,
)
from tiled_jax.mlp import projections
from tiled_jax.mlp.api import tiled_mlp
from tiled_jax.mlp.params import make_config, param_axes, param_shapes
from tiled_jax.tile.api import tile
from tiled_jax.tile.module_state import check_module_rngs


class TiledMLP(nnx.Module):
    """A gated or plain MLP computed shard by shard: a drop-in for gate/up/down linear layers with an activation.

    Args:
        hidden_size, intermediate_size: H and I.
        activation: silu, gelu, gelu_tanh, relu or relu_squared, or a function that computes one of them, known by its values
            and slopes: nnx.silu, nnx.relu, partial(nnx.gelu, approximate=False); nnx.gelu alone is gelu_tanh.
        gated: act(x w_gate) * (x w_up) if true, act(x w_up) if false.
        bias: a bias on every projection.
        fused_gate_up: gate and up are one parameter `w_gate_up` [H, 2I], gate first; a call copies it into its halves.
        num_shards, keep, tiling, backend: as in `tiled_mlp`.
        dtype: of the computation; None is what x and the parameters promote to, as in nnx.Linear.
        param_dtype: of the parameters. float32 beside a 16-bit dtype are master weights with float32 gradients.
        rngs: its `params` stream draws the parameters, in the order gate, up, down and weights before biases.
            Required.
        kernel_init, bias_init: initialisers, as nnx.Linear takes them; of a fused gate and up called once, for both.
        sharding: mesh axes of the (hidden, intermediate) dims, such as (None, "tp"), kept as the parameters' sharding
            metadata. Making a module with it needs a mesh (`jax.set_mesh`), without it none.
        use_bias: Flax's name for bias; None leaves it to bias.
        precision: None or lax.Precision.HIGHEST, which products have anyway.
        dot_general, promote_dtype: as in nnx.Linear, for instance of a library that quantises. With a function of your own
            every projection is computed by it, and the module runs through `tile` (see `tiling_paths`). None is the
            module's own product.
        kernel_metadata, bias_metadata: metadata of the variables of weights and biases, as in nnx.Linear.
    Parameters are `w_gate`, `w_up` [H, I], `w_down` [I, H] (or `w_gate_up`) and, with bias, `b_gate`, `b_up`, `b_down`
    (or `b_gate_up`).
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_mlp`, at construction. UnsupportedError: metadata names mesh axes.
    Source: derived in shared_specs/README.md.
    Example:
        >>> TiledMLP(8, 12, num_shards=4, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Callable[..., Any] = "silu",
        gated: bool = True,
        bias: bool = False,
        fused_gate_up: bool = False,
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        kernel_init: Initializer = init_weight,
        bias_init: Initializer = init_bias,
        sharding: Sharding | None = None,
        use_bias: bool | None = None,
        precision: Any = None,
        dot_general: Callable[..., Any] | None = None,
        promote_dtype: Callable[..., Any] | None = None,
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        bias = chosen_bias("TiledMLP", bias, use_bias, False)
        shapes = param_shapes(
            "TiledMLP", hidden_size, intermediate_size, gated=gated, bias=bias, fused_gate_up=fused_gate_up
        )
        self.config = make_config(activation, gated, fused_gate_up, num_shards, keep, tiling, backend)
        check_dtypes("TiledMLP", dtype, param_dtype)
        check_initialisers("TiledMLP", kernel_init, bias_init)
        check_precision("TiledMLP", precision)
        own = projections.check_products("TiledMLP", {"dot_general": dot_general, "promote_dtype": promote_dtype})
        self.dot_general, self.promote_dtype, self.precision = own["dot_general"], own["promote_dtype"], precision
        of_kind = {
            "w": check_metadata("TiledMLP", "kernel_metadata", kernel_metadata),
            "b": check_metadata("TiledMLP", "bias_metadata", bias_metadata),
        }
        rngs = check_module_rngs("TiledMLP", rngs)
        self.dtype = dtype
        axes = param_axes(sharding, fused_gate_up=fused_gate_up)
        for name, shape in shapes.items():
            init = kernel_init if name.startswith("w_") else bias_init
            metadata: dict[str, Any] = {} if axes(name) is None else {"out_sharding": axes(name)}
            value = refuse_partitioned("TiledMLP", init(rngs.params(), shape, param_dtype))
            setattr(self, name, nnx.Param(value, **of_kind[name[0]], **metadata))

    @classmethod
    def from_weights(
        cls,
        w_gate: jax.Array | None,
        w_up: jax.Array,
        w_down: jax.Array,
        *,
        biases: Mapping[str, jax.Array] | None = None,
        activation: str | Callable[..., Any] = "silu",
        fused_gate_up: bool = False,
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around existing weights ([in, out]); they become its parameters without a copy, unless fused.

        Variables stay what they are: those very ones, with their type and their sharding metadata.

        Args:
            w_gate, w_up: [H, I]; w_gate None for a plain MLP. w_down: [I, H_out]. biases: any of gate, up, down.
            fused_gate_up: gate and up are concatenated into one parameter (one copy).
        """
        function = "TiledMLP.from_weights"
        name_of_activation = activation_name(function, activation)
        weights, given = mlp_checks.mlp_operands(function, w_gate, w_up, w_down, biases)
        params = {name: array(function, name, w) for name, w in weights.items()}
        params |= {f"b_{name}": array(function, f"biases[{name!r}]", b) for name, b in given.items()}
        seen = operands(params)
        mlp_checks.check_mlp_weights(
            function,
            weights={name: seen[name] for name in weights},
            biases={name: seen[f"b_{name}"] for name in given},
            activation=name_of_activation,
            names=JAX,
        )
        if fused_gate_up:
            mlp_checks.check_fused_biases(function, tuple(given))
        options = {"num_shards": num_shards, "keep": keep, "tiling": tiling, "backend": backend}
        module = cls._empty(name_of_activation, w_gate is not None, fused_gate_up, **options)
        for prefix in ("w", "b") if fused_gate_up else ():
            if f"{prefix}_gate" in params:
                pair = [params.pop(f"{prefix}_{name}") for name in ("gate", "up")]
                params[f"{prefix}_gate_up"] = jnp.concatenate(pair, axis=-1)
        own = {**weights, **{f"b_{name}": b for name, b in given.items()}}
        for name, value in params.items():
            setattr(module, name, as_variable(own.get(name), value))
        return module

    @classmethod
    def from_linears(
        cls,
        gate: nnx.Module | None,
        up: nnx.Module,
        down: nnx.Module,
        *,
        activation: str | Callable[..., Any] = "silu",
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around existing layers, whose parameters become its own: the same variables, not copies.

        A plain nnx.Linear gives `w_gate` and `b_gate` (`up` and `down` likewise). Any other layer, nnx.LoRA around a linear
        one or nnx.LoRALinear, stays a layer, `gate`, and the module then runs through `tile`, exactly: see `tiling_paths`.
        An nnx.Linear with a precision, dot_general or promote_dtype of its own is such a layer.

        Args:
            gate, up, down: nnx layers [..., H] -> [..., I], the same, [..., I] -> [..., H_out]; gate None for a plain MLP.
        Raises:
            SpecError: sizes or dtypes of the layers disagree. TypeError: one is no nnx module.
        Example:
            >>> rngs = nnx.Rngs(0)
            >>> up, down = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)
            >>> gate = nnx.LoRA(8, 2, 12, base_module=nnx.Linear(8, 12, rngs=rngs), rngs=rngs)
            >>> TiledMLP.from_linears(gate, up, down, num_shards=4)(jnp.ones((2, 5, 8))).shape
            (2, 5, 8)
        """
        function = "TiledMLP.from_linears"
        given: dict[str, Any] = {"gate": gate, "up": up, "down": down}
        layers = {name: layer for name, layer in given.items() if name != "gate" or layer is not None}
        projections.check_layers(function, layers)
        name_of_activation = activation_name(function, activation)
        mlp_checks.check_activation(function, name_of_activation)
        options = {"num_shards": num_shards, "keep": keep, "tiling": tiling, "backend": backend}
        module = cls._empty(name_of_activation, gate is not None, False, **options)
        for name, layer in layers.items():
            if projections.reason_not_plain(name, layer) is None:
                module.dtype = layer.dtype
                for key, variable in projections.plain_variables(name, layer).items():
                    setattr(module, key, variable)
            else:
                setattr(module, name, layer)
        if not module._layers():
            module._check_weights(function)
        return module

    def to_linears(self) -> tuple[Any, Any, Any]:
        """Return gate (None in a plain MLP), up and down as layers of the same variables: nnx.Linear, or what stands there.

        Raises:
            SpecError: gate and up are one parameter.
        """
        if self.config.fused_gate_up:
            fail("TiledMLP.to_linears", "fused_gate_up", "False", True, advice="A layer has a parameter of its own.")
        gate, up, down = (projections.as_layer(self, name) for name in projections.ORDER)
        return gate, up, down

    @classmethod
    def _empty(cls, activation: str, gated: bool, fused_gate_up: bool, **options: Any) -> Self:
        """Return a module with these options and without parameters."""
        kind = {"activation": activation, "gated": gated, "fused_gate_up": fused_gate_up}
        module = cls(1, 1, **kind, **options, rngs=nnx.Rngs(0))
        for name in module.config.weights:
            delattr(module, name)
        return module

    def _check_weights(self, function: str) -> None:
        seen = operands({name: array(function, name, value) for name, value in self._held().items()})
        mlp_checks.check_mlp_weights(
            function,
            weights={name: a for name, a in seen.items() if name[0] == "w"},
            biases={name[2:]: a for name, a in seen.items() if name[0] == "b"},
            activation=self.config.activation,
            names=JAX,
        )

    def _held(self) -> dict[str, jax.Array]:
        return self.config.held("TiledMLP", self)

    def _layers(self) -> tuple[str, ...]:
        """Return the projections that are layers to be called."""
        return tuple(name for name in projections.ORDER if getattr(self, name, None) is not None)

    def _path(self) -> str:
        """Return how a call runs, for `tiling_paths`."""
        reasons = [projections.reason_not_plain(name, getattr(self, name)) for name in self._layers()]
        if reasons:
            return f"tile: {reasons[0] or 'a projection is a layer'}"
        reason = projections.reason_of_products(self)
        return "tiled_mlp" if reason is None else f"tile: {reason}"

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., H] -> [..., H_out]."""
        if layers := self._layers():
            projections.check_once("TiledMLP", self, layers)
        if layers or projections.reason_of_products(self):
            return tile(MethodType(projections.whole, self), tiling=self.config.tiling)(x)
        return tiled_mlp(**self.config.arguments(x, self._held(), self.dtype))
