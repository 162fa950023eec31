"""What a call must satisfy before any work is done: shapes, dtype names and numbers, never arrays.

Both halves describe their arguments as `Operand`s and call the same checks, so a bad input raises the same text in both;
only the words of `config.HalfNames` differ.
"""
# What users hand over is looked at whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Never, cast

from shared_specs.config import ACTIVATIONS, LOSS_OUTPUTS, LOSS_REDUCTIONS, HalfNames, LossOptions, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.shards import KERNEL_MULTIPLE, ShardPlan

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
BIASES = ("gate", "up", "down")


@dataclass(frozen=True)
class Operand:
    """An array as the checks see it. `device` is compared, never interpreted; "" goes with any."""

    shape: tuple[int, ...]
    dtype: str
    device: str = ""


def _is_one_of(value: object, allowed: Sequence[str]) -> bool:
    """Of strings only: an array is compared element by element."""
    return isinstance(value, str) and value in allowed


def check_activation(function: str, activation: object) -> None:
    if _is_one_of(activation, ACTIVATIONS):
        return
    name = getattr(activation, "__name__", type(activation).__name__)
    got = f"the function {name}" if callable(activation) else repr(activation)
    advice = (
        "Give its name: a function cannot be told from one that only looks like it." if callable(activation) else ""
    )
    fail(function, "activation", "one of " + ", ".join(ACTIVATIONS), got, advice=advice)


def check_keep(function: str, keep: object) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int | float):
        fail_type(function, "keep", "a number", type(keep).__name__)
    if not 0.0 <= keep <= 1.0:  # also refuses NaN
        fail(function, "keep", "in [0, 1]", keep, advice="It is the fraction of shards whose gate and up are kept.")


def check_flags(function: str, **flags: object) -> None:
    """Every flag is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            fail_type(function, name, "True or False", type(value).__name__)


def check_float(function: str, name: str, dtype: str) -> None:
    if dtype not in FLOAT_DTYPES:
        fail(function, name, "of dtype " + ", ".join(FLOAT_DTYPES), dtype)


def check_fused(function: str, gated: bool, fused_gate_up: bool) -> None:
    check_flags(function, gated=gated, fused_gate_up=fused_gate_up)
    if fused_gate_up and not gated:
        fail(function, "fused_gate_up", "False without a gate", fused_gate_up)


def check_fused_biases(function: str, biases: Sequence[str]) -> None:
    """One fused [gate; up] weight has both biases or neither."""
    if ("gate" in biases) != ("up" in biases):
        fail(function, "biases", "given for both gate and up, or neither, with fused_gate_up", ", ".join(biases))


def check_count(
    function: str, argument: str, count: object, *, x: tuple[int, ...] | None = None, advice: str = ""
) -> None:
    """x: the shape to name. It becomes text only where it is needed: a traced length cannot."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        fail_type(function, argument, "an integer or None", type(count).__name__)
    if count < 1:
        shapes = f"x is {show_shape(x)}" if x is not None else ""
        fail(function, argument, ">= 1", count, shapes=shapes, advice=advice)


