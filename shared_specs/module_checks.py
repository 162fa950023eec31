"""What must hold of dtypes and existing weights before they become the parameters of a module."""
# What users hand over is looked at whatever its annotation says.
# pyright: reportUnnecessaryIsInstance=false

from collections.abc import Mapping
from typing import Any

from shared_specs import checks
from shared_specs.config import HalfNames
from shared_specs.errors import fail, fail_type


def check_param_dtype(function: str, name: str, dtype: str) -> None:
    """`dtype`: its name, or how it looks where it is none."""
    if dtype not in checks.FLOAT_DTYPES:
        fail(function, name, "one of " + ", ".join(checks.FLOAT_DTYPES), dtype)


def check_mlp_weights(
    function: str,
    *,
    weights: Mapping[str, checks.Operand],
    biases: Mapping[str, checks.Operand],
    activation: str,
    names: HalfNames,
) -> None:
    """The operands of an MLP before there is an x: a row of the hidden size and the dtype that they have stands in."""
    up = weights["w_up"]
    checks.check_float(function, "w_up", up.dtype)
    hidden = 0
    if all(len(weight.shape) == 2 for weight in weights.values()):
        sizes = checks.hidden_sizes(weights, names)
        agreed = checks.agreed_hidden(sizes)
        hidden = sizes["w_up"] if agreed is None else agreed
    x = checks.Operand((1, hidden), up.dtype)
    checks.check_mlp(function, x=x, weights=weights, biases=biases, activation=activation, names=names)


def mlp_operands(
    function: str, w_gate: Any, w_up: Any, w_down: Any, biases: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights there are, by name, and the biases, as they are given."""
    if biases is not None and not isinstance(biases, Mapping):
        fail_type(function, "biases", "a mapping or None", type(biases).__name__)
    gate = {} if w_gate is None else {"w_gate": w_gate}
    return {**gate, "w_up": w_up, "w_down": w_down}, dict(biases or {})


def check_head(function: str, weight: checks.Operand, bias: checks.Operand | None, names: HalfNames) -> None:
    """The operands of a linear cross entropy before there is an x; one row stands in for it."""
    checks.check_float(function, "weight", weight.dtype)
    into = 0 if names.input_dim_first else 1
    checks.check_linear_cross_entropy(
        function,
        x=checks.Operand((1, weight.shape[into] if len(weight.shape) == 2 else 0), weight.dtype),
        weight=weight,
        targets=checks.Operand((1,), "int32"),
        bias=bias,
        class_weight=None,
        num_valid=None,
        names=names,
    )
