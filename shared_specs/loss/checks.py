"""Checks of the losses, before any work: the same text in both halves."""

# pyright: reportUnnecessaryIsInstance=false

import math
from typing import Never

from shared_specs.config import LOSS_OUTPUTS, LOSS_REDUCTIONS, HalfNames, LossOptions
from shared_specs.core import checks
from shared_specs.core.checks import Operand, check_devices, check_float, check_kinds, check_weight, is_one_of
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape


def check_number(function: str, name: str, value: object, rule: str, *, least: float, most: float = math.inf) -> None:
    """Check that a value is a number between two others.

    Raises:
        SpecError: it is out of this range, or NaN.
        TypeError: it is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail_type(function, name, "a number", type(value).__name__)
    if not least <= value <= most:  # also refuses NaN
        fail(function, name, rule, value)


def check_model_loss(function: str, loss: LossOptions, has_aux: bool) -> None:
    """Check what `tiled_model_loss` is given beside tensors. Scale and cap of the logits are the model's own.

    Raises:
        SpecError, TypeError: as `check_loss_options`; has_aux is no bool.
        UnsupportedError: the loss has a scale or a cap.
    """
    check_loss_options(function, loss)
    for name, default in (("logit_softcap", None), ("logit_scale", 1.0)):
        if getattr(loss, name) != default:
            advice = "It is taken from the model."
            raise UnsupportedError(
                error_text(function, f"loss.{name}", str(default), getattr(loss, name), advice=advice)
            )
    checks.check_flags(function, has_aux=has_aux)


def check_loss_options(function: str, loss: object, argument: str = "loss") -> None:
    """Check every field of LossOptions except the arrays, `class_weight` and `num_valid`. argument: what it is passed as.

    Raises:
        SpecError: a value is out of range.
        TypeError: a value is of the wrong kind.
    """
    if not isinstance(loss, LossOptions):
        fail_type(function, argument, "a LossOptions", type(loss).__name__)
    if isinstance(loss.ignore_index, bool) or not isinstance(loss.ignore_index, int):
        fail_type(function, f"{argument}.ignore_index", "an integer", type(loss.ignore_index).__name__)
    check_number(function, f"{argument}.label_smoothing", loss.label_smoothing, "in [0, 1]", least=0.0, most=1.0)
    check_number(function, f"{argument}.z_loss", loss.z_loss, ">= 0", least=0.0)
    check_number(function, f"{argument}.logit_scale", loss.logit_scale, "finite", least=-1e300, most=1e300)
    if loss.logit_softcap is not None:
        check_number(function, f"{argument}.logit_softcap", loss.logit_softcap, "> 0", least=5e-324)
    if not is_one_of(loss.reduction, LOSS_REDUCTIONS):
        fail(function, f"{argument}.reduction", "one of " + ", ".join(LOSS_REDUCTIONS), repr(loss.reduction))
    if not isinstance(loss.outputs, tuple):
        fail_type(function, f"{argument}.outputs", "a tuple of names", type(loss.outputs).__name__)
    for name in loss.outputs:
        if not is_one_of(name, LOSS_OUTPUTS):
            fail(function, f"{argument}.outputs", "among " + ", ".join(LOSS_OUTPUTS), repr(name))
    checks.check_count(function, f"{argument}.top_k", loss.top_k)
    if (loss.top_k is None) == ("top_logprobs" in loss.outputs):
        rule = f'a number beside "top_logprobs" in {argument}.outputs, and None without it'
        fail(function, f"{argument}.top_k", rule, loss.top_k)
    if loss.num_valid is not None and loss.reduction != "mean":
        fail(function, f"{argument}.num_valid", f'left out unless {argument}.reduction is "mean"', loss.num_valid)
    if isinstance(loss.num_valid, bool):
        fail_type(function, f"{argument}.num_valid", "a number or a 0-d array", "bool")
    if isinstance(loss.num_valid, int | float):
        check_number(function, f"{argument}.num_valid", loss.num_valid, "> 0", least=5e-324)


def check_count(function: str, count: float) -> None:
    """Check the number that an array of `num_valid` holds, where it can be read. 0 stays, as it does where it cannot.

    Raises:
        SpecError: it is negative.
    """
    if count < 0:
        fail(function, "loss.num_valid", "> 0", count)


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
    token_weight: Operand | None = None,
    vocab: int | None = None,
    top_k: int | None = None,
    master_weights: bool = False,
) -> None:
    """Check the shapes, dtypes and devices of one call: x [..., H], the weight of V entries, targets [...].

    `vocab`: V where `weight` is only a partition of the vocabulary. `top_k`: how many entries are asked for of each token.

    Raises:
        SpecError: one of them disagrees with the others.
    """
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
        check_weight(function, "weight", weight, ("hidden", hidden), ("vocab", rows), names)
    if targets.shape != x.shape[:-1]:
        shapes = f"x is {show_shape(x.shape)}"
        fail(function, "targets", show_shape(x.shape[:-1]), show_shape(targets.shape), shapes=shapes)
    check_targets_dtype(function, "targets", targets)
    if bias is not None and bias.shape != (rows,):
        fail(function, "bias", show_shape((rows,)), show_shape(bias.shape))
    entries = rows if vocab is None else vocab
    if class_weight is not None and class_weight.shape != (entries,):
        fail(function, "loss.class_weight", show_shape((entries,)), show_shape(class_weight.shape))
    if top_k is not None and top_k > entries:
        fail(function, "loss.top_k", f"<= {entries}, the entries of the vocabulary", top_k)
    if num_valid is not None and num_valid.shape != ():
        fail(function, "loss.num_valid", "a number or a 0-d array", show_shape(num_valid.shape))
    if token_weight is not None:
        if token_weight.shape != targets.shape:
            rule = f"{show_shape(targets.shape)}, a number for each target"
            advice = "Give tokens that count alike the same number."
            fail(function, "token_weight", rule, show_shape(token_weight.shape), advice=advice)
        check_float(function, "token_weight", token_weight.dtype)
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    check_kinds(function, x, others, master_weights=master_weights)
    fixed = {"targets": targets, "loss.class_weight": class_weight, "token_weight": token_weight}
    check_devices(function, {"x": x, **others, **fixed})


def check_vocab_parallel_logits(function: str, logits: Operand, target: Operand) -> None:
    """Check logits [*tokens, V / R] and target [*tokens]: shapes, dtypes, devices.

    Raises:
        SpecError: one of them disagrees.
    """
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
    """Check that labels are int64 or int32.

    Raises:
        SpecError: they are not.
    """
    if targets.dtype not in ("int64", "int32"):
        fail(function, name, "of dtype int64, int32", targets.dtype)


def fail_target(function: str, target: int, vocab: int, ignore_index: int) -> Never:
    """Refuse a label that is neither an entry of the vocabulary nor `ignore_index`.

    Raises:
        SpecError: always.
    """
    rule = f"in [0, {vocab}) or ignore_index = {ignore_index}"
    fail(function, "targets", rule, target, advice="Mark tokens without a label with ignore_index.")


def check_head(function: str, weight: checks.Operand, bias: checks.Operand | None, names: HalfNames) -> None:
    """Check the operands of a linear cross entropy before there is an x; one row of the weight's width stands in for it.

    Raises:
        SpecError: a shape, dtype or device disagrees.
    """
    checks.check_float(function, "weight", weight.dtype)
    into = 0 if names.input_dim_first else 1
    check_linear_cross_entropy(
        function,
        x=checks.Operand((1, weight.shape[into] if len(weight.shape) == 2 else 0), weight.dtype),
        weight=weight,
        targets=checks.Operand((1,), "int32"),
        bias=bias,
        class_weight=None,
        num_valid=None,
        names=names,
    )
