"""Calls that are not alike on all gloo ranks: refused on every rank before anything else is sent. See ranks_agreement.py."""

from typing import Any

import pytest

pytestmark = pytest.mark.ranks

MLP, HEAD = "tensor_parallel_mlp", "vocab_parallel_linear_cross_entropy"


def run(pools: Any, world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.collectives.ranks_torch_agreement:{function}", **arguments)


OF_MLP = {
    "shards": "shard_tokens must be the same on all 2 ranks, got 2, 4.",
    "tokens": "the tokens of x must be the same on all 2 ranks, got (8, 8), (5, 5).",
    "keep": "the first kept token must be the same on all 2 ranks, got 16, 8.",
    "sequence_parallel": "sequence_parallel must be the same on all 2 ranks, got True, False.",
    "dtype": "dtypes must be the same on all 2 ranks, got (torch.float64, torch.float64), (torch.float32, torch.float32).",
    "gradient of x": "x.requires_grad must be the same on all 2 ranks, got False, True.",
    "any gradient": "any requires_grad must be the same on all 2 ranks, got False, True.",
}


@pytest.mark.deep_but(4)
@pytest.mark.parametrize("what", OF_MLP)
def test_calls_of_the_mlp(pools, what):
    """One error text everywhere; afterwards the group works as before."""
    assert run(pools, 2, "mlp", what=what) == [[f"{MLP}: {OF_MLP[what]}", "accepted"]] * 2


OF_LOSS = {
    "shards": "shard_tokens must be the same on all 4 ranks, got 2, 2, 2, 4.",
    "tokens": "the tokens of x must be the same on all 4 ranks, got 8, 8, 8, 5.",
    "sequence shards": "shard_tokens must be the same on all 4 ranks, got 2, 2, 2, 4.",
    "sequence tokens": "the tokens of x must be the same on all 4 ranks, got (8, 8, 8, 8), (8, 8, 8, 8), ",
    "reduction": "loss must be the same on all 4 ranks, got LossOptions(",
    "vocab_size": "vocab_size must be the same on all 4 ranks, got 24, 24, 24, 23.",
}


@pytest.mark.parametrize("what", OF_LOSS)
def test_calls_of_the_loss(pools, what):
    messages = run(pools, 4, "loss", what=what)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{HEAD}: {OF_LOSS[what]}")


def test_calls_of_the_loss_of_logits(pools):
    message = "vocab_parallel_cross_entropy: the tokens of target must be the same on all 2 ranks, got 8, 5."
    assert run(pools, 2, "loss", what="logits") == [message] * 2


REGION = "parallel_region"
OF_SIZES = {  # the function, and what it sends: of all ranks but the last, then of that one
    "gather": (f"gather_from_sequence_{REGION}", "all-gather of float32 [3, 2]", "all-gather of float32 [2, 2]"),
    "gather of features": (
        f"gather_from_tensor_{REGION}",
        "all-gather of float32 [2, 3] along dim 1",
        "all-gather of float32 [2, 2] along dim 1",
    ),
    "parts": (
        f"gather_from_sequence_{REGION}",
        "all-gather of float32 [3, 2]",
        "all-gather of float32 [4, 2] in parts [",
    ),
    "dtype": (f"gather_from_sequence_{REGION}", "all-gather of float32 [3, 2]", "all-gather of float64 [3, 2]"),
    "sum": (f"reduce_from_tensor_{REGION}", "all-reduce of float32 [3]", "all-reduce of float32 [2]"),
    "scatter": (f"reduce_scatter_to_sequence_{REGION}", "reduce-scatter of float32 [", "reduce-scatter of float32 ["),
    "column": ("column_parallel_linear", "all-gather of float32 [3, 4]", "all-gather of float32 [2, 4]"),
    "row": ("row_parallel_linear", "all-reduce of float32 [3, 2]", "all-reduce of float32 [2, 2]"),
    "embedding": ("vocab_parallel_embedding", "all-reduce of float32 [3, 4]", "all-reduce of float32 [2, 4]"),
    "norm": ("norm_column_parallel_linear", "all-gather of float32 [3, 4]", "all-gather of float32 [2, 4]"),
    "residual norm": (
        "row_parallel_linear_residual_norm",
        "reduce-scatter of float32 [",
        "reduce-scatter of float32 [",
    ),
}
EXCHANGES = {"to hidden": "all_to_all_sequence_to_hidden", "exchange": "all_to_all"}


@pytest.mark.parametrize("what", [*OF_SIZES, *EXCHANGES])
@pytest.mark.parametrize(("world", "group"), [(2, "default"), (4, "default"), (4, "subset")])
def test_sizes_that_do_not_fit_each_other(pools, world, group, what):
    """No rank can know it of its own arguments, and gloo would end the process: one error on all, and the group goes on."""
    answers = [answer for answer in run(pools, world, "sizes", what=what, group=group) if answer is not None]
    ranks = len(answers)
    assert ranks == (2 if group == "subset" else world)
    (message,) = {message for message, _ in answers}
    assert all(alike for _, alike in answers)
    if what in EXCHANGES:
        rows = f"the rows that rank 0 takes from rank {ranks - 1} must be the 2 that it gives it, got 3."
        assert message == f"{EXCHANGES[what]}: {rows}"
        return
    function, alike, odd = OF_SIZES[what]
    start = f"{function}: the collective must be the same on all {ranks} ranks, got {alike}"
    assert message.startswith(start)
    assert message.count(alike) == ranks - (alike != odd)
    assert odd in message.removeprefix(start)


def test_ranks_in_different_functions(pools):
    rule = "the function must be the same on all 2 ranks, got another, one."
    assert run(pools, 2, "functions") == [f"another: {rule}", f"one: {rule}"]


@pytest.mark.parametrize("group", ["default", "mesh", "subset"])
def test_nothing_is_sent_the_second_time(pools, group):
    """Once for each group and combination."""
    found = [counts for counts in run(pools, 4, "counts", group=group) if counts is not None]
    assert len(found) == (2 if group == "subset" else 4)
    assert all(counts[:4] == [1, 0, 1, 0] for counts in found), found


@pytest.mark.parametrize(
    ("what", "refused"),
    [("values", True), ("complex values", True), ("shapes", True), ("roundings", False), ("complex", False)],
)
@pytest.mark.parametrize("world", [2, 4])
def test_inputs_to_be_partitioned(pools, world, what, refused):
    messages = run(pools, world, "partitioned", what=what)
    assert len(set(messages)) == 1
    start = "accepted"
    if refused:
        start = "checkpoint: partitioned inputs differ between the ranks. Inputs of a sequence"
    if what == "shapes":
        start = f"checkpoint: the shapes of partitioned inputs must be the same on all {world} ranks, got (((4, 4), "
    assert messages[0].startswith(start)


REFUSED = {
    "configuration": "config must be the same on all {world} ranks, got ParallelConfig(",
    "kind of model": "the class of model must be the same on all {world} ranks, got TiledMLP, ",
    "sizes": "the parameters of model must be the same on all {world} ranks, got 3 of 96 elements, digest ",
    "frozen": "the parameters of model must be the same on all {world} ranks, got 3 of 96 elements, digest ",
}
OWN = {
    "refused": "intermediate_size must be a multiple of the 2 ranks of the mesh axis 'tp', got 9.",
    "model": "model must be an nn.Module, got NoneType.",
}


@pytest.mark.parametrize("what", [*REFUSED, *OWN])
@pytest.mark.parametrize("world", [2, 4])
def test_models_and_configurations(pools, world, what):
    """Of parallelize, on one rank of a mesh: no rank changes its model, and all of them can call again."""
    answers = run(pools, world, "parallelized", what=what)
    assert all(untouched for _, untouched in answers)
    *others, last = [message.removeprefix("parallelize: ") for message, _ in answers]
    if what in REFUSED:
        assert {*others, last} == {last}
        assert last.startswith(REFUSED[what].format(world=world)), last
        return
    assert last.startswith(OWN[what])
    elsewhere = f"rank {world - 1} of the mesh refuses the call. There: parallelize: "
    assert all(message == elsewhere + last for message in others), others


def test_a_rank_outside_the_mesh(pools):
    """Is refused, and the others do not wait for it."""
    text = "parallelize: this rank is not in mesh. Call it only on the ranks of the mesh."
    assert run(pools, 4, "outside") == ["accepted"] * 3 + [text]
