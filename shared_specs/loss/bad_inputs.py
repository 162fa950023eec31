"""Every bad input of the losses once, with its message; mlp/bad_inputs.py says how to read them.

The last ones are of `TiledLinearCrossEntropy.from_weights(weight)`.
"""

from shared_specs.config import LossOptions, Tiling
from shared_specs.core.bad_case import LET_PLAN, X_IS, BadCase

_HEAD = "TiledLinearCrossEntropy.from_weights"


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


GOOD_LOSS_SHAPES: dict[str, tuple[int, ...]] = {"x": (2, 3, 8), "weight": (8, 12), "targets": (2, 3)}


_LOSS = "tiled_linear_cross_entropy"


BAD_LOSS_CASES: tuple[BadCase, ...] = (
    BadCase(
        id="num_shards-zero",
        arguments={"num_shards": 0},
        message=f"{_LOSS}: num_shards must be >= 1, got 0{X_IS}.{LET_PLAN}",
    ),
    BadCase(
        id="vocab_shards-zero",
        arguments={"tiling": Tiling(vocab_shards=0)},
        message=f"{_LOSS}: vocab_shards must be >= 1, got 0{X_IS}.",
    ),
    BadCase(
        id="keep",
        arguments={"tiling": Tiling(keep=0.5)},
        message=f"{_LOSS}: keep must be left out, got 0.5. This function has no use for it.",
    ),
    BadCase(
        id="deterministic",
        arguments={"tiling": Tiling(deterministic=True)},
        message=f"{_LOSS}: deterministic must be left out, got True. This function has no use for it.",
    ),
    BadCase(
        id="backend-unknown",
        arguments={"backend": "cuda"},
        message=f"{_LOSS}: backend must be one of {{backends}}, got 'cuda'.",
    ),
    BadCase(
        id="x-kind",
        operands={"x": [[1.0] * 8]},
        error=TypeError,
        message=f"{_LOSS}: x must be an array, got list.",
    ),
    BadCase(
        id="targets-kind",
        operands={"targets": None},
        error=TypeError,
        message=f"{_LOSS}: targets must be an array, got NoneType.",
    ),
    BadCase(
        id="x-vector",
        shapes={"x": (8,)},
        message=f"{_LOSS}: x must be [tokens, hidden] or more dims, got [8].",
    ),
    BadCase(
        id="x-width",
        shapes={"x": (2, 3, 9)},
        message=f"{_LOSS}: x must be [..., 8], the input size of weight, got [2, 3, 9].",
    ),
    BadCase(
        id="weight-not-a-matrix",
        shapes={"weight": (8,)},
        message=f"{_LOSS}: weight must be a matrix {{layout}}, got [8].",
    ),
    BadCase(
        id="weight-transposed",
        transposed=("weight",),
        message=f"{_LOSS}: weight must be {{w_hidden_vocab}} = {{w_8_12}}, got {{w_12_8}}. "
        "{package} keeps weights {layout}. This one is transposed.",
    ),
    BadCase(
        id="targets-shape",
        shapes={"targets": (3, 2)},
        message=f"{_LOSS}: targets must be [2, 3], got [3, 2]{X_IS}.",
    ),
    BadCase(
        id="targets-one-hot",
        shapes={"targets": (2, 3, 12)},
        message=f"{_LOSS}: targets must be [2, 3], got [2, 3, 12]{X_IS}.",
    ),
    BadCase(
        id="targets-dtype",
        dtypes={"targets": "float32"},
        message=f"{_LOSS}: targets must be of dtype int64, int32, got float32.",
    ),
    BadCase(
        id="target-too-large",
        target=12,
        message=f"{_LOSS}: targets must be in [0, 12) or ignore_index = -100, got 12. "
        "Mark tokens without a label with ignore_index.",
    ),
    BadCase(
        id="target-negative",
        target=-1,
        message=f"{_LOSS}: targets must be in [0, 12) or ignore_index = -100, got -1. "
        "Mark tokens without a label with ignore_index.",
    ),
    BadCase(
        id="target-other-ignore-index",
        target=-100,
        arguments={"loss": LossOptions(ignore_index=-1)},
        message=f"{_LOSS}: targets must be in [0, 12) or ignore_index = -1, got -100. "
        "Mark tokens without a label with ignore_index.",
    ),
    BadCase(
        id="bias-size",
        shapes={"bias": (8,)},
        message=f"{_LOSS}: bias must be [12], got [8].",
    ),
    BadCase(
        id="class_weight-size",
        class_weight=(8,),
        message=f"{_LOSS}: loss.class_weight must be [12], got [8].",
    ),
    BadCase(
        id="dtype-integer",
        dtypes={"x": "int32"},
        message=f"{_LOSS}: x must be of dtype float32, bfloat16, float16, float64, got int32.",
    ),
    BadCase(
        id="dtype-narrow-weight",
        dtypes={"weight": "bfloat16"},
        message=f"{_LOSS}: weight must be of x's dtype float32, got bfloat16. Cast one of them.",
    ),
    BadCase(
        id="device-weight",
        elsewhere=("weight",),
        message=f"{_LOSS}: weight must be on x's device {{device}}, got {{other_device}}.",
    ),
    BadCase(
        id="device-targets",
        elsewhere=("targets",),
        message=f"{_LOSS}: targets must be on x's device {{device}}, got {{other_device}}.",
    ),
    BadCase(
        id="device-bias",
        shapes={"bias": (12,)},
        elsewhere=("bias",),
        message=f"{_LOSS}: bias must be on x's device {{device}}, got {{other_device}}.",
    ),
    BadCase(
        id="device-class_weight",
        class_weight=(12,),
        elsewhere=("class_weight",),
        message=f"{_LOSS}: loss.class_weight must be on x's device {{device}}, got {{other_device}}.",
    ),
    BadCase(
        id="loss-kind",
        arguments={"loss": "mean"},
        error=TypeError,
        message=f"{_LOSS}: loss must be a LossOptions, got str.",
    ),
    BadCase(
        id="ignore_index-kind",
        arguments={"loss": LossOptions(ignore_index=None)},  # type: ignore[arg-type]
        error=TypeError,
        message=f"{_LOSS}: loss.ignore_index must be an integer, got NoneType.",
    ),
    BadCase(
        id="label_smoothing-above-one",
        arguments={"loss": LossOptions(label_smoothing=1.5)},
        message=f"{_LOSS}: loss.label_smoothing must be in [0, 1], got 1.5.",
    ),
    BadCase(
        id="z_loss-negative",
        arguments={"loss": LossOptions(z_loss=-1e-4)},
        message=f"{_LOSS}: loss.z_loss must be >= 0, got -0.0001.",
    ),
    BadCase(
        id="logit_softcap-zero",
        arguments={"loss": LossOptions(logit_softcap=0.0)},
        message=f"{_LOSS}: loss.logit_softcap must be > 0, got 0.0.",
    ),
    BadCase(
        id="logit_scale-nan",
        arguments={"loss": LossOptions(logit_scale=float("nan"))},
        message=f"{_LOSS}: loss.logit_scale must be finite, got nan.",
    ),
    BadCase(
        id="reduction-unknown",
        arguments={"loss": LossOptions(reduction="average")},  # type: ignore[arg-type]
        message=f"{_LOSS}: loss.reduction must be one of mean, sum, none, got 'average'.",
    ),
    BadCase(
        id="outputs-kind",
        arguments={"loss": LossOptions(outputs="lse")},  # type: ignore[arg-type]
        error=TypeError,
        message=f"{_LOSS}: loss.outputs must be a tuple of names, got str.",
    ),
    BadCase(
        id="outputs-unknown",
        arguments={"loss": LossOptions(outputs=("logits",))},  # type: ignore[arg-type]
        message=f"{_LOSS}: loss.outputs must be among log_probs, lse, entropy, accuracy, prediction, top_logprobs, "
        "got 'logits'.",
    ),
    BadCase(
        id="top_k-zero",
        arguments={"loss": LossOptions(outputs=("top_logprobs",), top_k=0)},
        message=f"{_LOSS}: loss.top_k must be >= 1, got 0.",
    ),
    BadCase(
        id="top_k-kind",
        arguments={"loss": LossOptions(outputs=("top_logprobs",), top_k=2.0)},  # type: ignore[arg-type]
        error=TypeError,
        message=f"{_LOSS}: loss.top_k must be an integer or None, got float.",
    ),
    BadCase(
        id="top_k-above-vocabulary",
        arguments={"loss": LossOptions(outputs=("top_logprobs",), top_k=13)},
        message=f"{_LOSS}: loss.top_k must be <= 12, the entries of the vocabulary, got 13.",
    ),
    BadCase(
        id="top_k-missing",
        arguments={"loss": LossOptions(outputs=("top_logprobs",))},
        message=f'{_LOSS}: loss.top_k must be a number beside "top_logprobs" in loss.outputs, and None without it, got None.',
    ),
    BadCase(
        id="top_k-alone",
        arguments={"loss": LossOptions(outputs=("prediction",), top_k=2)},
        message=f'{_LOSS}: loss.top_k must be a number beside "top_logprobs" in loss.outputs, and None without it, got 2.',
    ),
    BadCase(
        id="num_valid-with-sum",
        arguments={"loss": LossOptions(num_valid=8, reduction="sum")},
        message=f'{_LOSS}: loss.num_valid must be left out unless loss.reduction is "mean", got 8.',
    ),
    BadCase(
        id="num_valid-zero",
        arguments={"loss": LossOptions(num_valid=0)},
        message=f"{_LOSS}: loss.num_valid must be > 0, got 0.",
    ),
    BadCase(
        id="class_weight-kind",
        arguments={"loss": LossOptions(class_weight=[1.0] * 12)},
        error=TypeError,
        message=f"{_LOSS}: loss.class_weight must be an array, got list.",
    ),
    BadCase(
        id="num_valid-kind",
        arguments={"loss": LossOptions(num_valid="all")},
        error=TypeError,
        message=f"{_LOSS}: loss.num_valid must be a number or a 0-d array, got str.",
    ),
    BadCase(
        id="token_weight-shape",
        shapes={"token_weight": (6,)},
        message=(
            f"{_LOSS}: token_weight must be [2, 3], a number for each target, got [6]."
            " Give tokens that count alike the same number."
        ),
    ),
    BadCase(
        id="token_weight-dtype",
        shapes={"token_weight": (2, 3)},
        dtypes={"token_weight": "int32"},
        message=f"{_LOSS}: token_weight must be of dtype float32, bfloat16, float16, float64, got int32.",
    ),
    BadCase(
        id="token_weight-kind",
        arguments={"token_weight": [1.0]},
        error=TypeError,
        message=f"{_LOSS}: token_weight must be an array, got list.",
    ),
)
