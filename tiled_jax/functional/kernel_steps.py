"""The steps of one shard of the MLP by Pallas kernels, each with the derivative of the formula it stands for.

Which kernel makes which product is `Kernels.paths`; the formulas are in `shard_math.py`. Kernels are imported where they
are called: Mosaic is of no use where none runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from shared_specs.blocks import PALLAS_UNMEASURED, Paths

Weights = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Kernels:
    """Static: Pallas kernels run, those that `paths` names; with `interpret` in JAX's GPU interpreter.

    token_order: sums over shards are made in the order of the tokens, so that they do not depend on where shards end.
    """

    interpret: bool
    paths: Paths = PALLAS_UNMEASURED
    token_order: bool = False


def through_kernel(kernel: Callable[..., Any], formula: Callable[..., Any], kernels: Kernels, **static: Any) -> Any:
    """`kernel` of the same operands as `formula`, whose derivative is the formula's.

    The first derivative is the custom_vjp's own: only a derivative of the backward differentiates this.
    """
    from tiled_jax.kernels.common import interpreter

    call = jax.custom_jvp(lambda *operands: kernel(*operands, interpreter() if kernels.interpret else None, **static))
    call.defjvp(lambda primals, tangents: jax.jvp(formula, primals, tangents))
    return call


def gate_and_up(x: jax.Array, w: Weights, interpret: Any) -> dict[str, jax.Array]:
    """gate and up [t, I]."""
    from tiled_jax.kernels import glu_up

    gate, up = glu_up.gate_and_up(
        x, w["w_gate"], w["w_up"], b_gate=w.get("b_gate"), b_up=w.get("b_up"), interpret=interpret
    )
    return {"gate": gate, "up": up}


def hidden(
    x: jax.Array, w: Weights, interpret: Any, *, activation: str, keep: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h [t, I] of a gated MLP, and with `keep` gate and up."""
    from tiled_jax.kernels.glu_up import glu_up

    options: dict[str, Any] = {"activation": activation, "keep": keep, "interpret": interpret}
    found = glu_up(x, w["w_gate"], w["w_up"], b_gate=w.get("b_gate"), b_up=w.get("b_up"), **options)
    return (found[0], {"gate": found[1], "up": found[2]}) if keep else (found, {})


def hidden_of_gate(
    x: jax.Array, w_up: jax.Array, b_up: jax.Array | None, gate: jax.Array, interpret: Any, *, activation: str
) -> jax.Array:
    """h [t, I] of a gated MLP whose gate is there."""
    from tiled_jax.kernels.glu_up_aux import glu_up_auxiliary

    return glu_up_auxiliary(x, w_up, gate, b_up=b_up, activation=activation, interpret=interpret)


def activated(pre: Mapping[str, jax.Array], interpret: Any, *, activation: str) -> jax.Array:
    """h [t, I] from the pre-activations."""
    from tiled_jax.kernels.glu_elementwise import glu

    return glu(pre.get("gate"), pre["up"], activation=activation, interpret=interpret)


def dgated(
    dy: jax.Array, pre: Mapping[str, jax.Array], w_down: jax.Array, interpret: Any, *, activation: str
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h, and dgate and dup, of a gated MLP."""
    from tiled_jax.kernels.dgated import dgated as kernel

    dgate, dup, h = kernel(dy, w_down, pre["gate"], pre["up"], activation=activation, interpret=interpret)
    return h, {"gate": dgate, "up": dup}


def activation_gradients(
    dh: jax.Array, pre: Mapping[str, jax.Array], interpret: Any, *, activation: str
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """h, and dgate (where there is a gate) and dup, from dh."""
    from tiled_jax.kernels.glu_elementwise import glu_backward

    dgate, dup, h = glu_backward(dh, pre.get("gate"), pre["up"], activation=activation, interpret=interpret)
    return h, {"up": dup} if dgate is None else {"gate": dgate, "up": dup}


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, interpret: Any) -> jax.Array:
    """x weight + bias."""
    from tiled_jax.kernels.linear import linear as kernel

    return kernel(x, weight, bias=bias, interpret=interpret)


def dx(d: Mapping[str, jax.Array], w: Mapping[str, jax.Array], interpret: Any) -> jax.Array:
    """d["up"] w["up"]^T + d["gate"] w["gate"]^T, the second where there is a gate."""
    from tiled_jax.kernels.linear import dx as kernel

    return kernel(d.get("gate"), d["up"], w.get("gate"), w["up"], interpret=interpret)


def weight_gradient(acc: jax.Array, a: jax.Array, b: jax.Array, interpret: Any) -> jax.Array:
    """acc + a^T b, in place of acc."""
    from tiled_jax.kernels.weight_gradient import weight_gradient as kernel

    return kernel(acc, a, b, interpret=interpret)
