"""Every bad input of `TiledLinear` once, with the one message both halves must raise.

A case is a change to the good calls `TiledLinear(8, 12, in_splits=2, out_splits=3)`, the layer on x [2, 3, 8] (or, with
input_is_already_split, on its splits [2, 3, 4] and [2, 3, 4]), and `copy_params_from` a plain layer.
"""

from dataclasses import dataclass
from typing import Any

from shared_specs.core.bad_case import BadCase

GOOD_LINEAR: dict[str, Any] = {"in_features": 8, "out_features": 12, "in_splits": 2, "out_splits": 3}


@dataclass(frozen=True, kw_only=True)
class BadLinearCase(BadCase):
    """One change to the good calls and what it must raise.

    Args:
        arguments: of the constructor. x: the shape of x; or its splits' shapes; or a value handed over as it stands.
        copied: (in, out, bias) of the plain layer that `how` takes: "copy" is copy_params_from, "init" is init_linear.
        converted: handed to TiledLinear.from_linear as it stands.
        the rest: as in BadCase.
    """

    x: Any = None
    copied: tuple[int, int, bool] | None = None
    how: str = "copy"
    converted: Any = None


_NAME = "TiledLinear"
_SPLIT = {"input_is_already_split": True}

BAD_LINEAR_CASES: tuple[BadLinearCase, ...] = (
    BadLinearCase(
        id="in_features-zero", arguments={"in_features": 0}, message=f"{_NAME}: in_features must be >= 1, got 0."
    ),
    BadLinearCase(
        id="out_features-kind",
        arguments={"out_features": 1.5},
        error=TypeError,
        message=f"{_NAME}: out_features must be an integer, got float.",
    ),
    BadLinearCase(
        id="in_splits-zero",
        arguments={"in_splits": 0},
        message=f"{_NAME}: in_splits must be in [1, 8], got 0 (in_features is 8).",
    ),
    BadLinearCase(
        id="in_splits-too-many",
        arguments={"in_splits": 9},
        message=f"{_NAME}: in_splits must be in [1, 8], got 9 (in_features is 8).",
    ),
    BadLinearCase(
        id="out_splits-too-many",
        arguments={"out_splits": 13},
        message=f"{_NAME}: out_splits must be in [1, 12], got 13 (out_features is 12).",
    ),
    BadLinearCase(
        id="out_splits-kind",
        arguments={"out_splits": "2"},
        error=TypeError,
        message=f"{_NAME}: out_splits must be an integer, got str.",
    ),
    BadLinearCase(
        id="bias-kind",
        arguments={"bias": "no"},
        error=TypeError,
        message=f"{_NAME}: bias must be True or False, got str.",
    ),
    BadLinearCase(
        id="combine_out_splits-kind",
        arguments={"combine_out_splits": 1},
        error=TypeError,
        message=f"{_NAME}: combine_out_splits must be True or False, got int.",
    ),
    BadLinearCase(
        id="linear_cls-kind",
        arguments={"linear_cls": "Linear"},
        error=TypeError,
        message=f"{_NAME}: linear_cls must be a class or None, got str.",
    ),
    BadLinearCase(
        id="linear_args-kind",
        arguments={"linear_args": ["dtype"]},
        error=TypeError,
        message=f"{_NAME}: linear_args must be a mapping or None, got list.",
    ),
    BadLinearCase(
        id="linear_args-bias",
        arguments={"linear_args": {"bias": True}},
        message=f"{_NAME}: linear_args must be without bias, device, dtype, got 'bias'. {_NAME} passes it.",
        halves=("torch",),
    ),
    BadLinearCase(id="x-width", x=(2, 3, 9), message=f"{_NAME}: x must be [..., 8], the input size, got [2, 3, 9]."),
    BadLinearCase(id="x-kind", x=[1.0], error=TypeError, message=f"{_NAME}: x must be an array, got list."),
    BadLinearCase(
        id="parts-kind",
        arguments=_SPLIT,
        x=3,
        error=TypeError,
        message=f"{_NAME}: x must be a list or tuple of arrays, got int.",
    ),
    BadLinearCase(
        id="parts-count",
        arguments=_SPLIT,
        x=((2, 3, 4),),
        message=f"{_NAME}: x must be 2 arrays, one for each input split, got 1.",
    ),
    BadLinearCase(
        id="parts-width",
        arguments=_SPLIT,
        x=((2, 3, 5), (2, 3, 3)),
        message=f"{_NAME}: x[0] must be [..., 4], got [2, 3, 5].",
    ),
    BadLinearCase(
        id="parts-tokens",
        arguments=_SPLIT,
        x=((2, 3, 4), (2, 4, 4)),
        message=f"{_NAME}: x[1] must be [2, 3, 4], got [2, 4, 4].",
    ),
    BadLinearCase(
        id="copy-weight",
        copied=(9, 12, True),
        message=f"{_NAME}.copy_params_from: weight must be {{layout}} = {{w_8_12}}, got {{w_9_12}}.",
    ),
    BadLinearCase(
        id="copy-bias-missing",
        copied=(8, 12, False),
        message=f"{_NAME}.copy_params_from: bias must be given, as the tiles have one, got None.",
    ),
    BadLinearCase(
        id="copy-bias-extra",
        arguments={"bias": False},
        copied=(8, 12, True),
        message=f"{_NAME}.copy_params_from: bias must be None, as the tiles have none, got [12].",
    ),
    BadLinearCase(
        id="init-weight",
        copied=(8, 11, True),
        how="init",
        message=f"{_NAME}: init_linear.weight must be {{layout}} = {{w_8_12}}, got {{w_8_11}}.",
    ),
    BadLinearCase(
        id="init-bias-missing",
        copied=(8, 12, False),
        how="init",
        message=f"{_NAME}: init_linear.bias must be given, as the tiles have one, got None.",
    ),
    BadLinearCase(
        id="init-kind",
        arguments={"init_linear": 3},
        error=TypeError,
        message=f"{_NAME}: init_linear must be a layer with a weight, got int.",
    ),
    BadLinearCase(
        id="from_linear-kind",
        converted=3,
        error=TypeError,
        message=f"{_NAME}.from_linear: linear must be a layer with a weight, got int.",
    ),
)
