"""Tiled linear layers under FSDP2 on two and four gloo ranks: every tile a unit of its own. They run ranks_linear.py."""

from itertools import product
from typing import Any

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.core.ranks_torch_each import run_each
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture
def ranks(pools: dict[int, Ranks]) -> Ranks:
    return pools[2]


@pytest.fixture
def four(pools: dict[int, Ranks]) -> Ranks:
    return pools[4]


def run(ranks: Ranks, function: str, *cases: dict[str, Any]) -> list[list[Any]]:
    """For every case what the ranks return."""
    return run_each(ranks, f"tests.linear.ranks_torch_linear:{function}", cases)


def assert_fsdp(answers: list[Any], what: object) -> None:
    for answer in answers:
        assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64, what
        assert answer["fired"], what


def test_gradients_are_those_of_the_untiled_layer(ranks):
    """Splits of uneven sizes included, the bias inside and returned; every parameter's gradient is accumulated once."""
    axes = {"grid": ([3, 5], [1, 1]), "checkpointed": (False, True), "return_bias": (False, True)}
    cases = [dict(zip(axes, case, strict=True)) for case in product(*axes.values())][:6]  # of [1, 1] two
    for case, answers in zip(cases, run(ranks, "fsdp", *cases), strict=True):
        assert_fsdp(answers, case)


@pytest.mark.deep
def test_four_ranks(four):
    """Gradients, two gathered tiles and checkpoints; splits whose rows four ranks cannot share evenly included."""
    assert_fsdp(run(four, "fsdp", {"grid": [3, 5]})[0], "four")
    for answer in run(four, "gathered", {"grid": [2, 4]})[0]:
        assert answer["peak"] <= answer["two"]
        assert answer["buffers"] <= answer["copying"]
    for answer in run(four, "checkpoints", {"saved": [3, 5], "loaded": [2, 4]})[0]:
        assert answer["equal"] == [True, True]
        assert answer["gathers"] == 0


def test_groups_that_are_not_the_world(four):
    """Sharded over two of four ranks: the others are not waited for, and two groups side by side do not mix."""
    cases = [{"grid": [3, 5], "group": group, "return_bias": True} for group in ("subset", "mesh dim")]
    for found, inside in zip(run(four, "fsdp", *cases), (2, 4), strict=True):
        answers = [answer for answer in found if answer is not None]
        assert len(answers) == inside
        assert_fsdp(answers, inside)


def test_two_tiles_are_gathered_at_once_and_never_the_layer(ranks):
    """One computing, one prefetched, of uneven sizes too. While FSDP2 copies one out of its buffer that one takes its bytes
    twice."""
    grids = [[2, 4], [4, 1], [1, 8], [3, 5]]
    for grid, answers in zip(grids, run(ranks, "gathered", *({"grid": grid} for grid in grids)), strict=True):
        for answer in answers:
            assert answer["gathers"] == 2 * answer["units"], grid
            assert answer["peak"] <= answer["two"], grid
            assert answer["peak"] > answer["one"], f"{grid}: a prefetched tile was not seen"
            assert answer["buffers"] <= answer["copying"], grid


def test_the_meter_sees_the_whole_layer_where_it_is_gathered(ranks):
    for answer in run(ranks, "gathered", {"grid": None})[0]:
        assert answer["peak"] == answer["layer"]
        assert answer["buffers"] == 2 * answer["layer"]


@pytest.mark.parametrize("world", [2, 4])
def test_mixed_precision(pools, world):
    """bfloat16 under a policy: gradients about as exact as those of the untiled layer under the same policy."""
    for answer in run(pools[world], "mixed_precision", {"grid": [3, 5]})[0]:
        for tiled, untiled in zip(answer["tiled"], answer["untiled"], strict=True):
            assert tiled <= limit(untiled, "bfloat16")


@pytest.mark.deep
def test_checkpoints_load_at_other_split_counts(ranks):
    """Weights and Adam's moments through torch.distributed.checkpoint, also from and to a plain layer; nothing is gathered."""
    pairs = [([2, 4], [3, 5]), ([3, 5], [2, 1]), (None, [3, 5]), ([3, 5], None)]
    cases = [{"saved": saved, "loaded": loaded} for saved, loaded in pairs]
    keys = [f"{name}.{kind}" for name in ("first", "last", "middle") for kind in ("bias", "weight")]
    for case, answers in zip(cases, run(ranks, "checkpoints", *cases), strict=True):
        for answer in answers:
            assert answer["equal"] == [True, True], case
            assert answer["rest"], case
            assert answer["keys"] == keys, case
            assert answer["gathers"] == 0, case


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2)])
def test_checkpoints_load_at_another_number_of_ranks(pools, tmp_path, saved, loaded):
    """Into another grid, and into a plain layer; splits that the ranks cannot share evenly included."""
    run(pools[saved], "save", {"folder": str(tmp_path), "grid": [3, 5]})
    cases = [{"folder": str(tmp_path), "grid": grid} for grid in ([2, 4], None)]
    assert run(pools[loaded], "load", *cases) == [[[True, True]] * loaded] * 2


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_are_copied_into_sharded_tiles(pools, world):
    """Every rank cuts out its parts; only a sharded source is gathered, its weight and its bias."""
    cases = [{"grid": [3, 5], "source": source} for source in ("plain", "sharded")]
    for gathers, answers in zip((0, 2), run(pools[world], "copied", *cases), strict=True):
        for answer in answers:
            assert answer["equal"]
            assert answer["y"] <= DISTRIBUTED_FLOAT64
            assert answer["kinds"] == ["DTensor"]
            assert answer["collectives"].get("all_gather_into_tensor", 0) == gathers
            assert bool(answer["collectives"]) == bool(gathers)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("world", [2, 4])
def test_an_mlp_of_tiled_linears_is_small_in_tokens_and_in_weights(pools, world):
    """Two slices of weights at a time, gathered once per pass, and no activation larger than x; uneven slices too."""
    for slices, answers in zip((4, 5), run(pools[world], "mlp", {"slices": 4}, {"slices": 5}), strict=True):
        for answer in answers:
            assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64, slices
            assert answer["gathers"][0] == 2 * answer["gathers"][1], slices
            assert answer["peak"] <= answer["two"], slices
            assert answer["largest"] <= answer["x"], slices


def test_an_mlp_of_tiled_linears_in_bfloat16(four):
    for answer in run(four, "mlp", {"slices": 5, "dtype": "bfloat16"})[0]:
        for ours, plain in zip(answer["errors"], answer["plain"], strict=True):
            assert ours <= limit(plain, "bfloat16")
