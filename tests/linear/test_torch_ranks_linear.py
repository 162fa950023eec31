"""Tiled linear layers under FSDP2 on two and four gloo ranks: every tile a unit of its own. They run ranks_linear.py."""

from typing import Any

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture
def ranks(pools: dict[int, Ranks]) -> Ranks:
    return pools[2]


@pytest.fixture
def four(pools: dict[int, Ranks]) -> Ranks:
    return pools[4]


def run(ranks: Ranks, function: str, **arguments: Any) -> list[Any]:
    return ranks.run(f"tests.linear.ranks_torch_linear:{function}", **arguments)


@pytest.mark.parametrize("return_bias", [False, True], ids=["bias inside", "bias returned"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("grid", [[1, 1], [3, 5]], ids=str)
def test_gradients_are_those_of_the_untiled_layer(ranks, grid, checkpointed, return_bias):
    """Splits of uneven sizes included; every parameter's gradient is accumulated once."""
    for answer in run(ranks, "fsdp", grid=grid, checkpointed=checkpointed, return_bias=return_bias):
        assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64
        assert answer["fired"]


def test_four_ranks(four):
    """Gradients, two gathered tiles and checkpoints; splits whose rows four ranks cannot share evenly included."""
    for answer in run(four, "fsdp", grid=[3, 5]):
        assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64
        assert answer["fired"]
    for answer in run(four, "gathered", grid=[2, 4]):
        assert answer["peak"] <= answer["two"]
        assert answer["buffers"] <= answer["copying"]
    for answer in run(four, "checkpoints", saved=[3, 5], loaded=[2, 4]):
        assert answer["equal"] == [True, True]
        assert answer["gathers"] == 0


@pytest.mark.parametrize("group", ["subset", "mesh dim"])
def test_groups_that_are_not_the_world(four, group):
    """Sharded over two of four ranks: the others are not waited for, and two groups side by side do not mix."""
    answers = [one for one in run(four, "fsdp", grid=[3, 5], group=group, return_bias=True) if one is not None]
    assert len(answers) == (2 if group == "subset" else 4)
    for answer in answers:
        assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64
        assert answer["fired"]


@pytest.mark.parametrize("grid", [[2, 4], [4, 1], [1, 8], [4, 8], [3, 5]], ids=str)
def test_two_tiles_are_gathered_at_once_and_never_the_layer(ranks, grid):
    """One computing, one prefetched, of uneven sizes too. While FSDP2 copies one out of its buffer that one takes its bytes
    twice."""
    for answer in run(ranks, "gathered", grid=grid):
        assert answer["gathers"] == 2 * answer["units"]
        assert answer["peak"] <= answer["two"]
        assert answer["peak"] > answer["one"], "a prefetched tile was not seen"
        assert answer["buffers"] <= answer["copying"]


def test_the_meter_sees_the_whole_layer_where_it_is_gathered(ranks):
    for answer in run(ranks, "gathered", grid=None):
        assert answer["peak"] == answer["layer"]
        assert answer["buffers"] == 2 * answer["layer"]


@pytest.mark.parametrize("world", [2, 4])
def test_mixed_precision(pools, world):
    """bfloat16 under a policy: gradients about as exact as those of the untiled layer under the same policy."""
    for answer in run(pools[world], "mixed_precision", grid=[3, 5]):
        for tiled, untiled in zip(answer["tiled"], answer["untiled"], strict=True):
            assert tiled <= limit(untiled, "bfloat16")


@pytest.mark.parametrize(
    ("saved", "loaded"), [([2, 4], [3, 5]), ([3, 5], [2, 1]), (None, [3, 5]), ([3, 5], None)], ids=str
)
def test_checkpoints_load_at_other_split_counts(ranks, saved, loaded):
    """Weights and Adam's moments through torch.distributed.checkpoint, also from and to a plain layer; nothing is gathered."""
    for answer in run(ranks, "checkpoints", saved=saved, loaded=loaded):
        assert answer["equal"] == [True, True]
        assert answer["rest"]
        assert answer["keys"] == [
            f"{name}.{kind}" for name in ("first", "last", "middle") for kind in ("bias", "weight")
        ]
        assert answer["gathers"] == 0


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2)])
def test_checkpoints_load_at_another_number_of_ranks(pools, tmp_path, saved, loaded):
    """Into another grid, and into a plain layer; splits that the ranks cannot share evenly included."""
    run(pools[saved], "save", folder=str(tmp_path), grid=[3, 5])
    for grid in ([2, 4], None):
        assert run(pools[loaded], "load", folder=str(tmp_path), grid=grid) == [[True, True]] * loaded


@pytest.mark.parametrize(("source", "gathers"), [("plain", 0), ("sharded", 2)])
@pytest.mark.parametrize("world", [2, 4])
def test_parameters_are_copied_into_sharded_tiles(pools, world, source, gathers):
    """Every rank cuts out its parts; only a sharded source is gathered, its weight and its bias."""
    for answer in run(pools[world], "copied", grid=[3, 5], source=source):
        assert answer["equal"]
        assert answer["y"] <= DISTRIBUTED_FLOAT64
        assert answer["kinds"] == ["DTensor"]
        assert answer["collectives"].get("all_gather_into_tensor", 0) == gathers
        assert bool(answer["collectives"]) == bool(gathers)


@pytest.mark.parametrize("slices", [4, 5])
@pytest.mark.parametrize("world", [2, 4])
def test_an_mlp_of_tiled_linears_is_small_in_tokens_and_in_weights(pools, world, slices):
    """Two slices of weights at a time, gathered once per pass, and no activation larger than x; uneven slices too."""
    for answer in run(pools[world], "mlp", slices=slices):
        assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64
        assert answer["gathers"][0] == 2 * answer["gathers"][1]
        assert answer["peak"] <= answer["two"]
        assert answer["largest"] <= answer["x"]


@pytest.mark.parametrize("world", [2, 4])
def test_an_mlp_of_tiled_linears_in_bfloat16(pools, world):
    for answer in run(pools[world], "mlp", slices=5, dtype="bfloat16"):
        for ours, plain in zip(answer["errors"], answer["plain"], strict=True):
            assert ours <= limit(plain, "bfloat16")
