"""What ranks have to say alike: the message that names who says what, of a few ranks and of many."""

import pytest

from shared_specs import SpecError
from shared_specs.collectives.agreement import check_alike


def said(*words: str) -> list[dict[str, str]]:
    return [{"function": "f", "tokens": word} for word in words]


@pytest.mark.parametrize(
    ("words", "got"),
    [
        (("4", "5"), "4, 5"),
        (("4",) * 7 + ("5",), "4, 4, 4, 4, 4, 4, 4, 5"),
        (("4",) * 8 + ("5",), "5 on rank 8, 4 on ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (("5", "4", "5") + ("4",) * 500, "5 on ranks 0, 2, 4 on 501 ranks"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_who_says_what(words: tuple[str, ...], got: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_alike("f", said(*words))
    assert str(caught.value) == f"f: tokens must be the same on all {len(words)} ranks, got {got}."


def test_what_one_rank_alone_says_differs_too() -> None:
    check_alike("f", said("4", "4"))
    with pytest.raises(SpecError, match=r"^f: more must be the same on all 2 ranks, got None, 1\.$"):
        check_alike("f", [{"tokens": "4"}, {"tokens": "4", "more": "1"}])
