"""Every bad input of the distillation loss once, with its message; mlp/bad_inputs.py says how to read them."""

from shared_specs.config import LossOptions, Tiling
from shared_specs.core.bad_case import LET_PLAN, TRANSPOSED, BadCase

_NAME = "tiled_distillation_loss"

GOOD_DISTILLATION_SHAPES: dict[str, tuple[int, ...]] = {
    "student": (2, 3, 8),
    "w_student": (8, 12),
    "teacher": (2, 3, 16),
    "w_teacher": (16, 12),
    "targets": (2, 3),
}
_USE = " A distillation has no use for it."


def _argument(id: str, message: str, error: type[Exception] | None = None, **arguments: object) -> BadCase:
    text = f"{_NAME}: {message}"
    return (
        BadCase(id=id, message=text, arguments=arguments)
        if error is None
        else BadCase(id=id, message=text, arguments=arguments, error=error)
    )


BAD_DISTILLATION_CASES: tuple[BadCase, ...] = (
    _argument("kind", "kind must be one of forward_kl, reverse_kl, jsd, got 'kl'.", kind="kl"),
    _argument("temperature-zero", "temperature must be > 0, got 0.", temperature=0),
    _argument("temperature-kind", "temperature must be a number, got str.", TypeError, temperature="hot"),
    _argument("beta-range", "beta must be in [0, 1], got 1.5.", kind="jsd", beta=1.5),
    _argument(
        "beta-end",
        'beta must be between 0 and 1 for kind="jsd", got 1.0. There it is 0 for any student: pass kind="forward_kl" or '
        '"reverse_kl".',
        kind="jsd",
        beta=1.0,
    ),
    _argument("beta-unused", 'beta must be left out unless kind is "jsd", got 0.3.', beta=0.3),
    _argument("weight_hard-negative", "weight_hard must be >= 0, got -1.", weight_hard=-1),
    _argument("weight_hard-above", "weight_hard must be in [0, 1] without weight_soft, got 2.", weight_hard=2),
    _argument("weight_soft-nan", "weight_soft must be >= 0, got nan.", weight_soft=float("nan")),
    BadCase(
        id="weight_hard-without-targets",
        operands={"targets": None},
        arguments={"weight_hard": 0.5},
        message=f"{_NAME}: weight_hard must be 0 without targets, got 0.5. Pass the labels as targets.",
    ),
    _argument("loss-kind", "loss must be a LossOptions, got str.", TypeError, loss="mean"),
    _argument("loss-z", f"loss.z_loss must be left out, got 0.1.{_USE}", loss=LossOptions(z_loss=0.1)),
    _argument(
        "loss-outputs",
        f"loss.outputs must be left out, got ('lse',).{_USE}",
        loss=LossOptions(outputs=("lse",)),
    ),
    _argument(
        "loss_teacher-reduction",
        f"loss_teacher.reduction must be left out, got 'sum'.{_USE}",
        loss_teacher=LossOptions(reduction="sum"),
    ),
    _argument(
        "loss_teacher-softcap",
        "loss_teacher.logit_softcap must be > 0, got 0.",
        loss_teacher=LossOptions(logit_softcap=0),
    ),
    _argument("num_shards-zero", f"num_shards must be >= 1, got 0 (x is [2, 3, 8]).{LET_PLAN}", num_shards=0),
    _argument(
        "vocab_shards",
        "vocab_shards must be left out, got 2. This function has no use for it.",
        tiling=Tiling(vocab_shards=2),
    ),
    BadCase(
        id="student-vector",
        shapes={"student": (8,)},
        message=f"{_NAME}: student must be [tokens, hidden] or more dims, got [8].",
    ),
    BadCase(
        id="teacher-tokens",
        shapes={"teacher": (2, 4, 16)},
        message=f"{_NAME}: teacher must be [2, 3, hidden], a row for each of the student's, got [2, 4, 16].",
    ),
    BadCase(
        id="teacher-width",
        shapes={"teacher": (2, 3, 8)},
        message=f"{_NAME}: teacher must be [..., 16], the input size of w_teacher, got [2, 3, 8].",
    ),
    BadCase(
        id="w_student-transposed",
        transposed=("w_student",),
        message=f"{_NAME}: w_student must be {{w_hidden_vocab}} = {{w_8_12}}, got {{w_12_8}}. {TRANSPOSED}",
    ),
    BadCase(
        id="vocabularies",
        shapes={"w_teacher": (16, 14)},
        message=f"{_NAME}: w_teacher must be of w_student's 12 entries, got 14. Cut the rows that pad one of them away: both "
        "heads need the same vocabulary.",
    ),
    BadCase(
        id="targets-shape",
        shapes={"targets": (6,)},
        message=f"{_NAME}: targets must be [2, 3], got [6] (student is [2, 3, 8]).",
    ),
    BadCase(
        id="target-missing",
        target=12,
        message=f"{_NAME}: targets must be in [0, 12) or ignore_index = -100, got 12. Mark tokens without a label with "
        "ignore_index.",
    ),
    BadCase(
        id="dtype-of-a-weight",
        dtypes={"w_student": "float16"},
        message=f"{_NAME}: w_student must be of student's dtype float32, got float16. Cast one of them.",
    ),
    BadCase(
        id="w_teacher-missing",
        operands={"w_teacher": None},
        error=TypeError,
        message=f"{_NAME}: w_teacher must be an array, got NoneType.",
    ),
)
