"""The MLP whose weights are split over gloo ranks in use: module, checkpoints, engines, torch.compile, wrong calls.

What runs on the ranks is in ranks_tensor_mlp_use.py.
"""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shared_specs import UnsupportedError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.core.ranks_torch_each import run_each
from tests.mlp.test_torch_ranks_tensor_mlp import FEATURES, HIDDEN, WORLDS, assert_close
from tests.ranks import Ranks
from tiled_torch import TiledMLP
from tiled_torch.parallel import TensorParallelTiledMLP, tensor_parallel_mlp

pytestmark = pytest.mark.ranks


def run(pools: dict[int, Ranks], world: int, function: str, *cases: dict[str, Any]) -> list[list[Any]]:
    """For every case what the ranks return."""
    return run_each(pools[world], f"tests.mlp.ranks_torch_tensor_mlp_use:{function}", cases)


@pytest.mark.parametrize("world", WORLDS)
def test_module(pools, world):
    kinds = [("gated", True, True), ("gated", False, False), ("plain", True, False), ("fused", True, True)]
    cases = [
        {"gated": kind != "plain", "fused": kind == "fused", "bias": bias, "sequence_parallel": sequence_parallel}
        for kind, bias, sequence_parallel in kinds
    ]
    for (kind, bias, _), answers in zip(kinds, run(pools, world, "module", *cases), strict=True):
        assert_close(answers, 1 + (3 if kind == "gated" else 2) * (1 + bias), kind)
        for answer in answers:
            assert answer["same"], kind
            assert answer["dims"]["w_gate_up" if kind == "fused" else "w_up"] == 0, kind
            assert answer["dims"]["w_down"] == 1, kind
            assert answer["dims"].get("b_down", -1) == -1, kind
            assert f"of {FEATURES}" in answer["repr"], kind


