"""Every bad input of the mixture of experts once, with the one message both halves must raise before any work is done.

A case is a change to a good call in float32, shapes canonical ([in, out]): `tiled_moe(x [2, 3, 8], w_router [8, 4], w_gate and
w_up [4, 8, 12], w_down [4, 12, 8], top_k=2)`. In a message `{w_E_A_B}` is the triple (E, A, B) in the half's own layout.
"""

from shared_specs.config import ACTIVATIONS, Tiling
from shared_specs.core.bad_case import LET_PLAN, TRANSPOSED, X_IS, BadCase
from shared_specs.errors import UnsupportedError

GOOD_MOE_SHAPES: dict[str, tuple[int, ...]] = {
    "x": (2, 3, 8),
    "w_router": (8, 4),
    "w_gate": (4, 8, 12),
    "w_up": (4, 8, 12),
    "w_down": (4, 12, 8),
}

BAD_MOE_CASES: tuple[BadCase, ...] = (
    BadCase(
        id="top_k-above-experts",
        arguments={"top_k": 5},
        message="tiled_moe: top_k must be in [1, 4], the number of experts, got 5.",
    ),
    BadCase(
        id="top_k-zero",
        arguments={"top_k": 0},
        message="tiled_moe: top_k must be in [1, 4], the number of experts, got 0.",
    ),
    BadCase(
        id="top_k-kind",
        arguments={"top_k": 2.0},
        error=TypeError,
        message="tiled_moe: top_k must be an integer, got float.",
    ),
    BadCase(
        id="scoring",
        arguments={"scoring": "tanh"},
        message="tiled_moe: scoring must be one of softmax, sigmoid, got 'tanh'.",
    ),
    BadCase(
        id="normalize_top_k-kind",
        arguments={"normalize_top_k": 1},
        error=TypeError,
        message="tiled_moe: normalize_top_k must be True or False, got int.",
    ),
    BadCase(
        id="activation",
        arguments={"activation": "swish2"},
        message=f"tiled_moe: activation must be one of {', '.join(ACTIVATIONS)}, got 'swish2'.",
    ),
    BadCase(
        id="num_shards-zero",
        arguments={"num_shards": 0},
        message=f"tiled_moe: num_shards must be >= 1, got 0{X_IS}.{LET_PLAN}",
    ),
    BadCase(
        id="keep",
        arguments={"tiling": Tiling(keep=0.5)},
        message="tiled_moe: keep must be left out, got 0.5. This function has no use for it.",
    ),
    BadCase(
        id="deterministic",
        arguments={"tiling": Tiling(deterministic=True)},
        message="tiled_moe: deterministic must be left out, got True. This function has no use for it.",
    ),
    BadCase(
        id="token_axes",
        arguments={"tiling": Tiling(token_axes="data")},
        message="tiled_moe: token_axes must be left out, got 'data'. It is for tiled_mlp, tiled_moe and "
        "tiled_linear_cross_entropy of tiled_jax.",
        halves=("torch",),
    ),
    BadCase(
        id="backend-unknown",
        arguments={"backend": "cuda"},
        message="tiled_moe: backend must be one of {backends}, got 'cuda'.",
    ),
    BadCase(
        id="backend-without-experts",
        arguments={"backend": "triton"},
        error=UnsupportedError,
        message="tiled_moe: backend must be usable here, got 'triton'. The experts' products are PyTorch's own, on every "
        'device. Pass backend="auto".',
        halves=("torch",),
    ),
    BadCase(
        id="backend-without-experts",
        arguments={"backend": "pallas"},
        error=UnsupportedError,
        message="tiled_moe: backend must be usable here, got 'pallas'. There is no Pallas kernel of experts; the XLA path runs "
        'on every device. Pass backend="auto".',
        halves=("jax",),
    ),
    BadCase(
        id="x-kind",
        operands={"x": [[1.0] * 8]},
        error=TypeError,
        message="tiled_moe: x must be an array, got list.",
    ),
    BadCase(
        id="w_gate-missing",
        operands={"w_gate": None},
        error=TypeError,
        message="tiled_moe: w_gate must be an array, got NoneType.",
    ),
    BadCase(
        id="x-number",
        shapes={"x": ()},
        message="tiled_moe: x must be [hidden], [tokens, hidden] or more dims, got [].",
    ),
    BadCase(
        id="x-width",
        shapes={"x": (2, 3, 9)},
        message="tiled_moe: x must be [..., 8], the input size of w_up, got [2, 3, 9].",
    ),
    BadCase(
        id="w_up-of-one-expert",
        shapes={"w_up": (8, 12)},
        message="tiled_moe: w_up must be {w_experts_in_out}, got {w_8_12}.",
    ),
    BadCase(
        id="w_router-not-a-matrix",
        shapes={"w_router": (8,)},
        message="tiled_moe: w_router must be a matrix {layout}, got [8].",
    ),
    BadCase(
        id="w_router-of-other-experts",
        shapes={"w_router": (8, 5)},
        message="tiled_moe: w_router must be {w_hidden_experts} = {w_8_4}, got {w_8_5}. {package} keeps weights {layout}.",
    ),
    BadCase(
        id="w_router-transposed",
        transposed=("w_router",),
        message=f"tiled_moe: w_router must be {{w_hidden_experts}} = {{w_8_4}}, got {{w_4_8}}. {TRANSPOSED}",
    ),
    BadCase(
        id="every-expert-transposed",
        transposed=("w_gate", "w_up", "w_down"),
        message="tiled_moe: w_gate must be {w_experts_hidden_intermediate} = {w_4_8_12}, got {w_4_12_8}. " + TRANSPOSED,
    ),
    BadCase(
        id="w_gate-of-fewer-experts",
        shapes={"w_gate": (3, 8, 12)},
        message="tiled_moe: w_gate must be {w_experts_hidden_intermediate} = {w_4_8_12}, got {w_3_8_12}. {package} keeps "
        "weights {layout}.",
    ),
    BadCase(
        id="w_down-size",
        shapes={"w_down": (4, 12, 9)},
        message="tiled_moe: w_down must be {w_experts_intermediate_hidden} = {w_4_12_8}, got {w_4_12_9}. {package} keeps "
        "weights {layout}.",
    ),
    BadCase(
        id="dtype-integer",
        dtypes={"x": "int32"},
        message="tiled_moe: x must be of dtype float32, bfloat16, float16, float64, got int32.",
    ),
    BadCase(
        id="dtype-narrow-weight",
        dtypes={"w_router": "bfloat16"},
        message="tiled_moe: w_router must be of x's dtype float32, got bfloat16. Cast one of them.",
    ),
    BadCase(
        id="device-w_down",
        elsewhere=("w_down",),
        message="tiled_moe: w_down must be on x's device {device}, got {other_device}.",
    ),
)