def resolve_tiling(
    function: str,
    num_shards: int | None,
    keep: float,
    tiling: Tiling | None,
    *,
    x: tuple[int, ...] | None = None,
    unused: Sequence[str] = ("vocab_shards",),
    token_axes: bool = False,
) -> Tiling:
    """The checked long form of the tiling arguments; the long and the short form exclude each other.

    `unused` names the fields that the function has no use for: they must be left at their defaults. `token_axes`: whether it
    can cut tokens along mesh axes by itself.
    """
    if tiling is not None:
        if not isinstance(tiling, Tiling):
            fail_type(function, "tiling", "a Tiling or None", type(tiling).__name__)
        if num_shards is not None or keep:
            short = "num_shards" if num_shards is not None else "keep"
            fail(function, short, "left out when tiling is given", num_shards if num_shards is not None else keep)
    else:
        tiling = Tiling(num_shards=num_shards, keep=keep)
    advice = "Pass num_shards=None to let the plan choose."
    check_count(function, "num_shards", tiling.num_shards, x=x, advice=advice)
    check_count(function, "shard_tokens", tiling.shard_tokens, x=x)
    check_count(function, "memory_budget", tiling.memory_budget, x=x, advice="It is a number of bytes.")
    check_keep(function, tiling.keep)
    check_count(function, "vocab_shards", tiling.vocab_shards, x=x)
    check_flags(function, deterministic=tiling.deterministic)
    check_token_axes(function, tiling.token_axes, token_axes)
    for name in unused:
        if getattr(tiling, name):
            fail(function, name, "left out", getattr(tiling, name), advice="This function has no use for it.")
    given = [name for name in ("num_shards", "shard_tokens", "memory_budget") if getattr(tiling, name) is not None]
    if len(given) > 1:
        fail(function, "tiling", "given one of num_shards, shard_tokens, memory_budget", " and ".join(given))
    return tiling


def check_token_axes(function: str, axes: object, usable: bool) -> None:
    """An axis name, or a tuple with for each leading dim of x a name, a tuple of names, or None."""
    if axes is None:
        return
    if not usable:
        advice = "It is for tiled_mlp and tiled_linear_cross_entropy of tiled_jax."
        fail(function, "token_axes", "left out", repr(axes), advice=advice)
    names = [name for entry in _entries(axes) for name in _entries(entry)]
    if wrong := [name for name in names if name is not None and not isinstance(name, str)]:
        rule = "a name, or a tuple of names, tuples of names and None"
        fail_type(function, "token_axes", rule, f"{type(wrong[0]).__name__} in {axes!r}")
    given = [name for name in names if name is not None]
    if len({*given}) < len(given):
        fail(function, "token_axes", "each axis once", repr(axes))


def _entries(value: object) -> tuple[object, ...]:
    return cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)


def check_backend(function: str, backend: object, names: HalfNames, reasons: Mapping[str, str | None]) -> None:
    """`reasons[name]` says why a backend cannot run here; None where it can."""
    if not _is_one_of(backend, names.backends):
        fail(function, "backend", "one of " + ", ".join(names.backends), repr(backend))
    reason = reasons.get(str(backend))
    if reason is not None:
        raise UnsupportedError(
            error_text(function, "backend", "usable here", repr(backend), advice=f'{reason} Pass backend="auto".')
        )


def check_deterministic(function: str, tiling: Tiling, refused: str | None) -> None:
    """UnsupportedError where `tiling.deterministic` is asked for and `refused` says why it cannot be had."""
    if tiling.deterministic and refused is not None:
        raise UnsupportedError(error_text(function, "deterministic", "False here", True, advice=refused))


def check_deterministic_shards(function: str, plan: ShardPlan) -> None:
    """UnsupportedError where a loop that computes the shorter last shard first cannot sum over shards in token order."""
    if len(plan) > 1 and plan.tokens % plan.shard_tokens:
        raise UnsupportedError(
            error_text(
                function,
                "the length of a shard",
                "a divisor of the number of tokens for deterministic gradients of weights",
                plan.shard_tokens,
                shapes=f"there are {plan.tokens} tokens",
                advice=f"Pass a shard_tokens that divides them and is a multiple of {KERNEL_MULTIPLE}, or num_shards=1.",
            )
        )


def _check_weight(
    function: str, name: str, weight: Operand, inputs: tuple[str, int], outputs: tuple[str, int], names: HalfNames
) -> None:
    want = names.weight_shape(inputs[1], outputs[1])
    if weight.shape == want:
        return
    labels = (inputs[0], outputs[0]) if names.input_dim_first else (outputs[0], inputs[0])
    advice = f"{names.package} keeps weights {names.layout}."
    if weight.shape == want[::-1]:
        advice += " This one is transposed."
    fail(function, name, f"[{labels[0]}, {labels[1]}] = {show_shape(want)}", show_shape(weight.shape), advice=advice)


