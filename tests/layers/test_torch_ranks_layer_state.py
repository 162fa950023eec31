"""Parameters of the layers that are split over gloo ranks: initial values, attributes, experts, embeddings, errors.

What runs on the ranks is in ranks_layer_state.py.
"""

import inspect
from typing import Any

import pytest
import torch

from shared_specs import SpecError, UnsupportedError
from shared_specs.signatures import PARALLEL_SIGNATURES
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.ranks import Ranks
from tiled_torch import parallel

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.layers.ranks_torch_layer_state:{function}", **arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world", "group"), [(2, "default"), (4, "default"), (4, "subset"), (4, "mesh dim")])
def test_initial_values_are_slices_of_one_master(pools, world, group, dtype):
    for answer in run(pools, world, "initial", group=group, dtype=dtype):
        if answer is not None:
            assert len(answer) == 19
            assert all(answer.values()), answer


def test_attributes(pools):
    """[shape, tensor_model_parallel, partition_dim, partition_stride, allreduce], of copies as well."""
    assert (
        run(pools, 2, "attributes")
        == [
            {
                "column.weight": [[4, 6], True, 0, 1, True],
                "column.bias": [[4], True, 0, 1, True],
                "row.weight": [[6, 4], True, 1, 1, True],
                "row.bias": [[6], False, -1, 1, True],
                "expert.weight": [[4, 6], True, 0, 2, False],
                "expert.bias": [[4], True, 0, 2, False],
                "embedding.weight": [[5, 6], True, 0, 1, True],
                "from meta.weight": [[6, 4], True, 1, 1, True],
                "from meta.bias": [[6], False, -1, 1, True],
                "copied.weight": [[4, 6], True, 0, 2, False],
                "copied.bias": [[4], True, 0, 2, False],
            }
        ]
        * 2
    )


NEAR = ("gathered", "local", "instead of its own", "deferred gradient", "added later", "gradient added later")
NEAR += ("added after a row", "gradient added after a row")


