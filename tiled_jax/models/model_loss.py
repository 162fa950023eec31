"""`tiled_model_loss`: the cross entropy of any JAX model's logits, without its logits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from shared_specs.config import LossOptions, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.loss import checks as loss_checks
from tiled_jax.core.arrays import array
from tiled_jax.loss.api import linear_cross_entropy
from tiled_jax.models.others.equations import Equations
from tiled_jax.models.others.head import Head, NoHeadError, head_of

_NAME = "tiled_model_loss"


def tiled_model_loss(
    model: Callable[..., Any],
    targets: jax.Array,
    *args: Any,
    loss: LossOptions = LossOptions(),
    num_shards: int | None = None,
    tiling: Tiling | None = None,
    backend: str = "auto",
    token_weight: jax.Array | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Any:
    """Return the cross entropy of the logits model(*args, **kwargs), one shard of tokens at a time. The logits never exist.

    The model is traced. Its last product with a weight [H, V] is its head, as a layer, an einsum or an embedding that is used
    again. Behind it there may be a bias, a factor, a softcap (c tanh(z / c)), casts and reshapes. The hidden states in front of
    the head go to `tiled_linear_cross_entropy`, and the rest of the model runs as it is. Gradients reach everything that the
    model reads. Call it inside `jax.jit`, as the model is traced at every call.

    Args:
        model: an nnx.Module, or a function (a linen module's `apply`). It returns logits [*tokens, V].
        targets: [*tokens], int32 | int64 | uint16 | uint8: shifted already. Entries of the vocabulary, or loss.ignore_index.
        args, kwargs: what the model is called with.
        loss, num_shards, tiling, backend, token_weight: as in `tiled_linear_cross_entropy`. The model's own softcap and factor
            are taken from it, so that loss.logit_softcap and loss.logit_scale are refused.
        has_aux: the model returns (logits, aux), and this function (loss, aux). aux is what needs no logits.
    Returns:
        What `tiled_linear_cross_entropy` returns. nnx modules that are the model or arguments have changed as in a call of the
        model: random streams, statistics, caches.
    Numerics: as in `tiled_linear_cross_entropy`, of the dtype in which the model's head multiplies.
    Memory: that of the model without its head, and of `tiled_linear_cross_entropy`.
    Raises:
        UnsupportedError: the logits are made in another way; the text says what was found. SpecError: the targets' shape is not
        that of the logits without their last dim. TypeError: model is no function, or returns no array.
    Source: `tiled_linear_cross_entropy`.
    Example:
        >>> import jax.numpy as jnp
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Embed(32, 8, rngs=rngs), nnx.Linear(8, 32, rngs=rngs))
        >>> tokens = jnp.arange(10).reshape(2, 5)
        >>> tiled_model_loss(model, tokens[:, 1:], tokens[:, :-1]).shape
        ()
    """
    if not callable(model):
        fail_type(_NAME, "model", "an nnx.Module or a function", type(model).__name__)
    targets = array(_NAME, "targets", targets)
    loss_checks.check_model_loss(_NAME, loss, has_aux)
    traced = _ModelCall(model, args, kwargs, has_aux)
    head = traced.head(tuple(targets.shape))
    result = linear_cross_entropy(
        _NAME,
        head.x,
        head.weight,
        targets,
        head.bias,
        replace(loss, logit_softcap=head.softcap, logit_scale=head.scale),
        num_shards,
        tiling,
        backend,
        token_weight=token_weight,
    )
    aux = traced.others()
    return (result, aux) if has_aux else result


class _ModelCall:
    """A call of a model as a program of arrays; Flax modules among its arguments are updated when it has run."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool) -> None:
        everything = [model, *args, *kwargs.values()]
        self._modules = [each for each in everything if isinstance(each, nnx.Module)]
        graph, state = nnx.split(self._modules)
        # What stands for a parameter that its module gathers, in `parallelize`, is no value.
        held, self._before = _values(state)
        self._after = self._before
        arguments = [None if isinstance(each, nnx.Module) else each for each in (*args, *kwargs.values())]
        leaves, form = jax.tree.flatten(arguments)
        given = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        arrays = [leaf for leaf, is_array in zip(leaves, given, strict=True) if is_array]

        def call(held: list[Any], arrays: list[Any]) -> Any:
            modules = nnx.merge(graph, self._before(held))
            fed, own = iter(arrays), iter(modules)
            rest = [next(fed) if is_array else leaf for leaf, is_array in zip(leaves, given, strict=True)]
            filled = jax.tree.unflatten(form, rest)
            fn = next(own) if isinstance(model, nnx.Module) else model
            placed = [
                next(own) if isinstance(each, nnx.Module) else value
                for each, value in zip((*args, *kwargs.values()), filled, strict=True)
            ]
            result = fn(*placed[: len(args)], **dict(zip(kwargs, placed[len(args) :], strict=True)))
            logits, aux = _apart(result, has_aux)
            after, self._after = _values(nnx.split(modules)[1])
            return logits, aux, after

        closed, shape = jax.make_jaxpr(call, return_shape=True)(held, arrays)
        self._form = jax.tree.structure(shape[1:])
        self._logits, *self._rest = closed.jaxpr.outvars
        self._program = Equations(closed, [*held, *arrays])
        after = self._rest[len(jax.tree.leaves(shape[1])) :]
        before = closed.jaxpr.invars[: len(held)]
        self._changed = len(after) != len(before) or any(a is not b for a, b in zip(after, before, strict=True))

    def head(self, tokens: tuple[int, ...]) -> Head:
        logits = self._logits.aval
        if logits.ndim != len(tokens) + 1 or tuple(logits.shape[:-1]) != tokens:
            rule = f"of the shape of the logits {show_shape(tuple(logits.shape))} without their last dim"
            fail(_NAME, "targets", rule, show_shape(tokens))
        try:
            return head_of(self._program, self._logits, tokens)
        except NoHeadError as error:
            rule = "one whose logits are a product of hidden states and one weight, capped or scaled by numbers"
            advice = "Pass hidden states and the weight to tiled_linear_cross_entropy, or a function to tiled_loss."
            raise UnsupportedError(error_text(_NAME, "model", rule, str(error), advice=advice)) from None

    def others(self) -> Any:
        """Return aux, and update the modules."""
        aux, after = jax.tree.unflatten(self._form, self._program.values(self._rest))
        if self._changed:
            nnx.update(self._modules, self._after(after))
        return aux


def _values(state: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the values of a state, and a function that puts others in their place, beside what is no value."""
    leaves, form = jax.tree.flatten(state)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int)
    ]

    def filled(values: list[Any]) -> Any:
        found = list(leaves)
        for place, value in zip(places, values, strict=True):
            found[place] = value
        return jax.tree.unflatten(form, found)

    return [leaves[place] for place in places], filled


def _apart(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return logits and aux."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        fail_type(_NAME, "model", "a function that returns (logits, aux), with has_aux", type(result).__name__)
    logits, aux = result if has_aux else (result, None)
    if not isinstance(logits, jax.Array):
        advice = "" if has_aux else "Pass has_aux=True if it returns (logits, aux)."
        fail_type(_NAME, "model", "a function that returns logits", type(logits).__name__, advice=advice)
    return logits, aux
