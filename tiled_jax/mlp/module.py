"""`TiledMLP` for Flax nnx: the parameters of a token-wise MLP and one call of `tiled_mlp`. No math."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from shared_specs.config import JAX, Tiling
from shared_specs.mlp import checks as mlp_checks
from tiled_jax.core.arrays import array, operands
from tiled_jax.core.params import Sharding, check_dtypes, init_bias, init_weight
from tiled_jax.mlp.api import tiled_mlp
from tiled_jax.mlp.params import make_config, param_axes, param_shapes
from tiled_jax.tile.module_state import check_module_rngs


class TiledMLP(nnx.Module):
    """A gated or plain MLP computed shard by shard: a drop-in for gate/up/down linear layers with an activation.

    Args:
        hidden_size, intermediate_size: H and I.
        activation: silu, gelu, gelu_tanh, relu or relu_squared.
        gated: act(x w_gate) * (x w_up) if true, act(x w_up) if false.
        bias: a bias on every projection.
        fused_gate_up: gate and up are one parameter `w_gate_up` [H, 2I], gate first; a call copies it into its halves.
        num_shards, keep, tiling, backend: as in `tiled_mlp`.
        dtype: of the computation; None is what x and the parameters promote to, as in nnx.Linear.
        param_dtype: of the parameters. float32 beside a 16-bit dtype are master weights with float32 gradients.
        rngs: its `params` stream draws the parameters, in the order gate, up, down and weights before biases.
        kernel_init, bias_init: initialisers, as nnx.Linear takes them; of a fused gate and up called once, for both.
        sharding: mesh axes of the (hidden, intermediate) dims, such as (None, "tp"), kept as the parameters' sharding
            metadata. Making a module with it needs a mesh (`jax.set_mesh`), without it none.
    Parameters are `w_gate`, `w_up` [H, I], `w_down` [I, H] (or `w_gate_up`) and, with bias, `b_gate`, `b_up`, `b_down`
    (or `b_gate_up`).
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_mlp`, at construction.
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
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        fused_gate_up: bool = False,
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        kernel_init: Initializer = init_weight,
        bias_init: Initializer = init_bias,
        sharding: Sharding | None = None,
    ) -> None:
        shapes = param_shapes(
            "TiledMLP", hidden_size, intermediate_size, gated=gated, bias=bias, fused_gate_up=fused_gate_up
        )
        self.config = make_config(activation, gated, fused_gate_up, num_shards, keep, tiling, backend)
        check_dtypes("TiledMLP", dtype, param_dtype)
        check_module_rngs("TiledMLP", rngs)
        self.dtype = dtype
        axes = param_axes(sharding, fused_gate_up=fused_gate_up)
        for name, shape in shapes.items():
            init = kernel_init if name.startswith("w_") else bias_init
            metadata: dict[str, Any] = {} if axes(name) is None else {"out_sharding": axes(name)}
            setattr(self, name, nnx.Param(init(rngs.params(), shape, param_dtype), **metadata))

    @classmethod
    def from_weights(
        cls,
        w_gate: jax.Array | None,
        w_up: jax.Array,
        w_down: jax.Array,
        *,
        biases: Mapping[str, jax.Array] | None = None,
        activation: str = "silu",
        fused_gate_up: bool = False,
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around existing weights ([in, out]); they become its parameters without a copy, unless fused.

        Args:
            w_gate, w_up: [H, I]; w_gate None for a plain MLP. w_down: [I, H_out]. biases: any of gate, up, down.
            fused_gate_up: gate and up are concatenated into one parameter (one copy).
        """
        function = "TiledMLP.from_weights"
        weights, given = mlp_checks.mlp_operands(function, w_gate, w_up, w_down, biases)
        params = {name: array(function, name, w) for name, w in weights.items()}
        params |= {f"b_{name}": array(function, f"biases[{name!r}]", b) for name, b in given.items()}
        seen = operands(params)
        mlp_checks.check_mlp_weights(
            function,
            weights={name: seen[name] for name in weights},
            biases={name: seen[f"b_{name}"] for name in given},
            activation=activation,
            names=JAX,
        )
        if fused_gate_up:
            mlp_checks.check_fused_biases(function, tuple(given))
        # The smallest module with these options; its parameters are replaced, all of them, by the ones given.
        module = cls(
            1,
            1,
            activation=activation,
            gated=w_gate is not None,
            fused_gate_up=fused_gate_up,
            num_shards=num_shards,
            keep=keep,
            tiling=tiling,
            backend=backend,
            rngs=nnx.Rngs(0),
        )
        for prefix in ("w", "b") if fused_gate_up else ():
            if f"{prefix}_gate" in params:
                pair = [params.pop(f"{prefix}_{name}") for name in ("gate", "up")]
                params[f"{prefix}_gate_up"] = jnp.concatenate(pair, axis=-1)
        for name, value in params.items():
            setattr(module, name, nnx.Param(value))
        return module

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., H] -> [..., H]."""
        params = {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Param)}
        return tiled_mlp(**self.config.arguments(x, params, self.dtype))
