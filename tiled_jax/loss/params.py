"""What the nnx and the linen loss module share: shapes and axes of the parameters, and the call they make with them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from shared_specs.config import JAX, LossOptions, Tiling
from shared_specs.core import checks
from shared_specs.loss import checks as loss_checks
from tiled_jax import backends
from tiled_jax.core.params import Sharding, as_computed, check_sharding
from tiled_jax.loss.api import tiled_linear_cross_entropy

_NAME = "TiledLinearCrossEntropy"


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The checked options of one module."""

    loss: LossOptions
    tiling: Tiling
    backend: str

    def apply(
        self, x: jax.Array, targets: jax.Array, params: Mapping[str, jax.Array], dtype: Any, **arrays: Any
    ) -> Any:
        """Return what `tiled_linear_cross_entropy` does of x and the parameters (by name) `as_computed`.

        `arrays`: class_weight and num_valid where they are not None; they replace those of the options. And token_weight.
        """
        x, params = as_computed(x, params, dtype)
        token_weight = arrays.pop("token_weight", None)
        given = {name: value for name, value in arrays.items() if value is not None}
        return tiled_linear_cross_entropy(
            x,
            params["weight"],
            targets,
            bias=params.get("bias"),
            loss=replace(self.loss, **given) if given else self.loss,
            tiling=self.tiling,
            backend=self.backend,
            token_weight=token_weight,
        )


def make_loss_config(loss: Any, num_shards: int | None, tiling: Tiling | None, backend: str) -> LossConfig:
    """Return the options of a module, checked when it is made and not when it is first called."""
    loss_checks.check_loss_options(_NAME, loss)
    checks.check_backend(_NAME, backend, JAX, backends.usable_backends())
    resolved = checks.resolve_tiling(_NAME, num_shards, 0.0, tiling, unused=("keep", "deterministic"), token_axes=True)
    return LossConfig(loss=loss, tiling=resolved, backend=backend)


def loss_param_shapes(hidden_size: int, vocab_size: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter."""
    checks.check_sizes(_NAME, {"hidden_size": hidden_size, "vocab_size": vocab_size})
    checks.check_flags(_NAME, bias=bias)
    hidden_size, vocab_size = int(hidden_size), int(vocab_size)
    return {"weight": (hidden_size, vocab_size)} | ({"bias": (vocab_size,)} if bias else {})


def loss_param_axes(sharding: Sharding | None) -> dict[str, tuple[str | None, ...]]:
    """Name -> mesh axes of the dims; empty without sharding."""
    if sharding is None:
        return {}
    check_sharding(_NAME, sharding, "vocab")
    return {"weight": sharding, "bias": sharding[1:]}
