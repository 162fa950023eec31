"""What `check` refuses, in both halves with the same words, before anything is trained."""

from collections.abc import Mapping
from typing import Any, Never

from shared_specs.errors import fail, fail_type, fail_with

NUM_SHARDS = 4  # of the default tiling: a small batch would be one shard
LEARNING_RATE = 0.1  # of the default optimizer, plain gradient descent

DRAWS = (
    "As the model is, its training is not comparable: it draws random numbers, as dropout does, and which ones a token gets "
    "depends on how tokens are cut. Compared in evaluation."
)


def check_arguments(steps: Any, seed: Any, **functions: Any) -> None:
    """Raise SpecError or TypeError for the first argument that is out of its range; functions: None or to be called."""
    for name, value, low in (("steps", steps, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            fail_type("check", name, "a whole number", type(value).__name__)
        if value < low:
            fail("check", name, f">= {low}", value)
    for name, value in functions.items():
        if value is not None and not callable(value):
            fail_type("check", name, "a function or None", type(value).__name__)


def loss_of(output: Any, is_scalar: Any) -> Any:
    """Return the loss among what a model returns: its `loss`, the number that it returns, or the first of several."""
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    else:
        found = output[0] if isinstance(output, tuple | list) and output else output
    if not is_scalar(found):
        got = type(output).__name__
        fail(
            "check",
            "model",
            "one that returns a loss",
            got,
            advice="Give labels in the batch, or step(model, batch) -> loss.",
        )
    return found


def called(model: Any, batch: Any) -> Any:
    """Return what a model returns for a batch: by the names of a mapping, one by one of a tuple."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def fail_running(what: str, error: Exception) -> Never:
    """Raise SpecError for something of the user's that failed."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    fail_with("check", f"{what} fails ({reason})", advice="Mend it first: nothing can be compared.")