def check_mlp(
    function: str,
    *,
    x: Operand,
    weights: Mapping[str, Operand],
    biases: Mapping[str, Operand],
    activation: str,
    names: HalfNames,
    master_weights: bool = False,
) -> None:
    """Shapes, dtypes and devices of one MLP call. `weights` holds w_up, w_down and, where gated, w_gate.

    The dtypes are those after autocast's casts: x and every weight must agree. With `master_weights` float32 weights
    also go with a 16-bit x, as in Flax, where they are cast to x's dtype inside the call.
    """
    check_activation(function, activation)
    if not x.shape:
        fail(function, "x", "[hidden], [tokens, hidden] or more dims", show_shape(x.shape))
    up = weights["w_up"]
    for name, weight in weights.items():
        if len(weight.shape) != 2:
            fail(function, name, f"a matrix {names.layout}", show_shape(weight.shape))
    hidden = x.shape[-1]
    intermediate = up.shape[1 if names.input_dim_first else 0]
    down_out = weights["w_down"].shape[1 if names.input_dim_first else 0]
    if hidden not in up.shape:
        width = up.shape[0 if names.input_dim_first else 1]
        fail(function, "x", f"[..., {width}], the input size of w_up", show_shape(x.shape))
    if up.shape[0 if names.input_dim_first else 1] != hidden:  # transposed: say what was expected, from w_up itself
        _check_width(function, x, weights, names)
        intermediate = up.shape[0 if names.input_dim_first else 1]
    _check_weight(function, "w_up", up, ("hidden", hidden), ("intermediate", intermediate), names)
    if "w_gate" in weights:
        _check_weight(function, "w_gate", weights["w_gate"], ("hidden", hidden), ("intermediate", intermediate), names)
    down = weights["w_down"]
    if down.shape[0 if names.input_dim_first else 1] != intermediate:
        if down_out == intermediate:
            down_out = down.shape[0 if names.input_dim_first else 1]
        _check_weight(function, "w_down", down, ("intermediate", intermediate), ("out", down_out), names)
    widths = {"gate": intermediate, "up": intermediate, "down": down_out}
    _check_biases(function, biases, widths, gated="w_gate" in weights)
    others = {**weights, **{f"biases[{name!r}]": bias for name, bias in biases.items()}}
    _check_kinds(function, x, others, master_weights=master_weights)
    _check_devices(function, {"x": x, **others})


def hidden_sizes(weights: Mapping[str, Operand], names: HalfNames) -> dict[str, int]:
    """H as each weight has it: the input size of w_gate and w_up, the output size of w_down."""
    into = 0 if names.input_dim_first else 1
    return {name: w.shape[1 - into if name == "w_down" else into] for name, w in weights.items()}


def agreed_hidden(sizes: Mapping[str, int]) -> int | None:
    """The H of at least two weights."""
    found = list(sizes.values())
    return next((size for size in found if found.count(size) > 1), None)


def _check_width(function: str, x: Operand, weights: Mapping[str, Operand], names: HalfNames) -> None:
    """SpecError about x, which goes with the other dim of w_up, where two of the weights agree about another H.

    Weights that are all transposed agree as well: those whose H would be more than their I, as in few models, are blamed.
    """
    width, sizes = x.shape[-1], hidden_sizes(weights, names)
    hidden = agreed_hidden(sizes)
    if hidden is None or width in sizes.values():
        return
    out = 1 if names.input_dim_first else 0
    if hidden > width and all(w.shape[out] == width for name, w in weights.items() if name != "w_down"):
        return
    agreeing = [name for name, size in sizes.items() if size == hidden]
    fail(function, "x", f"[..., {hidden}], the hidden size of {', '.join(agreeing)}", show_shape(x.shape))


