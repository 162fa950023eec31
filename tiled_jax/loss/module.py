"""`TiledLinearCrossEntropy` for Flax nnx: the weight of a language-model head and one call of the tiled loss. No math."""

from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from shared_specs.config import JAX, LossOptions, Tiling
from shared_specs.loss import checks as loss_checks
from tiled_jax.core.arrays import array, operands
from tiled_jax.core.params import (
    Sharding,
    as_variable,
    check_dtypes,
    check_initialisers,
    check_precision,
    chosen_bias,
    held,
    init_bias,
    init_weight,
)
from tiled_jax.loss.params import loss_param_axes, loss_param_shapes, make_loss_config
from tiled_jax.tile.module_state import check_module_rngs


class TiledLinearCrossEntropy(nnx.Module):
    """A linear head and the cross entropy of its logits, which never exist as a whole: hidden states in, loss out.

    Args:
        hidden_size, vocab_size: H and V.
        bias: whether the head has one.
        loss, num_shards, tiling, backend: as in `tiled_linear_cross_entropy`. Arrays among the options become
            variables of the module that no gradient or optimizer of nnx.Param reaches.
        dtype: of the computation; None is what x and the parameters promote to, as in nnx.Linear.
        param_dtype: of the parameters. float32 beside a 16-bit dtype are master weights with float32 gradients.
        rngs: its `params` stream draws the weight, then the bias. Required.
        kernel_init, bias_init: initialisers, as nnx.Linear takes them.
        sharding: mesh axes of the (hidden, vocab) dims, such as (None, "tp"), kept as the parameters' sharding metadata.
            Making a module with it needs a mesh (`jax.set_mesh`), without it none.
        use_bias: Flax's name for bias; None leaves it to bias.
        precision: None or lax.Precision.HIGHEST, which products have anyway.
    Parameters are `weight` [H, V] and, with bias, `bias` [V].
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_linear_cross_entropy`, at construction.
    Source: derived in shared_specs/README.md.
    Example:
        >>> head = TiledLinearCrossEntropy(8, 16, num_shards=4, rngs=nnx.Rngs(0))
        >>> head(jnp.ones((2, 5, 8)), jnp.zeros((2, 5), jnp.int32)).shape
        ()
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        loss: LossOptions = LossOptions(),
        num_shards: int | None = None,
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
    ) -> None:
        bias = chosen_bias("TiledLinearCrossEntropy", bias, use_bias, False)
        shapes = loss_param_shapes(hidden_size, vocab_size, bias=bias)
        config = make_loss_config(loss, num_shards, tiling, backend)
        check_dtypes("TiledLinearCrossEntropy", dtype, param_dtype)
        check_initialisers("TiledLinearCrossEntropy", kernel_init, bias_init)
        check_precision("TiledLinearCrossEntropy", precision)
        rngs = check_module_rngs("TiledLinearCrossEntropy", rngs)
        axes, inits = loss_param_axes(sharding), {"weight": kernel_init, "bias": bias_init}
        for name, shape in shapes.items():
            metadata: dict[str, Any] = {"out_sharding": axes[name]} if axes else {}
            setattr(self, name, nnx.Param(inits[name](rngs.params(), shape, param_dtype), **metadata))
        self.class_weight = _variable(loss.class_weight)
        # A number stays an option: it is part of the program and not of the state.
        self.num_valid = None if isinstance(loss.num_valid, int | float) else _variable(loss.num_valid)
        number = loss.num_valid if self.num_valid is None else None
        self.config = replace(config, loss=replace(loss, class_weight=None, num_valid=number))
        self.dtype = dtype

    @classmethod
    def from_weights(
        cls,
        weight: jax.Array,
        *,
        bias: jax.Array | None = None,
        loss: LossOptions = LossOptions(),
        num_shards: int | None = None,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around an existing weight [H, V] and bias [V]; they become its parameters without a copy.

        Variables stay what they are: those very ones, with their type and their sharding metadata.
        """
        function = "TiledLinearCrossEntropy.from_weights"
        params = {"weight": array(function, "weight", weight)}
        params |= {} if bias is None else {"bias": array(function, "bias", bias)}
        seen = operands(params)
        loss_checks.check_head(function, seen["weight"], seen.get("bias"), JAX)
        # The smallest module with these options; its parameter is replaced by the one given.
        module = cls(1, 1, loss=loss, num_shards=num_shards, tiling=tiling, backend=backend, rngs=nnx.Rngs(0))
        for name, given in (("weight", weight), ("bias", bias)):
            if name in params:
                setattr(module, name, as_variable(given, params[name]))
        return module

    def __call__(
        self, x: jax.Array, targets: jax.Array, *, num_valid: Any = None, token_weight: jax.Array | None = None
    ) -> Any:
        """[..., H], [...] and token_weight [...] -> the loss, or a `LossResult`. `num_valid` replaces that of the options."""
        params = held("TiledLinearCrossEntropy", self, ("weight",), ("bias",))
        fixed = {name: getattr(self, name) for name in ("class_weight", "num_valid")}
        arrays = {name: None if value is None else value[...] for name, value in fixed.items()}
        if num_valid is not None:
            arrays["num_valid"] = num_valid
        return self.config.apply(x, targets, params, self.dtype, **arrays, token_weight=token_weight)


def _variable(value: Any) -> nnx.Variable | None:
    return (
        None
        if value is None
        else nnx.Variable(jnp.asarray(value if not isinstance(value, nnx.Variable) else value[...]))
    )