@pytest.mark.parametrize("world", WORLDS)
def test_arguments_of_a_call(pools, world):
    for answer in run(pools, world, "calls"):
        errors = [answer.pop(name) for name in NEAR]
        assert max(errors) <= DISTRIBUTED_FLOAT64
        assert answer == {
            "parameters": [],
            "gradient": True,
            "not gathered": [3, 8 // world],
            "deferred": [True, 1, 0],
            "deferred holds a graph": False,
            "skipped": True,
            "copied": True,
        }


@pytest.mark.parametrize("world", WORLDS)
def test_deferred_gradient_of_a_tied_head(pools, world):
    """It joins the embedding's own, which backward has left there."""
    for answer in run(pools, world, "tied"):
        assert answer["before"] > DISTRIBUTED_FLOAT64
        assert answer["after"] <= DISTRIBUTED_FLOAT64
        assert answer["counts"] == [0, 1]


def test_experts_talk_to_their_own_group(pools):
    """Two groups of two among four ranks; a default group is refused (REFUSED: "expert", "module expert")."""
    for answer in run(pools, 4, "experts"):
        assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64
        assert answer["groups"] == [2, 2]  # the row-parallel sum, and that of the column-parallel input gradient
        assert answer["allreduce"] == [False]


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "equal": {},
    "range": {"vocab": 19, "partition": "range"},
    "padded": {"vocab": 19, "partition": "padded"},
    "fewer entries than ranks": {"vocab": 1, "partition": "range"},
    "fewer entries than ranks, padded": {"vocab": 1, "partition": "padded"},
    "scattered": {"scattered": True},
    "scattered dim 1": {"scattered": True, "sequence_dim": 1},
    "scattered uneven": {"scattered": True, "sizes": {2: [3, 1], 4: [0, 3, 1, 2]}, "vocab": 19, "partition": "range"},
    "deterministic": {"deterministic": True},
    "deterministic scattered": {"deterministic": True, "scattered": True},
    "mesh": {"group": "mesh"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 scattered": {"dtype": "bfloat16", "scattered": True, "deterministic": True},
}


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("world", WORLDS)
def test_embedding(pools, world, name):
    """Rows come from one rank and zeros from the others: y is exact in every dtype. One collective."""
    given = EMBEDDINGS[name]
    given = {name: value[world] if name == "sizes" else value for name, value in given.items()}
    for answer in run(pools, world, "embedding", **given):
        assert answer["y"]
        assert answer["dweight"] <= DISTRIBUTED_FLOAT64
        assert answer["padding"] == 0.0
        if given.get("scattered"):  # 16 bits of four ranks are exchanged and added in float32
            scattered = "alltoall_base_" if world > 2 and "dtype" in given else "_reduce_scatter_base_"
            assert answer["collectives"] == [{scattered: 1}, {"_allgather_base_": 1}]
        else:
            assert answer["collectives"] == [{"allreduce_": 1}, {}]


@pytest.mark.parametrize(
    "given", [{}, {"scattered": True, "sizes": [3, 1], "vocab": 19, "partition": "range"}], ids=str
)
@pytest.mark.parametrize("group", ["subset", "mesh dim"])
def test_embedding_in_groups_that_are_not_the_world(pools, group, given):
    inside = [one for one in run(pools, 4, "embedding", group=group, **given) if one is not None]
    assert len(inside) == (2 if group == "subset" else 4)
    assert all(answer["y"] and answer["dweight"] <= DISTRIBUTED_FLOAT64 for answer in inside)


@pytest.mark.parametrize(("deterministic", "node"), [(False, "EmbeddingBackward0"), (True, "IndexBackward0")])
def test_how_a_deterministic_embedding_looks_up(pools, deterministic, node):
    for answer in run(pools, 2, "embedding", deterministic=deterministic):
        assert answer["lookup"] == [node]


REFUSED = {
    "weight": "SpecError: column_parallel_linear: weight must be [2, 4], got [2, 5] (x is [3, 4]). tiled_torch keeps ",
    "matrix": "SpecError: column_parallel_linear: weight must be a matrix [out, in], got [4].",
    "bias": "SpecError: column_parallel_linear: bias must be [2], got [4].",
    "dtype": "SpecError: column_parallel_linear: weight must be of x's dtype float32, got float64.",
    "integers": "SpecError: column_parallel_linear: x must be of dtype float32, bfloat16, float16, float64, got int64.",
    "x": "TypeError: column_parallel_linear: x must be an array, got list.",
    "options": "TypeError: column_parallel_linear: options must be a ParallelLinearOptions, got int.",
    "flag": "TypeError: column_parallel_linear: sequence_parallel must be True or False, got int.",
    "option": "TypeError: column_parallel_linear: options.async_grad_reduce must be True or False, got NoneType.",
    "stride": "SpecError: column_parallel_linear: options.stride must be >= 1, got 0.",
    "stride of the rows": "SpecError: column_parallel_linear: weight's rows must be a multiple of options.stride = 3, got 2.",
    "both": "SpecError: column_parallel_linear: options.disable_grad_reduce must be False with sequence_parallel, got True.",
    "row reduction": "SpecError: row_parallel_linear: options.disable_grad_reduce must be False, got True. The input ",
    "limit": "SpecError: column_parallel_linear: options.wgrad_deferral_limit must be 0 without options.defer_weight_grad, ",
    "limit below zero": "SpecError: column_parallel_linear: options.wgrad_deferral_limit must be >= 0, got -1.",
    "explicit": "SpecError: column_parallel_linear: gather_output must be False with options.explicit_expert_comm, got True. ",
    "explicit tokens": "SpecError: column_parallel_linear: sequence_parallel must be False with options.explicit_expert_comm, ",
    "explicit row": "SpecError: row_parallel_linear: input_is_parallel must be True with options.explicit_expert_comm, got ",
    "explicit bias": "SpecError: row_parallel_linear: bias must be left out with options.explicit_expert_comm, got one that ",
    "explicit module": "SpecError: RowParallelLinear: bias must be left out with options.explicit_expert_comm, got one that ",
    "row input": "SpecError: row_parallel_linear: input_is_parallel must be True with sequence_parallel, got False. ",
    "row columns": "SpecError: row_parallel_linear: x's last dim must be a multiple of the 2 ranks it is split over, got 5.",
    "row tokens": "SpecError: row_parallel_linear: dim 0 of x must be a multiple of the 2 ranks it is split over, got 3 ",
    "sizes": "SpecError: column_parallel_linear: split_sizes must be left out without sequence_parallel, got [3, 3]. ",
    "own size": "SpecError: column_parallel_linear: split_sizes must be 3 for rank 0, the size of dim 0 of x, got 4 in ",
    "sequence dim": "SpecError: column_parallel_linear: options.sequence_dim must be a dim of tokens, got 1 (x is [3, 4]).",
    "expert": "SpecError: column_parallel_linear: group must be given with options.is_expert, got None. An expert's ",
    "main_grad": "SpecError: column_parallel_linear: weight.main_grad must be a torch.float32 or torch.bfloat16 or "
    "torch.float16 tensor [2, 4] with options.gradient_accumulation_fusion, got NoneType.",
    "dtype of main_grad": "SpecError: column_parallel_linear: weight.main_grad must be a torch.float32 or torch.bfloat16 or "
    "torch.float16 tensor [2, 4] with options.gradient_accumulation_fusion, got torch.float64 [2, 4].",
    "leaf": "SpecError: column_parallel_linear: weight is a result, and options.defer_weight_grad takes a leaf. ",
    "frozen": "SpecError: linear_with_frozen_weight: weight needs a gradient. ",
    "frozen option": "SpecError: linear_with_frozen_weight: options.defer_weight_grad must be False, got True. A frozen ",
    "split": "SpecError: ColumnParallelLinear: out_features must be a multiple of the 2 ranks it is split over, got 3.",
    "fused split": "SpecError: ColumnParallelLinear: out_features must be a multiple of the 2 ranks it is split over times ",
    "features": "SpecError: ColumnParallelLinear: in_features must be >= 1, got 0.",
    "init_method": "TypeError: ColumnParallelLinear: init_method must be a function that fills a tensor in place, or None, ",
    "no weight": "SpecError: ColumnParallelLinear: weight must be given to a layer made with allocate_weight=False, got ",
    "other weight": "SpecError: ColumnParallelLinear: weight must be [2, 4], got [3, 4].",
    "module expert": "SpecError: ColumnParallelLinear: group must be given with options.is_expert, got None. An expert's ",
    "id": "SpecError: vocab_parallel_embedding: ids must be in [0, 4), got 4.",
    "ids": "SpecError: vocab_parallel_embedding: ids must be int32 or int64, got float32.",
    "vocab_size": "SpecError: vocab_parallel_embedding: the partition of the vocabulary must be >= 3 entries on rank 0 of 2 ",
    "tokens": "SpecError: vocab_parallel_embedding: dim 0 of ids must be a multiple of the 2 ranks it is split over, got 3 ",
    "unused dim of a module": "SpecError: VocabParallelEmbedding: sequence_dim must be left out without reduce_scatter_",
    "unused dim": "SpecError: vocab_parallel_embedding: sequence_dim must be left out without reduce_scatter_embeddings, ",
    "elements": "SpecError: split_tensor_into_1d_equal_chunks: the elements of tensor must be a multiple of the 2 ranks they ",
    "module": "TypeError: sharded_state_dict: module must be a torch.nn.Module, got dict.",
}


def test_equal_chunks_of_a_tensor(pools):
    for found in run(pools, 2, "chunks"):
        assert all(found.values()), found


@pytest.mark.parametrize("contiguous", [False, True])
def test_parts_of_the_last_dim(contiguous):
    x = torch.arange(24.0).reshape(2, 12)
    parts = parallel.split_tensor_along_last_dim(x, 3, contiguous)
    assert torch.equal(torch.cat(parts, -1), x)
    assert [part.is_contiguous() for part in parts] == [contiguous] * 3
    with pytest.raises(SpecError, match=r"num_partitions must be a divisor of 12, got 5 \(tensor is \[2, 12\]\)\."):
        parallel.split_tensor_along_last_dim(x, 5)


def test_a_strict_load_takes_extra_state(pools):
    """As Megatron-LM's layers do; no other key, and none is written."""
    for found in run(pools, 2, "extra_state"):
        assert 'Unexpected key(s) in state_dict: "up.extra_state"' in found.pop("other")
        assert found == {"loaded": True, "keys": [], "written": [], "given": True}


def test_a_wrong_call_is_refused_before_anything_is_sent(pools):
    """By the rank that makes it, with no other rank in any call."""
    messages = run(pools, 2, "refused")[0]
    assert messages.pop("collectives") == "0"
    assert set(messages) == set(REFUSED)
    for name, message in messages.items():
        assert message.startswith(REFUSED[name]), name


def test_dtensors_and_second_derivatives_are_unsupported(pools):
    for dtensor, second in run(pools, 2, "more_refused"):
        assert dtensor.startswith("column_parallel_linear: weight must be a plain tensor, got a DTensor. ")
        assert second.startswith("column_parallel_linear: create_graph must be False in backward, got True. ")


@pytest.mark.deep
def test_a_wrong_layer_on_one_rank_does_not_hang_the_others(pools):
    first, second = run(pools, 2, "alone", seconds=2)
    assert first.startswith("SpecError: column_parallel_linear: weight must be [2, 4], got [2, 5] (x is [2, 4]).")
    assert second.startswith("RuntimeError: column_parallel_linear: all-gather failed on rank 1 of 2. Every rank of ")


def test_without_a_process_group():
    with pytest.raises(UnsupportedError, match=r"^ColumnParallelLinear: group must be usable here, got no initialised"):
        parallel.ColumnParallelLinear(4, 8)


LAYERS = ("column_parallel_linear", "row_parallel_linear", "linear_with_frozen_weight", "vocab_parallel_embedding")
LAYERS += ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")
LAYERS += ("deferred_weight_grad", "sharded_state_dict", "broadcast_data", "inference_path")


@pytest.mark.parametrize("name", LAYERS)
def test_signatures(name):
    found = inspect.signature(getattr(parallel, name)).parameters.values()
    agreed = [argument for argument in PARALLEL_SIGNATURES[name] if "torch" in argument.halves]
    assert [one.name for one in found] == [argument.name for argument in agreed]
    for one, argument in zip(found, agreed, strict=True):
        assert one.default is inspect.Parameter.empty or one.default == argument.default, one
        assert (one.kind is inspect.Parameter.KEYWORD_ONLY) == argument.keyword_only, one