def test_main_grad_of_the_modules_parameters(pools):
    """Gate and up in one parameter too: its halves go to the halves of its main_grad, once."""
    options = {"gated": True, "bias": True, "main_grad": True}
    ways = [(sequence_parallel, fused) for sequence_parallel in (True, False) for fused in (True, False)]
    cases = [options | dict(zip(("sequence_parallel", "fused"), way, strict=True)) for way in ways]
    for case, answers in zip(cases, run(pools, 2, "module", *cases), strict=True):
        for answer in answers:
            assert max(answer["errors"].values()) <= DISTRIBUTED_FLOAT64, (case, answer["errors"])
            assert answer["same"], case


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("saved", "loaded", "kind"), [(2, 4, "gated"), (2, 4, "fused"), (4, 2, "plain"), (4, 2, "fused")]
)
def test_checkpoints_load_at_another_number_of_ranks(pools, tmp_path, saved, loaded, kind):
    """And into and from a plain `TiledMLP` in one process, whose names and shapes they have."""
    torch.manual_seed(3)
    options = {"gated": kind != "plain", "bias": kind != "plain", "fused": kind == "fused"}
    shape = {"gated": options["gated"], "bias": options["bias"], "fused_gate_up": options["fused"]}
    plain = torch.nn.ModuleDict({"mlp": TiledMLP(HIDDEN, FEATURES, dtype=torch.float64, **shape)})
    expected = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for state in run(pools, saved, "save", {"folder": str(tmp_path / "ranks"), **options})[0]:
        assert {name: shapes[0] for name, shapes in state.items()} == {n: list(t.shape) for n, t in expected.items()}
        assert state["mlp.w_gate_up" if kind == "fused" else "mlp.w_up"][1] == [FEATURES // saved, HIDDEN]
        assert state["mlp.w_down"][1] == [HIDDEN, FEATURES // saved]
    assert run(pools, loaded, "load", {"folder": str(tmp_path / "ranks"), **options})[0] == [[True, True]] * loaded
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    dcp.load(plain.state_dict(), checkpoint_id=tmp_path / "ranks")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.state_dict().items())
    dcp.save(expected, checkpoint_id=tmp_path / "plain")
    assert run(pools, loaded, "load", {"folder": str(tmp_path / "plain"), **options})[0] == [[True, True]] * loaded


def test_copies_keep_their_group_and_their_slices(pools):
    """deepcopy, conversions and to_empty make other parameters, which engines still have to know as parts."""
    for found in run(pools, 2, "copies", {})[0]:
        assert all(found.values()), found


def test_beside_fsdp2_on_another_mesh_dim(pools):
    cases = [{"kind": kind, "sequence_parallel": s} for kind in ("dtensor", "module") for s in (True, False)]
    for case, answers in zip(cases, run(pools, 4, "data_and_tensor", *cases), strict=True):
        for errors in answers:
            assert len(errors) == 7
            assert max(errors.values()) <= DISTRIBUTED_FLOAT64, (case, errors)


@pytest.mark.deep
def test_inside_torch_compile(pools):
    assert run(pools, 2, "compiled", {}) == [[{"same": True}] * 2]


NAME = "tensor_parallel_mlp"
REFUSED = {
    "sequence_parallel": f"{NAME}: sequence_parallel must be True or False, got int.",
    "split_sizes alone": f"{NAME}: split_sizes must be left out without sequence_parallel, got (8, 8). It says how many",
    "split_sizes kind": f"{NAME}: split_sizes must be a sequence of integers or None, got int.",
    "split_sizes length": f"{NAME}: split_sizes must be of one size for each of the 2 ranks, got [8, 8, 8].",
    "split_sizes of another": f"{NAME}: split_sizes must be 8 for rank ",
    "negative split_sizes": f"{NAME}: split_sizes must be >= 0, got [-8, 8].",
    "x": f"{NAME}: x must be a plain tensor, got a DTensor. Convert it with to_local()",
    "one DTensor": f"{NAME}: w_gate must be a DTensor as the other weights are, got Tensor.",
    "placement": f"{NAME}: w_down must be sharded by dim 1 over one mesh of one dim, got (Shard(dim=0),) over ",
    "group beside a DTensor": f"{NAME}: group must be left out beside a DTensor, got DeviceMesh",
    "mesh": f"{NAME}: group must be a mesh of one dim, got one of 2.",
    "group": f"{NAME}: group must be a process group, a DeviceMesh or None, got str.",
    "whole w_down": f"{NAME}: w_down must be [out, intermediate] = [5, 8], got [5, 16].",
    "num_shards": f"{NAME}: num_shards must be >= 1, got 0 (x is [8, 6]).",
    "deterministic": f"{NAME}: deterministic must be False here, got True. Sums over ranks are",
    "budget": f"{NAME}: memory_budget must be >= ",
    "module": "TensorParallelTiledMLP: intermediate_size must be a multiple of the 2 ranks it is split over, got 15.",
    "activation": "TensorParallelTiledMLP: activation must be one of silu, ",
    "no bias beside DTensors": f"{NAME}: biases['up'] must be an array, got NoneType.",
    **dict.fromkeys(("grad", "vjp", "vmap"), f"{NAME}: this call is inside torch.func. Differentiate the"),
    "create_graph": f"{NAME}: create_graph must be False in backward, got True.",
}


def test_every_rank_refuses(pools):
    """On all ranks, so that none waits for another."""
    found = run(pools, 2, "refused", *({"what": what} for what in REFUSED))
    for (what, text), messages in zip(REFUSED.items(), found, strict=True):
        assert all(message.startswith(text) for message in messages), (what, messages)


@pytest.mark.deep
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_rank_that_never_comes(pools, sequence_parallel):
    """The others wait for the group's timeout, and say who they are and what they waited for."""
    first, second = run(pools, 2, "absent", {"sequence_parallel": sequence_parallel})[0]
    collective = "all-gather" if sequence_parallel else "all-reduce"
    assert first.startswith(
        f"{NAME}: {collective} failed on rank 0 of 2. Every rank of the group (ranks 0, 1 of all) has to make this call"
    )
    assert second.startswith(f"{NAME}: w_up must be [intermediate, hidden] = [8, 6], got [6, 8].")


def test_without_a_process_group():
    with pytest.raises(UnsupportedError, match=r"^tensor_parallel_mlp: group must be usable here"):
        tensor_parallel_mlp(torch.ones(2, 4), None, torch.ones(3, 4), torch.ones(4, 3))
    with pytest.raises(UnsupportedError, match=r"^TensorParallelTiledMLP: group must be usable here"):
        TensorParallelTiledMLP(4, 8)
