"""Bad weights for modules that are made of existing ones, each once with its message: `bad_inputs.py` says how to read them.

The good calls: `TiledMLP.from_weights(w_gate, w_up, w_down)` and `TiledLinearCrossEntropy.from_weights(weight)`.
"""

from shared_specs.bad_inputs import BadCase

_MLP = "TiledMLP.from_weights"
_HEAD = "TiledLinearCrossEntropy.from_weights"
_TRANSPOSED = "{package} keeps weights {layout}. This one is transposed."

BAD_WEIGHTS_CASES: tuple[BadCase, ...] = (
    BadCase(
        id="w_up-missing",
        operands={"w_up": None},
        error=TypeError,
        message=f"{_MLP}: w_up must be an array, got NoneType.",
    ),
    BadCase(
        id="w_gate-kind",
        operands={"w_gate": [1.0]},
        error=TypeError,
        message=f"{_MLP}: w_gate must be an array, got list.",
    ),
    BadCase(
        id="w_up-scalar",
        shapes={"w_up": ()},
        message=f"{_MLP}: w_up must be a matrix {{layout}}, got [].",
    ),
    BadCase(
        id="w_down-vector",
        shapes={"w_down": (12,)},
        message=f"{_MLP}: w_down must be a matrix {{layout}}, got [12].",
    ),
    BadCase(
        id="w_up-transposed",
        transposed=("w_up",),
        message=f"{_MLP}: w_up must be {{w_hidden_intermediate}} = {{w_8_12}}, got {{w_12_8}}. {_TRANSPOSED}",
    ),
    BadCase(
        id="w_down-transposed",
        transposed=("w_down",),
        message=f"{_MLP}: w_down must be {{w_intermediate_out}} = {{w_12_8}}, got {{w_8_12}}. {_TRANSPOSED}",
    ),
    BadCase(
        id="dtype-integer",
        dtypes={"w_gate": "int32", "w_up": "int32", "w_down": "int32"},
        message=f"{_MLP}: w_up must be of dtype float32, bfloat16, float16, float64, got int32.",
    ),
    BadCase(
        id="biases-kind",
        arguments={"biases": [1.0]},
        error=TypeError,
        message=f"{_MLP}: biases must be a mapping or None, got list.",
    ),
    BadCase(
        id="bias-missing",
        arguments={"biases": {"up": None}},
        error=TypeError,
        message=f"{_MLP}: biases['up'] must be an array, got NoneType.",
    ),
    BadCase(
        id="device-w_down",
        elsewhere=("w_down",),
        message=f"{_MLP}: w_down must be on w_gate's device {{device}}, got {{other_device}}.",
    ),
    BadCase(
        id="device-bias",
        shapes={"b_up": (12,)},
        elsewhere=("b_up",),
        message=f"{_MLP}: biases['up'] must be on w_gate's device {{device}}, got {{other_device}}.",
    ),
)

BAD_HEAD_CASES: tuple[BadCase, ...] = (
    BadCase(
        id="weight-missing",
        operands={"weight": None},
        error=TypeError,
        message=f"{_HEAD}: weight must be an array, got NoneType.",
    ),
    BadCase(
        id="weight-scalar",
        shapes={"weight": ()},
        message=f"{_HEAD}: weight must be a matrix {{layout}}, got [].",
    ),
    BadCase(
        id="dtype-integer",
        dtypes={"weight": "int32"},
        message=f"{_HEAD}: weight must be of dtype float32, bfloat16, float16, float64, got int32.",
    ),
    BadCase(
        id="bias-kind",
        arguments={"bias": [1.0]},
        error=TypeError,
        message=f"{_HEAD}: bias must be an array, got list.",
    ),
    BadCase(
        id="bias-size",
        shapes={"bias": (8,)},
        message=f"{_HEAD}: bias must be [12], got [8].",
    ),
    BadCase(
        id="device-bias",
        shapes={"bias": (12,)},
        elsewhere=("bias",),
        message=f"{_HEAD}: bias must be on weight's device {{device}}, got {{other_device}}.",
    ),
)
