"""Every bad input once, with the one message both halves must raise before any work is done.

A case is a change to a good call in float32, shapes canonical ([in, out]): `tiled_mlp(x [2, 3, 8], w_gate [8, 12],
w_up [8, 12], w_down [12, 8])`. In a message, `{w_A_B}` is the pair (A, B) in the half's own layout: `[A, B]` or `[B, A]`.
Weights that a module cannot be made of stand at the end.
"""

import numpy as np

from shared_specs.config import ACTIVATIONS, Tiling
from shared_specs.core.bad_case import LET_PLAN, TRANSPOSED, X_IS, BadCase
from shared_specs.errors import UnsupportedError

GOOD_SHAPES: dict[str, tuple[int, ...]] = {"x": (2, 3, 8), "w_gate": (8, 12), "w_up": (8, 12), "w_down": (12, 8)}


_KEEP = " It is the fraction of shards whose gate and up are kept."


BAD_CASES: tuple[BadCase, ...] = (
    BadCase(
        id="num_shards-zero",
        arguments={"num_shards": 0},
        message=f"tiled_mlp: num_shards must be >= 1, got 0{X_IS}.{LET_PLAN}",
    ),
    BadCase(
        id="num_shards-negative",
        arguments={"num_shards": -3},
        message=f"tiled_mlp: num_shards must be >= 1, got -3{X_IS}.{LET_PLAN}",
    ),
    BadCase(
        id="num_shards-float",
        arguments={"num_shards": 2.0},
        error=TypeError,
        message="tiled_mlp: num_shards must be an integer or None, got float.",
    ),
    BadCase(
        id="num_shards-bool",
        arguments={"num_shards": True},
        error=TypeError,
        message="tiled_mlp: num_shards must be an integer or None, got bool.",
    ),
    BadCase(
        id="num_shards-and-tiling",
        arguments={"num_shards": 2, "tiling": Tiling(shard_tokens=2)},
        message="tiled_mlp: num_shards must be left out when tiling is given, got 2.",
    ),
    BadCase(
        id="keep-and-tiling",
        arguments={"keep": 0.5, "tiling": Tiling()},
        message="tiled_mlp: keep must be left out when tiling is given, got 0.5.",
    ),
    BadCase(
        id="tiling-two-ways",
        arguments={"tiling": Tiling(num_shards=2, shard_tokens=2)},
        message="tiled_mlp: tiling must be given one of num_shards, shard_tokens, memory_budget, "
        "got num_shards and shard_tokens.",
    ),
    BadCase(
        id="vocab_shards",
        arguments={"tiling": Tiling(vocab_shards=2)},
        message="tiled_mlp: vocab_shards must be left out, got 2. This function has no use for it.",
    ),
    BadCase(
        id="tiling-kind",
        arguments={"tiling": 4},
        error=TypeError,
        message="tiled_mlp: tiling must be a Tiling or None, got int.",
    ),
    BadCase(
        id="shard_tokens-zero",
        arguments={"tiling": Tiling(shard_tokens=0)},
        message=f"tiled_mlp: shard_tokens must be >= 1, got 0{X_IS}.",
    ),
    BadCase(
        id="memory_budget-zero",
        arguments={"tiling": Tiling(memory_budget=0)},
        message=f"tiled_mlp: memory_budget must be >= 1, got 0{X_IS}. It is a number of bytes.",
    ),
    BadCase(
        id="memory_budget-too-small",
        arguments={"tiling": Tiling(memory_budget=100)},
        message="tiled_mlp: memory_budget must be >= 240 bytes, one token at a time, got 100.",
        halves=("torch",),  # the two halves use different numbers of bytes for the same shard
    ),
    BadCase(
        id="memory_budget-too-small-compiled",
        arguments={"tiling": Tiling(memory_budget=100)},
        message="tiled_mlp: memory_budget must be >= 1536 bytes, one token at a time, got 100.",
        halves=("jax",),
    ),
    BadCase(
        id="token_axes",
        arguments={"tiling": Tiling(token_axes="data")},
        message="tiled_mlp: token_axes must be left out, got 'data'. It is for tiled_mlp, tiled_moe and "
        "tiled_linear_cross_entropy of tiled_jax.",
        halves=("torch",),
    ),
    BadCase(
        id="token_axes-kind",
        arguments={"tiling": Tiling(token_axes=("data", 3))},
        error=TypeError,
        message="tiled_mlp: token_axes must be a name, or a tuple of names, tuples of names and None, got int in ('data', 3).",
        halves=("jax",),
    ),
    BadCase(
        id="token_axes-twice",
        arguments={"tiling": Tiling(token_axes=("data", "data"))},
        message="tiled_mlp: token_axes must be each axis once, got ('data', 'data').",
        halves=("jax",),
    ),
    BadCase(
        id="token_axes-no-mesh",
        arguments={"tiling": Tiling(token_axes="data")},
        message="tiled_mlp: token_axes must be axes of the mesh that is here (no mesh), got data. Call it under jax.set_mesh, "
        "or on arrays that are on the mesh.",
        halves=("jax",),
    ),
    BadCase(
        id="keep-above-one",
        arguments={"keep": 1.5},
        message=f"tiled_mlp: keep must be in [0, 1], got 1.5.{_KEEP}",
    ),
    BadCase(
        id="keep-negative",
        arguments={"keep": -0.1},
        message=f"tiled_mlp: keep must be in [0, 1], got -0.1.{_KEEP}",
    ),
    BadCase(
        id="keep-nan",
        arguments={"keep": float("nan")},
        message=f"tiled_mlp: keep must be in [0, 1], got nan.{_KEEP}",
    ),
    BadCase(
        id="keep-kind",
        arguments={"keep": "half"},
        error=TypeError,
        message="tiled_mlp: keep must be a number, got str.",
    ),
    BadCase(
        id="activation-unknown",
        arguments={"activation": "swish2"},
        message=f"tiled_mlp: activation must be one of {', '.join(ACTIVATIONS)}, got 'swish2'.",
    ),
    BadCase(
        id="activation-array",
        arguments={"activation": np.ones(2)},
        message=f"tiled_mlp: activation must be one of {', '.join(ACTIVATIONS)}, got array([1., 1.]).",
    ),
    BadCase(
        id="activation-function",
        arguments={"activation": abs},
        message=f"tiled_mlp: activation must be one of {', '.join(ACTIVATIONS)}, got the function abs. Give its name: a "
        "call tries out no function, a module does.",
    ),
    BadCase(
        id="deterministic-kind",
        arguments={"tiling": Tiling(deterministic="yes")},  # type: ignore[arg-type]
        error=TypeError,
        message="tiled_mlp: deterministic must be True or False, got str.",
    ),
    BadCase(
        id="deterministic-missing",
        arguments={"tiling": Tiling(deterministic=None)},  # type: ignore[arg-type]
        error=TypeError,
        message="tiled_mlp: deterministic must be True or False, got NoneType.",
    ),
    BadCase(
        id="backend-array",
        arguments={"backend": np.ones(2)},
        message="tiled_mlp: backend must be one of {backends}, got array([1., 1.]).",
    ),
    BadCase(
        id="backend-unknown",
        arguments={"backend": "cuda"},
        message="tiled_mlp: backend must be one of {backends}, got 'cuda'.",
    ),
    BadCase(
        id="x-kind",
        operands={"x": [[1.0] * 8]},
        error=TypeError,
        message="tiled_mlp: x must be an array, got list.",
    ),
    BadCase(
        id="w_up-missing",
        operands={"w_up": None},
        error=TypeError,
        message="tiled_mlp: w_up must be an array, got NoneType.",
    ),
    BadCase(
        id="biases-kind",
        arguments={"biases": [1.0]},
        error=TypeError,
        message="tiled_mlp: biases must be a mapping or None, got list.",
    ),
    BadCase(
        id="x-number",
        shapes={"x": ()},
        message="tiled_mlp: x must be [hidden], [tokens, hidden] or more dims, got [].",
    ),
    BadCase(
        id="x-width",
        shapes={"x": (2, 3, 9)},
        message="tiled_mlp: x must be [..., 8], the input size of w_up, got [2, 3, 9].",
    ),
    BadCase(
        id="x-of-the-other-width",
        shapes={"x": (6, 12)},
        message="tiled_mlp: x must be [..., 8], the hidden size of w_gate, w_up, w_down, got [6, 12].",
    ),
    BadCase(
        id="x-of-the-other-width-and-another-output",
        shapes={"x": (6, 12), "w_down": (12, 5)},
        message="tiled_mlp: x must be [..., 8], the hidden size of w_gate, w_up, got [6, 12].",
    ),
    BadCase(
        id="x-of-the-other-width-without-a-gate",
        shapes={"x": (6, 12)},
        operands={"w_gate": None},
        message="tiled_mlp: x must be [..., 8], the hidden size of w_up, w_down, got [6, 12].",
    ),
    BadCase(
        id="w_up-not-a-matrix",
        shapes={"w_up": (8,)},
        message="tiled_mlp: w_up must be a matrix {layout}, got [8].",
    ),
    BadCase(
        id="w_up-transposed",
        transposed=("w_up",),
        message="tiled_mlp: w_up must be {w_hidden_intermediate} = {w_8_12}, got {w_12_8}. "
        "{package} keeps weights {layout}. This one is transposed.",
    ),
    BadCase(
        id="every-weight-transposed",
        transposed=("w_gate", "w_up", "w_down"),
        message="tiled_mlp: w_up must be {w_hidden_intermediate} = {w_8_12}, got {w_12_8}. "
        "{package} keeps weights {layout}. This one is transposed.",
    ),
    BadCase(
        id="weights-without-a-gate-transposed",
        operands={"w_gate": None},
        transposed=("w_up", "w_down"),
        message="tiled_mlp: w_up must be {w_hidden_intermediate} = {w_8_12}, got {w_12_8}. "
        "{package} keeps weights {layout}. This one is transposed.",
    ),
    BadCase(
        id="w_gate-transposed",
        transposed=("w_gate",),
        message="tiled_mlp: w_gate must be {w_hidden_intermediate} = {w_8_12}, got {w_12_8}. "
        "{package} keeps weights {layout}. This one is transposed.",
    ),
    BadCase(
        id="w_gate-size",
        shapes={"w_gate": (8, 11)},
        message="tiled_mlp: w_gate must be {w_hidden_intermediate} = {w_8_12}, got {w_8_11}. "
        "{package} keeps weights {layout}.",
    ),
    BadCase(
        id="w_down-transposed",
        transposed=("w_down",),
        message="tiled_mlp: w_down must be {w_intermediate_out} = {w_12_8}, got {w_8_12}. "
        "{package} keeps weights {layout}. This one is transposed.",
    ),
    BadCase(
        id="w_down-size",
        shapes={"w_down": (13, 8)},
        message="tiled_mlp: w_down must be {w_intermediate_out} = {w_12_8}, got {w_13_8}. "
        "{package} keeps weights {layout}.",
    ),
    BadCase(
        id="bias-size",
        shapes={"b_up": (8,)},
        message="tiled_mlp: biases['up'] must be [12], got [8].",
    ),
    BadCase(
        id="bias-name",
        shapes={"b_middle": (12,)},
        message="tiled_mlp: biases must be a mapping with keys among gate, up, down, got 'middle'.",
    ),
    BadCase(
        id="dtype-integer",
        dtypes={"x": "int32"},
        message="tiled_mlp: x must be of dtype float32, bfloat16, float16, float64, got int32.",
    ),
    BadCase(
        id="dtype-narrow-weight",
        dtypes={"w_down": "bfloat16"},
        message="tiled_mlp: w_down must be of x's dtype float32, got bfloat16. Cast one of them.",
    ),
    BadCase(
        id="dtype-narrow-x",
        dtypes={"x": "bfloat16"},
        message="tiled_mlp: w_gate must be of x's dtype bfloat16, got float32. Cast one of them.",
        halves=("torch",),  # Flax keeps float32 master weights beside a 16-bit x and casts them inside the call
    ),
    BadCase(
        id="dtype-bias",
        shapes={"b_down": (8,)},
        dtypes={"b_down": "float16"},
        message="tiled_mlp: biases['down'] must be of x's dtype float32, got float16. Cast one of them.",
    ),
    BadCase(
        id="device-x",
        elsewhere=("x",),
        message="tiled_mlp: w_gate must be on x's device {other_device}, got {device}.",
    ),
    BadCase(
        id="device-w_down",
        elsewhere=("w_down",),
        message="tiled_mlp: w_down must be on x's device {device}, got {other_device}.",
    ),
    BadCase(
        id="device-bias",
        shapes={"b_up": (12,)},
        elsewhere=("b_up",),
        message="tiled_mlp: biases['up'] must be on x's device {device}, got {other_device}.",
    ),
)


# Backends that are named but cannot run here: the reason differs from machine to machine, the form does not.
UNUSABLE_BACKEND = 'tiled_mlp: backend must be usable here, got {backend!r}. {reason} Pass backend="auto".'


UNUSABLE_ERROR = UnsupportedError


_MLP = "TiledMLP.from_weights"


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
        message=f"{_MLP}: w_up must be {{w_hidden_intermediate}} = {{w_8_12}}, got {{w_12_8}}. {TRANSPOSED}",
    ),
    BadCase(
        id="w_down-transposed",
        transposed=("w_down",),
        message=f"{_MLP}: w_down must be {{w_intermediate_out}} = {{w_12_8}}, got {{w_8_12}}. {TRANSPOSED}",
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
