"""Tells from inside a compiled program when a layer is through its forward or its backward."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax

Heard = Callable[[Literal["forward", "backward"]], None]


def watched(x: jax.Array, heard: Heard | None) -> jax.Array:
    """Return x, a layer's result; when it is there heard("forward") is called, and heard("backward") when its gradient is.

    On every device, and again where `jax.checkpoint` computes the layer again. A program with such calls is not kept by JAX's
    persistent compilation cache. heard: hashable; None tells nobody and adds nothing to the program.
    """
    return x if heard is None else _watched(heard, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(heard: Heard, x: jax.Array) -> jax.Array:
    _tell(heard, "forward", x)
    return x


def _forward(heard: Heard, x: jax.Array) -> tuple[jax.Array, None]:
    return _watched(heard, x), None


def _backward(heard: Heard, _: None, g: jax.Array) -> tuple[jax.Array]:
    _tell(heard, "backward", g)
    return (g,)


_watched.defvjp(_forward, _backward)


def _tell(heard: Heard, phase: Literal["forward", "backward"], x: jax.Array) -> None:
    """Call back with one element, so that the call waits for the array."""
    jax.debug.callback(lambda _: heard(phase), x[(0,) * x.ndim])
