"""Checks of the MLP, before any work: the same text in both halves."""

# pyright: reportUnnecessaryIsInstance=false

from collections.abc import Mapping, Sequence
from typing import Any

from shared_specs.config import ACTIVATIONS, HalfNames, Tiling
from shared_specs.core import checks
from shared_specs.core.checks import Operand, check_devices, check_flags, check_kinds, check_weight, is_one_of
from shared_specs.errors import fail, fail_type, show_shape

BIASES = ("gate", "up", "down")


def check_activation(function: str, activation: object) -> None:
    """Check that `activation` is one of the names in ACTIVATIONS.

    Raises:
        SpecError: it is not; a function is refused too: modules find its name when they are made, a call does not.
    """
    if is_one_of(activation, ACTIVATIONS):
        return
    name = getattr(activation, "__name__", type(activation).__name__)
    got = f"the function {name}" if callable(activation) else repr(activation)
    advice = "Give its name: a call tries out no function, a module does." if callable(activation) else ""
    fail(function, "activation", "one of " + ", ".join(ACTIVATIONS), got, advice=advice)


def check_fused(function: str, gated: bool, fused_gate_up: bool) -> None:
    """Check the flags of a gated MLP and of its fused [gate; up] weight.

    Raises:
        SpecError: fused_gate_up without a gate.
        TypeError: one is neither True nor False.
    """
    check_flags(function, gated=gated, fused_gate_up=fused_gate_up)
    if fused_gate_up and not gated:
        fail(function, "fused_gate_up", "False without a gate", fused_gate_up)


def check_fused_biases(function: str, biases: Sequence[str]) -> None:
    """Check that a fused [gate; up] weight has both biases or neither.

    Raises:
        SpecError: it has one.
    """
    if ("gate" in biases) != ("up" in biases):
        fail(function, "biases", "given for both gate and up, or neither, with fused_gate_up", ", ".join(biases))


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
    """Check the shapes, dtypes and devices of one MLP call. `weights` holds w_up, w_down and, where gated, w_gate.

    The dtypes are those after autocast's casts: x and every weight must agree. With `master_weights` float32 weights also go
    with a 16-bit x, as in Flax, where they are cast to x's dtype inside the call.

    Raises:
        SpecError: one of them disagrees, or the activation is unknown.
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
    check_weight(function, "w_up", up, ("hidden", hidden), ("intermediate", intermediate), names)
    if "w_gate" in weights:
        check_weight(function, "w_gate", weights["w_gate"], ("hidden", hidden), ("intermediate", intermediate), names)
    down = weights["w_down"]
    if down.shape[0 if names.input_dim_first else 1] != intermediate:
        if down_out == intermediate:
            down_out = down.shape[0 if names.input_dim_first else 1]
        check_weight(function, "w_down", down, ("intermediate", intermediate), ("out", down_out), names)
    widths = {"gate": intermediate, "up": intermediate, "down": down_out}
    _check_biases(function, biases, widths, gated="w_gate" in weights)
    others = {**weights, **{f"biases[{name!r}]": bias for name, bias in biases.items()}}
    check_kinds(function, x, others, master_weights=master_weights)
    check_devices(function, {"x": x, **others})


def hidden_sizes(weights: Mapping[str, Operand], names: HalfNames) -> dict[str, int]:
    """H as each weight has it: the input size of w_gate and w_up, the output size of w_down."""
    into = 0 if names.input_dim_first else 1
    return {name: w.shape[1 - into if name == "w_down" else into] for name, w in weights.items()}


def agreed_hidden(sizes: Mapping[str, int]) -> int | None:
    """Return the H of at least two weights."""
    found = list(sizes.values())
    return next((size for size in found if found.count(size) > 1), None)


def _check_width(function: str, x: Operand, weights: Mapping[str, Operand], names: HalfNames) -> None:
    """Raise SpecError about x, which goes with the other dim of w_up, where two of the weights agree about another H.

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


def check_mlp_weights(
    function: str,
    *,
    weights: Mapping[str, checks.Operand],
    biases: Mapping[str, checks.Operand],
    activation: str,
    names: HalfNames,
) -> None:
    """Check the operands of an MLP before there is an x; one row of the hidden size, in w_up's dtype, stands in for it.

    Raises:
        SpecError: a shape, dtype or device disagrees.
    """
    up = weights["w_up"]
    checks.check_float(function, "w_up", up.dtype)
    hidden = 0
    if all(len(weight.shape) == 2 for weight in weights.values()):
        sizes = hidden_sizes(weights, names)
        agreed = agreed_hidden(sizes)
        hidden = sizes["w_up"] if agreed is None else agreed
    x = checks.Operand((1, hidden), up.dtype)
    check_mlp(function, x=x, weights=weights, biases=biases, activation=activation, names=names)


def mlp_operands(
    function: str, w_gate: Any, w_up: Any, w_down: Any, biases: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights there are, by name, and the biases, as they are given."""
    if biases is not None and not isinstance(biases, Mapping):
        fail_type(function, "biases", "a mapping or None", type(biases).__name__)
    gate = {} if w_gate is None else {"w_gate": w_gate}
    return {**gate, "w_up": w_up, "w_down": w_down}, dict(biases or {})


def module_shapes(
    function: str,
    hidden_size: int,
    intermediate_size: int,
    *,
    gated: bool,
    bias: bool,
    fused_gate_up: bool,
    names: HalfNames,
) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter of a module, weights first; SpecError, TypeError for what is no size or flag."""
    checks.check_sizes(function, {"hidden_size": hidden_size, "intermediate_size": intermediate_size})
    checks.check_flags(function, gated=gated, bias=bias, fused_gate_up=fused_gate_up)
    H, I = int(hidden_size), int(intermediate_size)  # noqa: E741
    ups = {"gate_up": (H, 2 * I)} if fused_gate_up else {"gate": (H, I), "up": (H, I)} if gated else {"up": (H, I)}
    features = {**ups, "down": (I, H)}
    shapes: dict[str, tuple[int, ...]] = {f"w_{name}": names.weight_shape(*sizes) for name, sizes in features.items()}
    return shapes | ({f"b_{name}": sizes[1:] for name, sizes in features.items()} if bias else {})


def module_tiling(
    function: str,
    activation: str,
    gated: bool,
    fused_gate_up: bool,
    num_shards: int | None,
    keep: float,
    tiling: Tiling | None,
    backend: str,
    *,
    names: HalfNames,
    usable: Mapping[str, str | None],
) -> Tiling:
    """Return the tiling of a module whose options are right: they are checked when it is made, with the call's errors."""
    check_activation(function, activation)
    check_fused(function, gated, fused_gate_up)
    checks.check_backend(function, backend, names, usable)
    return checks.resolve_tiling(function, num_shards, keep, tiling, token_axes=names.half == "jax")
