"""Every error says which function it is of and what is wrong, in one of the two forms of shared_specs.errors."""

import re

import pytest

from shared_specs.errors import SpecError, error_text, fail_with, refusal_text
from shared_specs.linear.bad_inputs import BAD_LINEAR_CASES
from shared_specs.loss.bad_inputs import BAD_HEAD_CASES, BAD_LOSS_CASES
from shared_specs.mlp.bad_inputs import BAD_CASES, BAD_WEIGHTS_CASES

FUNCTION = r"[A-Za-z_{}.]+: "
GOT = re.compile(FUNCTION + r"[^\s].* must be [^\s].*, got .+", re.DOTALL)
REFUSAL = re.compile(FUNCTION + r"(?!.*\bmust be\b)(?!.*, got )[^\s][^.]+\. [A-Z].*\.", re.DOTALL)


def has_a_form(message: str) -> bool:
    return bool(GOT.fullmatch(message) or REFUSAL.fullmatch(message))


def test_every_bad_input_has_a_message_of_one_of_the_two_forms() -> None:
    cases = (*BAD_CASES, *BAD_WEIGHTS_CASES, *BAD_LOSS_CASES, *BAD_HEAD_CASES, *BAD_LINEAR_CASES)
    assert [case.message for case in cases if not has_a_form(case.message)] == []


@pytest.mark.parametrize(
    ("message", "good"),
    [
        (error_text("tile", "num_shards", ">= 1", 0, shapes="x is [2, 4]", advice="Pass None."), True),
        (refusal_text("tile", "this call is inside fork('a')", advice="Call it after the fork."), True),
        (refusal_text("tile", "this call is inside fork('a')"), False),  # without what to do instead
        ("num_shards must be >= 1, got 0.", False),
        ("tile: num_shards is wrong", False),
        ("tile: num_shards must be >= 1.", False),
    ],
)
def test_what_has_no_form_is_found(message: str, good: bool) -> None:
    assert has_a_form(message) is good


def test_fail_with_raises_the_second_form() -> None:
    with pytest.raises(SpecError, match=r"^tile: fn writes to x\. Copy it\.$"):
        fail_with("tile", "fn writes to x", advice="Copy it.")
