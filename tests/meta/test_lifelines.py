"""The pictures of which arrays live when are those that their description draws, and the documents show each."""

import pytest

from tests.meta.lifelines import FOLDER, PICTURES, svg


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_its_description(name: str) -> None:
    drawn = (FOLDER / f"lives-{name}.svg").read_text(encoding="utf-8")
    assert drawn == svg(PICTURES[name]), "run `python -m tests.meta.lifelines`"
    shown = (FOLDER.parent / "how_it_works.md").read_text(encoding="utf-8")
    assert shown.count(f"images/lives-{name}.svg") == 1


def test_there_are_no_others() -> None:
    assert {path.stem for path in FOLDER.glob("lives-*")} == {f"lives-{name}" for name in PICTURES}


@pytest.mark.parametrize("name", PICTURES)
def test_lines_lie_within_the_phases(name: str) -> None:
    picture = PICTURES[name]
    steps = sum(count for _, count in picture.phases)
    assert len(picture.ticks) == steps
    for line in picture.lines:
        assert all(0 <= start < stop <= steps for _, start, stop in line.spans), line.name
