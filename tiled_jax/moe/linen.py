"""`TiledMoE` as a Flax linen module: the parameters of the nnx one, and its call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from shared_specs.config import Tiling
from tiled_jax.core.params import check_dtypes, check_initialisers, init_bias, init_weight
from tiled_jax.moe.params import drawn, make_moe_config, moe_shapes

_NAME = "TiledMoE"


class TiledMoE(nn.Module):
    """`tiled_jax.TiledMoE` as a linen module; its fields and parameters have the same names.

    Example:
        >>> moe, x = TiledMoE(8, 12, 4, 2, num_shards=4), jnp.ones((2, 5, 8))
        >>> moe.apply(moe.init(jax.random.key(0), x), x).shape
        (2, 5, 8)
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    scoring: str = "softmax"
    normalize_top_k: bool = True
    activation: str | Callable[..., Any] = "silu"
    return_router_logits: bool = False
    num_shards: int | None = None
    tiling: Tiling | None = None
    backend: str = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = init_weight

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        """[..., H] -> [..., H], with return_router_logits a pair of that and the logits [..., E]."""
        shapes = moe_shapes(_NAME, self.hidden_size, self.intermediate_size, self.num_experts)
        choice = (self.top_k, self.scoring, self.normalize_top_k, self.activation, self.return_router_logits)
        config = make_moe_config(self.num_experts, *choice, self.num_shards, self.tiling, self.backend)
        check_dtypes(_NAME, self.dtype, self.param_dtype)
        check_initialisers(_NAME, self.kernel_init, init_bias)
        init = partial(drawn, _NAME, self.kernel_init)
        params = {name: self.param(name, init, shape, self.param_dtype) for name, shape in shapes.items()}
        return config.call(x, params, self.dtype)
