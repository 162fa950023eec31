"""The norm of gradients of layers split by hand, over gloo ranks, against one process. What runs there: ranks_grad_norm.py."""

from typing import Any

import pytest
import torch
from torch import nn

from shared_specs.errors import SpecError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.ranks import Ranks
from tiled_torch import parallel

pytestmark = pytest.mark.ranks


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.layers.ranks_torch_grad_norm:{function}", **arguments)


@pytest.mark.parametrize("main_grad", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_of_a_split_model(pools, sequence_parallel, main_grad):
    """Embedding, norm, fused up and down: parts once each, copies once, norms that saw their own tokens summed before."""
    answers = run(pools, 2, "norms", sequence_parallel=sequence_parallel, main_grad=main_grad)
    allowed = DISTRIBUTED_FLOAT64 if main_grad is None else limit(torch.finfo(getattr(torch, main_grad)).eps, main_grad)
    assert len({answer["value"] for answer in answers}) == 1
    for answer in answers:
        assert max(answer["norms"]) <= allowed
        assert answer["listed"] <= allowed
        assert answer["own"] > 0.05  # a test that one rank's norm would pass would say nothing
        assert answer["clipped"] <= max(allowed, 1e-6)  # the 1e-6 beside the norm
        assert answer["after"] <= max(allowed, 1e-6)
        assert answer["returned"]
        assert answer["dtype"] == ("torch.float64" if main_grad is None else "torch.float32")
        assert answer["summed"] == (2 if sequence_parallel else 0)


def test_norm_under_fully_shard(pools):
    for errors in run(pools, 4, "fully_sharded"):
        assert len(errors) == 8
        assert max(errors.values()) <= DISTRIBUTED_FLOAT64, errors


def test_experts_and_refusals(pools):
    for found, expected, messages in run(pools, 2, "experts"):
        assert found == pytest.approx(expected, rel=limit(0.0, "float32"))
        assert messages == {
            "experts": "SpecError: get_grad_norm: expert_group must be given for parameters with allreduce=False, got None. "
            "Experts are split over another group than the rest of the model.",
            "both": "SpecError: get_grad_norm: a parameter has gradients in both main_grad and .grad. Add .grad to "
            "main_grad and set it to None.",
            "order": "SpecError: get_grad_norm: norm_type must be > 0, got 0.",
            "max_norm": "SpecError: clip_grad_norm_: max_norm must be >= 0, got -1.0.",
            "kind": "TypeError: get_grad_norm: parameters must be a module or parameters, got int.",
            "list": "TypeError: get_grad_norm: parameters must be a module or parameters, got one with a int.",
        }


def test_marks_of_parameters():
    """Set once, defaults elsewhere, copied with what an expert's parameters have."""
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    parallel.set_tensor_model_parallel_attributes(a, True, 1, 2)
    a.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match=r"tensor is marked already: it has tensor_model_parallel\. "):
        parallel.set_tensor_model_parallel_attributes(a, True, 0, 1)
    parallel.copy_tensor_model_parallel_attributes(b, a)
    for one in (b, c):
        parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(one)
    names = ("tensor_model_parallel", "partition_dim", "partition_stride")
    assert [tuple(getattr(one, name) for name in names) for one in (a, b, c)] == [
        (True, 1, 2),
        (True, 1, 2),
        (False, -1, 1),
    ]
    assert b.allreduce is False  # type: ignore[attr-defined]
    assert not hasattr(c, "allreduce")
    with pytest.raises(TypeError, match="source_tensor must be an array, got int"):
        parallel.copy_tensor_model_parallel_attributes(b, 3)  # type: ignore[arg-type]
