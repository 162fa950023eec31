"""Every bad input of `check` once, with the message that both halves must raise before anything is trained."""

from dataclasses import dataclass
from typing import Any

from shared_specs.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class BadCheck:
    """arguments: what differs from a good call."""

    id: str
    arguments: dict[str, Any]
    message: str
    error: type[Exception] = SpecError


def failing() -> None:
    """Fail as a user's function does."""
    raise ValueError("no model today")


BAD_CHECKS = (
    BadCheck(id="no-steps", arguments={"steps": 0}, message="check: steps must be >= 1, got 0."),
    BadCheck(
        id="half-a-step",
        arguments={"steps": 1.5},
        message="check: steps must be a whole number, got float.",
        error=TypeError,
    ),
    BadCheck(id="negative-seed", arguments={"seed": -1}, message="check: seed must be >= 0, got -1."),
    BadCheck(
        id="tile-is-a-number",
        arguments={"tile": 4},
        message="check: tile must be a function or None, got int.",
        error=TypeError,
    ),
    BadCheck(
        id="step-is-a-name",
        arguments={"plain_step": "plain"},
        message="check: plain_step must be a function or None, got str.",
        error=TypeError,
    ),
    BadCheck(
        id="model-fails",
        arguments={"model": failing},
        message="check: making the model fails (ValueError: no model today). Mend it first: nothing can be compared.",
    ),
)
