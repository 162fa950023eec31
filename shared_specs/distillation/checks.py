"""Checks of a distillation loss, before any work: the same text in both halves."""

from collections.abc import Mapping
from typing import Any

from shared_specs.config import HalfNames, LossOptions
from shared_specs.core.checks import Operand, check_devices, check_float, check_weight, is_one_of
from shared_specs.distillation.objective import KINDS, Objective
from shared_specs.errors import fail, fail_type, show_shape
from shared_specs.loss.checks import check_loss_options, check_number, check_targets_dtype

_PLAIN = LossOptions()
# Fields of LossOptions that a distillation has no use for, and those that the logits of a teacher have none for.
_UNUSED = ("label_smoothing", "z_loss", "class_weight", "outputs")
_OF_A_LOSS = (*_UNUSED, "ignore_index", "reduction", "num_valid")


def check_objective(
    function: str,
    kind: object,
    temperature: object,
    beta: object,
    weight_hard: object,
    weight_soft: object,
    *,
    has_targets: bool,
) -> Objective:
    """Return what is minimised, once every number of it is right.

    Raises:
        SpecError: a number is out of its range, or has no use.
        TypeError: one is no number.
    """
    if not is_one_of(kind, KINDS):
        fail(function, "kind", "one of " + ", ".join(KINDS), repr(kind))
    check_number(function, "temperature", temperature, "> 0", least=5e-324, most=1e300)
    check_number(function, "beta", beta, "in [0, 1]", least=0.0, most=1.0)
    if kind == "jsd" and beta in (0, 1):
        advice = 'There it is 0 for any student: pass kind="forward_kl" or "reverse_kl".'
        fail(function, "beta", 'between 0 and 1 for kind="jsd"', beta, advice=advice)
    if kind != "jsd" and beta != Objective.beta:
        fail(function, "beta", 'left out unless kind is "jsd"', beta)
    check_number(function, "weight_hard", weight_hard, ">= 0", least=0.0, most=1e300)
    if weight_hard and not has_targets:
        fail(function, "weight_hard", "0 without targets", weight_hard, advice="Pass the labels as targets.")
    if weight_soft is None:
        check_number(function, "weight_hard", weight_hard, "in [0, 1] without weight_soft", least=0.0, most=1.0)
        weight_soft = 1.0 - float(weight_hard)  # type: ignore[arg-type]
    check_number(function, "weight_soft", weight_soft, ">= 0", least=0.0, most=1e300)
    names = ("temperature", "beta", "weight_hard", "weight_soft")
    values = (temperature, beta, weight_hard, weight_soft)
    numbers: dict[str, Any] = {name: float(each) for name, each in zip(names, values, strict=True)}  # type: ignore[arg-type]
    return Objective(kind=kind, **numbers)  # type: ignore[arg-type]


def check_options(function: str, loss: object, loss_teacher: object) -> None:
    """Check the options of the loss, and of the teacher's logits where they have their own.

    Raises:
        SpecError: a value is out of range, or given where it has no use.
        TypeError: a value is of the wrong kind.
    """
    if not isinstance(loss, LossOptions):
        fail_type(function, "loss", "a LossOptions", type(loss).__name__)
    check_loss_options(function, loss)
    _refuse_unused(function, "loss", loss, _UNUSED)
    if loss_teacher is None:
        return
    if not isinstance(loss_teacher, LossOptions):
        fail_type(function, "loss_teacher", "a LossOptions or None", type(loss_teacher).__name__)
    check_loss_options(function, loss_teacher, "loss_teacher")
    _refuse_unused(function, "loss_teacher", loss_teacher, _OF_A_LOSS)


def _refuse_unused(function: str, argument: str, loss: LossOptions, unused: tuple[str, ...]) -> None:
    for name in unused:
        value, plain = getattr(loss, name), getattr(_PLAIN, name)
        if value is not plain if plain is None else value != plain:  # an array is no None, and is compared with nothing
            got = "a value" if plain is None else repr(value)
            fail(function, f"{argument}.{name}", "left out", got, advice="A distillation has no use for it.")


def check_distillation(
    function: str,
    operands: Mapping[str, Operand | None],
    names: HalfNames,
    *,
    master_weights: bool = False,
) -> None:
    """Check the shapes, dtypes and devices of one call, by the names of its arguments.

    student [..., H], teacher [..., G], weights of one vocabulary, biases [V], targets and token_weight [...], num_valid [].

    Raises:
        SpecError: one of them disagrees with the others.
    """
    student = operands["student"]
    assert student is not None
    vocab = None
    for whose in ("student", "teacher"):
        x, weight, bias = (operands[name] for name in (whose, f"w_{whose}", f"bias_{whose}"))
        assert x is not None
        assert weight is not None
        vocab = _check_head(function, whose, (x, weight, bias), vocab, names, master_weights=master_weights)
        if x.shape[:-1] != student.shape[:-1]:
            rule = f"[{', '.join(map(str, student.shape[:-1]))}, hidden], a row for each of the student's"
            fail(function, whose, rule, show_shape(x.shape))
    lead, shapes = student.shape[:-1], f"student is {show_shape(student.shape)}"
    for name in ("targets", "token_weight"):
        each = operands[name]
        if each is not None and each.shape != lead:
            fail(function, name, show_shape(lead), show_shape(each.shape), shapes=shapes)
    targets, token_weight, num_valid = (operands[name] for name in ("targets", "token_weight", "loss.num_valid"))
    if targets is not None:
        check_targets_dtype(function, "targets", targets)
    if token_weight is not None:
        check_float(function, "token_weight", token_weight.dtype)
    if num_valid is not None and num_valid.shape != ():
        fail(function, "loss.num_valid", "a number or a 0-d array", show_shape(num_valid.shape))
    check_devices(function, {name: each for name, each in operands.items() if name != "loss.num_valid"})


def _check_head(
    function: str,
    whose: str,
    head: tuple[Operand, Operand, Operand | None],
    vocab: int | None,
    names: HalfNames,
    *,
    master_weights: bool,
) -> int:
    """Return V, once hidden states, weight and bias agree with each other and with the vocabulary of the other head."""
    x, weight, bias = head
    if len(x.shape) < 2:
        fail(function, whose, "[tokens, hidden] or more dims", show_shape(x.shape))
    if len(weight.shape) != 2:
        fail(function, f"w_{whose}", f"a matrix {names.layout}", show_shape(weight.shape))
    into = 0 if names.input_dim_first else 1
    entries, hidden = weight.shape[1 - into], x.shape[-1]
    if weight.shape[into] != hidden:
        if hidden not in weight.shape:
            fail(function, whose, f"[..., {weight.shape[into]}], the input size of w_{whose}", show_shape(x.shape))
        check_weight(function, f"w_{whose}", weight, ("hidden", hidden), ("vocab", weight.shape[into]), names)
    if vocab is not None and entries != vocab:
        advice = "Cut the rows that pad one of them away: both heads need the same vocabulary."
        fail(function, f"w_{whose}", f"of w_student's {vocab} entries", entries, advice=advice)
    if bias is not None and bias.shape != (entries,):
        fail(function, f"bias_{whose}", show_shape((entries,)), show_shape(bias.shape))
    check_float(function, whose, x.dtype)
    wide_too = master_weights and x.dtype in ("bfloat16", "float16")
    for name, each in ((f"w_{whose}", weight), (f"bias_{whose}", bias)):
        if each is not None and each.dtype != x.dtype and not (wide_too and each.dtype == "float32"):
            fail(function, name, f"of {whose}'s dtype {x.dtype}", each.dtype, advice="Cast one of them.")
    return entries
