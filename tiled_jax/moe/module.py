"""`TiledMoE` for Flax nnx: the parameters of a mixture of experts and one call of `tiled_moe`. No math."""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from shared_specs.config import JAX, Tiling
from shared_specs.moe import checks as moe_checks
from tiled_jax.core.arrays import array, operands
from tiled_jax.core.params import as_variable, check_dtypes, check_initialisers, init_bias, init_weight
from tiled_jax.moe.params import drawn, make_moe_config, moe_shapes
from tiled_jax.tile.module_state import check_module_rngs

_NAME = "TiledMoE"


class TiledMoE(nnx.Module):
    """A router and its gated experts, computed shard by shard.

    Args:
        hidden_size, intermediate_size: H and I, the latter of one expert.
        num_experts, top_k: E and k.
        scoring, normalize_top_k, return_router_logits: as in `tiled_moe`.
        activation: silu, gelu, gelu_tanh, relu or relu_squared, or a function that computes one of them, as in `TiledMLP`.
        num_shards, tiling, backend: as in `tiled_moe`.
        dtype: of the computation; None is what x and the parameters promote to, as in nnx.Linear.
        param_dtype: of the parameters. float32 beside a 16-bit dtype are master weights with float32 gradients.
        rngs: its `params` stream draws the parameters, in the order router, gate, up, down. Required.
        kernel_init: an initialiser, as nnx.Linear takes it, called for the matrix of each expert.
    Parameters are `w_router` [H, E], `w_gate`, `w_up` [E, H, I] and `w_down` [E, I, H]. Every device computes all experts:
    there is no expert or tensor parallelism.
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_moe`, at construction.
    Source: Jiang et al. 2024, Mixtral of Experts (arXiv 2401.04088).
    Example:
        >>> TiledMoE(8, 12, 4, 2, num_shards=4, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        normalize_top_k: bool = True,
        activation: str | Callable[..., Any] = "silu",
        return_router_logits: bool = False,
        num_shards: int | None = None,
        tiling: Tiling | None = None,
        backend: str = "auto",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        kernel_init: Initializer = init_weight,
    ) -> None:
        shapes = moe_shapes(_NAME, hidden_size, intermediate_size, num_experts)
        choice = (num_experts, top_k, scoring, normalize_top_k, activation, return_router_logits)
        self.config = make_moe_config(*choice, num_shards, tiling, backend)
        check_dtypes(_NAME, dtype, param_dtype)
        check_initialisers(_NAME, kernel_init, init_bias)
        rngs = check_module_rngs(_NAME, rngs)
        self.dtype = dtype
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(drawn(_NAME, kernel_init, rngs.params(), shape, param_dtype)))

    @classmethod
    def from_weights(
        cls,
        w_router: jax.Array,
        w_gate: jax.Array,
        w_up: jax.Array,
        w_down: jax.Array,
        *,
        top_k: int,
        scoring: str = "softmax",
        normalize_top_k: bool = True,
        activation: str | Callable[..., Any] = "silu",
        return_router_logits: bool = False,
        num_shards: int | None = None,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around existing weights ([in, out]); they become its parameters without a copy.

        Variables stay what they are: those very ones, with their type and their sharding metadata.

        Args:
            w_router: [H, E]. w_gate, w_up: [E, H, I]. w_down: [E, I, H].
        """
        function = f"{_NAME}.from_weights"
        given: dict[str, Any] = {"w_router": w_router, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
        params = {name: array(function, name, w) for name, w in given.items()}
        moe_checks.check_moe_weights(function, operands(params), JAX)
        choice = (len(params["w_up"]), top_k, scoring, normalize_top_k, activation, return_router_logits)
        config = make_moe_config(*choice, num_shards, tiling, backend, function=function)
        module = cls(1, 1, 1, 1, rngs=nnx.Rngs(0))
        module.config = config
        for name, value in params.items():
            setattr(module, name, as_variable(given[name], value))
        return module

    def __call__(self, x: jax.Array) -> Any:
        """[..., H] -> [..., H], with return_router_logits a pair of that and the logits [..., E]."""
        return self.config.of_module(_NAME, self, x)