def _check_biases(function: str, biases: Mapping[str, Operand], widths: Mapping[str, int], *, gated: bool) -> None:
    allowed = BIASES if gated else BIASES[1:]
    for name, bias in biases.items():
        if name not in allowed:
            fail(function, "biases", "a mapping with keys among " + ", ".join(allowed), repr(name))
        if bias.shape != (widths[name],):
            fail(function, f"biases[{name!r}]", show_shape((widths[name],)), show_shape(bias.shape))


def _check_kinds(function: str, x: Operand, others: Mapping[str, Operand], *, master_weights: bool) -> None:
    check_float(function, "x", x.dtype)
    is_master = master_weights and x.dtype in ("bfloat16", "float16")
    for name, other in others.items():
        if other.dtype != x.dtype and not (is_master and other.dtype == "float32"):
            fail(function, name, f"of x's dtype {x.dtype}", other.dtype, advice="Cast one of them.")


def _check_devices(function: str, operands: Mapping[str, Operand | None]) -> None:
    """All that are somewhere are where the first of them is."""
    known = [(name, each.device) for name, each in operands.items() if each is not None and each.device]
    for name, device in known[1:]:
        first, expected = known[0]
        if device != expected:
            fail(function, name, f"on {first}'s device {expected}", device)


def _check_number(function: str, name: str, value: object, rule: str, *, least: float, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail_type(function, name, "a number", type(value).__name__)
    if not least <= value <= most:  # also refuses NaN
        fail(function, name, rule, value)


def check_loss_options(function: str, loss: object) -> None:
    """Every field of LossOptions but the arrays, `class_weight` and `num_valid`."""
    if not isinstance(loss, LossOptions):
        fail_type(function, "loss", "a LossOptions", type(loss).__name__)
    if isinstance(loss.ignore_index, bool) or not isinstance(loss.ignore_index, int):
        fail_type(function, "loss.ignore_index", "an integer", type(loss.ignore_index).__name__)
    _check_number(function, "loss.label_smoothing", loss.label_smoothing, "in [0, 1]", least=0.0, most=1.0)
    _check_number(function, "loss.z_loss", loss.z_loss, ">= 0", least=0.0)
    _check_number(function, "loss.logit_scale", loss.logit_scale, "finite", least=-1e300, most=1e300)
    if loss.logit_softcap is not None:
        _check_number(function, "loss.logit_softcap", loss.logit_softcap, "> 0", least=5e-324)
    if not _is_one_of(loss.reduction, LOSS_REDUCTIONS):
        fail(function, "loss.reduction", "one of " + ", ".join(LOSS_REDUCTIONS), repr(loss.reduction))
    if not isinstance(loss.outputs, tuple):
        fail_type(function, "loss.outputs", "a tuple of names", type(loss.outputs).__name__)
    for name in loss.outputs:
        if not _is_one_of(name, LOSS_OUTPUTS):
            fail(function, "loss.outputs", "among " + ", ".join(LOSS_OUTPUTS), repr(name))
    if loss.num_valid is not None and loss.reduction != "mean":
        fail(function, "loss.num_valid", 'left out unless loss.reduction is "mean"', loss.num_valid)
    if isinstance(loss.num_valid, bool):
        fail_type(function, "loss.num_valid", "a number or a 0-d array", "bool")
    if isinstance(loss.num_valid, int | float):
        _check_number(function, "loss.num_valid", loss.num_valid, "> 0", least=5e-324)


def check_linear_cross_entropy(
    function: str,
    *,
    x: Operand,
    weight: Operand,
    targets: Operand,
    bias: Operand | None,
    class_weight: Operand | None,
    num_valid: Operand | None,
    names: HalfNames,
    vocab: int | None = None,
    master_weights: bool = False,
) -> None:
    """Shapes, dtypes and devices of one call. `vocab`: V where `weight` is only a partition of the vocabulary."""
    if len(x.shape) < 2:
        fail(function, "x", "[tokens, hidden] or more dims", show_shape(x.shape))
    if len(weight.shape) != 2:
        fail(function, "weight", f"a matrix {names.layout}", show_shape(weight.shape))
    hidden, rows = x.shape[-1], weight.shape[1 if names.input_dim_first else 0]
    if weight.shape[0 if names.input_dim_first else 1] != hidden:
        if hidden not in weight.shape:
            width = weight.shape[0 if names.input_dim_first else 1]
            fail(function, "x", f"[..., {width}], the input size of weight", show_shape(x.shape))
        rows = weight.shape[0 if names.input_dim_first else 1]
        _check_weight(function, "weight", weight, ("hidden", hidden), ("vocab", rows), names)
    if targets.shape != x.shape[:-1]:
        shapes = f"x is {show_shape(x.shape)}"
        fail(function, "targets", show_shape(x.shape[:-1]), show_shape(targets.shape), shapes=shapes)
    check_targets_dtype(function, "targets", targets)
    if bias is not None and bias.shape != (rows,):
        fail(function, "bias", show_shape((rows,)), show_shape(bias.shape))
    entries = rows if vocab is None else vocab
    if class_weight is not None and class_weight.shape != (entries,):
        fail(function, "loss.class_weight", show_shape((entries,)), show_shape(class_weight.shape))
    if num_valid is not None and num_valid.shape != ():
        fail(function, "loss.num_valid", "a number or a 0-d array", show_shape(num_valid.shape))
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    _check_kinds(function, x, others, master_weights=master_weights)
    _check_devices(function, {"x": x, **others, "targets": targets, "loss.class_weight": class_weight})


def fail_rows(function: str, index: int, shape: tuple[int, ...], t: int) -> Never:
    """Output `index` of fn, called with t tokens, has no row per token. Lengths of t are told as such: t is how long the shard
    happened to be that it was seen with."""
    rule = "[t, ...], or [1, t, ...] where x has three or more dims, for a shard of t tokens"
    if function != "tile":
        rule = f"a scalar or {rule}"
    got = "[" + ", ".join("t" if size == t else str(size) for size in shape) + "]"
    fail(function, f"output {index} of fn", rule, got, advice="fn has to return one row for each token of its shard.")


def check_vocab_parallel_logits(function: str, logits: Operand, target: Operand) -> None:
    """Shapes, dtypes and devices of given logits [*tokens, V / R] and of their targets."""
    if len(logits.shape) < 2:
        fail(function, "vocab_parallel_logits", "[tokens, vocab] or more dims", show_shape(logits.shape))
    if target.shape != logits.shape[:-1]:
        shapes = f"vocab_parallel_logits is {show_shape(logits.shape)}"
        fail(function, "target", show_shape(logits.shape[:-1]), show_shape(target.shape), shapes=shapes)
    check_targets_dtype(function, "target", target)
    check_float(function, "vocab_parallel_logits", logits.dtype)
    if target.device != logits.device:
        fail(function, "target", f"on the logits' device {logits.device}", target.device)


def check_targets_dtype(function: str, name: str, targets: Operand) -> None:
    if targets.dtype not in ("int64", "int32"):
        fail(function, name, "of dtype int64, int32", targets.dtype)


def fail_target(function: str, target: int, vocab: int, ignore_index: int) -> Never:
    """A target that is neither an entry of the vocabulary nor `ignore_index`."""
    rule = f"in [0, {vocab}) or ignore_index = {ignore_index}"
    fail(function, "targets", rule, target, advice="Mark tokens without a label with ignore_index.")


def check_sizes(function: str, sizes: Mapping[str, object]) -> None:
    """Feature counts of a module: integers >= 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            fail_type(function, name, "an integer", type(size).__name__ if size is not None else "None")
        check_count(function, name, size)


def flat_tokens(shape: Sequence[int]) -> int:
    """T: the product of all dims but the last."""
    return math.prod(shape[:-1])
