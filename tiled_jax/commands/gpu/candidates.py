"""What `tune` measures of the Pallas kernels: every candidate of an op, and every way to make a part of an MLP."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shared_specs.app.gpu.worker import Variant
from shared_specs.config import LossOptions
from shared_specs.kernels.blocks import CANDIDATES, Blocks
from tiled_jax.commands.gpu.device import Program, variant
from tiled_jax.commands.gpu.kernels import LAUNCHES, Operands, interpreted, kernel_questions
from tiled_jax.loss.kernels.cross_entropy import Columns, RowCoefficients, statistics_and_gradient
from tiled_jax.mlp.kernels.dgated import dgated
from tiled_jax.mlp.kernels.glu_elementwise import glu_backward
from tiled_jax.mlp.kernels.glu_up import glu_up
from tiled_jax.mlp.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.mlp.kernels.linear import dx, linear
from tiled_jax.mlp.kernels.weight_gradient import weight_gradient
from tiled_jax.mlp.steps import XLA

Array = jax.Array


def _auxiliary(x: Array, w_gate: Array, w_up: Array, **options: Any) -> Array:
    return interpreted(glu_up_auxiliary)(x, w_up, XLA.linear(x, w_gate, None), activation="silu", **options)


def _loss(logits: Array, targets: Array, **options: Any) -> tuple[Array, ...]:
    ones = jnp.ones(logits.shape[0])
    of_rows: Any = Columns(targets), RowCoefficients(ones, ones)
    found, dlogits = interpreted(statistics_and_gradient)(logits, *of_rows, options=LossOptions(), **options)
    return dlogits, found.top + jnp.log(found.total), found.target


# Op -> (the question of `kernel_questions` whose operands, library's form and names of results it shares; its kernel there).
QUESTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "glu_up": ("up", lambda *a, **options: interpreted(glu_up)(*a, activation="silu", **options)),
    "glu_up_aux": ("up", _auxiliary),
    "dgated": ("down", lambda *a, **options: interpreted(dgated)(*a, activation="silu", **options)),
    "linear": ("linear", lambda *a, **options: interpreted(linear)(*a, **options)),
    "dx": ("dx", lambda *a, **options: interpreted(dx)(*a, **options)),
    "weight_gradient": ("weight_gradient", lambda *a, **options: interpreted(weight_gradient)(*a, **options)),
    "glu_elementwise": ("glu_backward", lambda *a, **o: interpreted(glu_backward)(*a, activation="silu", **o)),
    "cross_entropy": ("cross_entropy", _loss),
}


def candidates(op: str, *, tokens: int, hidden: int, width: int, vocab: int, dtype: Any) -> dict[str, Variant]:
    """XLA's form, then the op's kernel with every block size that `tune` tries, on the same operands."""
    question, kernel = QUESTIONS[op]
    library = kernel_questions(tokens, hidden, width, max(1, tokens // 2), vocab, dtype)[question]()["xla"]
    program: Program = library.run  # type: ignore[assignment]

    def trying(blocks: Blocks) -> Variant:
        return variant(
            partial(kernel, blocks=blocks),
            *program.arguments,
            names=program.names,
            over=program.over,
            launches=LAUNCHES,
        )

    return {"xla": library} | {str(number): trying(blocks) for number, blocks in enumerate(CANDIDATES["pallas"][op])}


def ways(
    part: str,
    chosen: Mapping[str, Mapping[str, Any]],
    *,
    tokens: int,
    hidden: int,
    width: int,
    vocab: int,
    dtype: Any,
) -> dict[str, Variant]:
    """Return every way to make that part of an MLP, the kernels with these blocks; XLA's products first."""
    o = Operands(tokens, hidden, width, dtype)

    def blocks(op: str) -> dict[str, Blocks]:
        return {"blocks": Blocks(**chosen[op])} if op in chosen else {}

    def vendor_up(x: Array, w_gate: Array, w_up: Array) -> Array:
        return XLA.hidden(x, {"w_gate": w_gate, "w_up": w_up}, "silu")[0]

    def vendor_down(dy: Array, w_down: Array, gate: Array, up: Array) -> tuple[Array, ...]:
        pre = {"gate": gate, "up": up}
        h, d = XLA.pre_activation_gradients(dy, pre, w_down, "silu")
        return d["gate"], d["up"], h

    like: dict[str, Any] = {"launches": LAUNCHES}
    if part == "up":
        operands, names = (o.rows(0), o.up(1), o.up(2)), ("h",)
        kernels = {
            "auxiliary": partial(_auxiliary, **blocks("glu_up_aux")),
            "dual": partial(QUESTIONS["glu_up"][1], **blocks("glu_up")),
        }
    else:
        operands, names = (o.rows(0), o.down(1), o.wide(2), o.wide(3)), ("dgate", "dup", "h")
        kernels = {"dgated": partial(QUESTIONS["dgated"][1], **blocks("dgated"))}
        like["over"] = (2, 3)
    vendor = variant(vendor_up if part == "up" else vendor_down, *operands, names=names, library=True, **like)
    return {"vendor": vendor} | {name: variant(fn, *operands, names=names, **like) for name, fn in kernels.items()}
