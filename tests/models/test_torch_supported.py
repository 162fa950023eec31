"""Any causal language model of transformers: those of the table in docs/ do what it says, and it says enough."""

from collections.abc import Collection
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.models.supported import (
    IMAGES,
    NOT_TRIED,
    TABLE,
    TEXT,
    cells_of,
    check_use,
    checked,
    counts,
    planned,
    plans,
    table,
    table_lines,
)
from tests.models.tiny_overrides import NOT_BUILT

# One of each kind of head, of MLP and of what is left.
REPRESENTATIVE = (
    "apertus bart bert bitnet bloom cohere2 ctrl deepseek_v3 electra ernie4_5 falcon falcon_h1 gemma4_text git gpt2 gpt_neox "
    "axk2 granitemoeshared inkling_text mamba mixtral mpt nemotron opt phi prophetnet qwen3_5_text stablelm starcoder2 xlnet"
).split()
WITH_IMAGES = "idefics2 llama4 paligemma qwen3_5 t5gemma2".split()


def first(kinds: list[str], types: Collection[str]) -> list[Any]:
    """All types, those that are not among the kinds marked as deep."""
    return [pytest.param(kind, marks=() if kind in kinds else pytest.mark.deep) for kind in types]


@pytest.mark.parametrize("kind", first(REPRESENTATIVE, TEXT))
def test_a_tiny_model_trains_as_its_untiled_self(kind: str) -> None:
    saved = kind not in REPRESENTATIVE or kind in ("gpt2", "falcon_h1", "bert")
    assert cells_of(checked(kind, saved=saved).line)[:-1] == cells_of(table_lines()[kind])[:-1]


@pytest.mark.parametrize("kind", first(["llama", "gpt_neox", "xlm"], TEXT))
def test_plan_reads_it(kind: str) -> None:
    assert planned(kind) == cells_of(table_lines()[kind])[-1]


@pytest.mark.parametrize("kind", first(WITH_IMAGES, IMAGES))
def test_a_tiny_model_of_images_and_text_does(kind: str) -> None:
    found = cells_of(checked(kind, images=True, saved=False).line)
    assert found[:-1] == cells_of(table_lines(images=True)[kind])[:-1]


@pytest.mark.parametrize("kind", first(["llava", "t5gemma2", "udop", "vision-encoder-decoder"], IMAGES))
def test_plan_reads_one_of_images_and_text(kind: str) -> None:
    """Given text, and what else its class asks for; where tiling was not tried it is not either."""
    line = cells_of(table_lines(images=True)[kind])
    assert line[-1] == (NOT_TRIED if line[2] == NOT_TRIED else planned(kind, images=True))


# Of kimi_linear that takes most of a minute.
@pytest.mark.parametrize("kind", first(["mixtral"], [kind for kind in TEXT if kind not in {*NOT_BUILT, "kimi_linear"}]))
def test_it_generates_and_is_checkpointed_as_its_untiled_self(kind: str) -> None:
    check_use(kind)


@pytest.mark.parametrize(("images", "types", "least"), [(False, TEXT, (150, 170, 182)), (True, IMAGES, (70, 70, 69))])
def test_the_table_has_every_type_and_says_enough(
    images: bool, types: dict[str, str], least: tuple[int, int, int]
) -> None:
    lines = table_lines(images=images)
    assert lines.keys() == types.keys()
    losses, mlps = counts([*lines.values()])
    assert losses >= least[0]
    assert mlps >= least[1]
    assert f"Of {len(lines)} types {losses} have their loss tiled and {mlps} MLPs" in TABLE.read_text()
    assert plans([*lines.values()]) >= least[2]


def test_the_page_is_what_its_lines_make() -> None:
    assert table(*([*table_lines(images=images).values()] for images in (False, True))) == TABLE.read_text()
