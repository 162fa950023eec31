"""Megatron-core's names that need no ranks: the tracker of random streams, checkpointing, marks, names that are there."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs import SpecError
from tiled_torch.compat import megatron
from tiled_torch.compat.megatron import attributes, random, utils
from tiled_torch.compat.megatron.config import check_settings
from tiled_torch.compat.megatron.random import CheckpointWithoutOutput, CheckpointWithoutOutputManager

# The arguments of Megatron-core's functions, in its order: what a caller without names of them relies on.
SIGNATURES = {
    "vocab_parallel_cross_entropy": "vocab_parallel_logits target label_smoothing tp_group",
    "broadcast_data": "keys data datatype tp_group",
    "set_tensor_model_parallel_attributes": "tensor is_parallel dim stride",
    "set_defaults_if_not_set_tensor_model_parallel_attributes": "tensor",
    "copy_tensor_model_parallel_attributes": "destination_tensor source_tensor",
    "param_is_not_tensor_parallel_duplicate": "param tp_group expert_tp_group",
    "linear_with_grad_accumulation_and_async_allreduce": (
        "input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel grad_output_buffer "
        "wgrad_deferral_limit tp_group gtp_remat_size output_dtype"
    ),
    "gather_from_sequence_parallel_region": (
        "input_ tensor_parallel_output_grad group output_split_sizes use_global_buffer"
    ),
    "reduce_scatter_to_sequence_parallel_region": "input_ group input_split_sizes use_global_buffer",
    "all_to_all": "group input_ output_split_sizes_ input_split_sizes use_nccl_stream",
    "checkpoint": "function distribute_saved_activations args",
    "convert_cuda_rng_state": "state to_graphable",
    "split_tensor_along_last_dim": "tensor num_partitions contiguous_split_chunks",
    "split_tensor_into_1d_equal_chunks": "tensor new_buffer tp_group",
    "gather_split_1d_tensor": "tensor tp_group",
    "model_parallel_cuda_manual_seed": (
        "seed te_rng_tracker inference_rng_tracker use_cudagraphable_rng tp_rank ep_rank etp_rank gtp_remat_rank "
        "egtp_remat_rank force_reset_rng gtp_remat_world_size egtp_remat_world_size"
    ),
    "get_cuda_rng_tracker": "use_te_rng_tracker inference_rng_tracker use_cudagraphable_rng",
    "ColumnParallelLinear": (
        "input_size output_size config init_method bias gather_output stride keep_master_weight_for_test skip_bias_add "
        "skip_weight_param_allocation embedding_activation_buffer grad_output_buffer is_expert tp_comm_buffer_name "
        "disable_grad_reduce tp_group name output_dtype pg_collection"
    ),
    "RowParallelLinear": (
        "input_size output_size config init_method bias input_is_parallel skip_bias_add stride "
        "keep_master_weight_for_test is_expert tp_comm_buffer_name tp_group name pg_collection"
    ),
    "VocabParallelEmbedding": (
        "num_embeddings embedding_dim init_method reduce_scatter_embeddings config tp_group pg_collection"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_in_their_order(name: str) -> None:
    assert " ".join(inspect.signature(getattr(megatron, name)).parameters) == SIGNATURES[name]


@pytest.mark.parametrize("graphable", [False, True])
def test_forks_of_one_stream_inside_each_other(graphable: bool) -> None:
    def tracker() -> random.CudaRNGStatesTracker:
        made = random.CudaRNGStatesTracker(use_cudagraphable_rng=graphable)
        made.add("a", 1)
        made.add("b", 2)
        return made

    nested, plain, drawn, expected = tracker(), tracker(), [], []
    with nested.fork("a"):
        drawn.append(torch.rand(3))
        with nested.fork("b"), nested.fork("a"):
            drawn.append(torch.rand(3))
        drawn.append(torch.rand(3))
    with plain.fork("a"):
        expected = [torch.rand(3) for _ in range(3)]
    assert all(map(torch.equal, drawn, expected))
    kind = torch.Generator if graphable else Tensor
    for one, other in zip(nested.get_states().values(), plain.states_.values(), strict=True):
        assert isinstance(one, kind)
        assert torch.equal(*(random.convert_cuda_rng_state(state) for state in (one, other)))  # type: ignore[arg-type]


def test_states_come_and_go_in_both_forms() -> None:
    first, second = random.CudaRNGStatesTracker(), random.CudaRNGStatesTracker(use_cudagraphable_rng=True)
    assert not first.is_initialized()
    first.add("a", 5)
    assert first.is_initialized()
    second.set_states({"a": random.convert_cuda_rng_state(first.get_states()["a"], to_graphable=True)})
    drawn = []
    for one in (first, second):
        with one.fork("a"):
            drawn.append(torch.rand(4))
    assert torch.equal(*drawn)
    assert [random.is_graph_safe_cuda_rng_tracker(one) for one in (first, second)] == [False, True]
    first.reset()
    assert (first.get_states(), first.is_initialized()) == ({}, False)
    with pytest.raises(TypeError, match="state must be a tensor or a generator, got int"):
        random.convert_cuda_rng_state(3)  # type: ignore[arg-type]


def test_what_a_tracker_refuses() -> None:
    tracker = random.CudaRNGStatesTracker()
    tracker.add("a", 5)
    for name, seed in (("a", 6), ("b", 5)):
        with pytest.raises(SpecError, match="must be new"):
            tracker.add(name, seed)
    with pytest.raises(SpecError, match="fork: name must be one of a, got 'model-parallel-rng'"), tracker.fork():
        pass
    with pytest.raises(SpecError, match="use_te_rng_tracker must be False"):
        random.initialize_rng_tracker(use_te_rng_tracker=True)


def test_the_tracker_of_the_process() -> None:
    random.initialize_rng_tracker(force_reset=True)
    tracker = random.get_cuda_rng_tracker()
    assert random.get_cuda_rng_tracker(use_cudagraphable_rng=True) is tracker
    random.model_parallel_cuda_manual_seed(3, tp_rank=2, ep_rank=1, etp_rank=4)
    seeds = {"data-parallel-rng": 3, "model-parallel-rng": 3 + 2718 + 2, "expert-parallel-rng": 3 + 1024 + 100 + 4}
    states = random.get_all_rng_states()
    for name, seed in seeds.items():
        assert torch.equal(states[name], torch.Generator().manual_seed(seed).get_state())
    assert random.get_expert_parallel_rng_tracker_name() in states
    assert random.get_data_parallel_rng_tracker_name() in states
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    quiet = random.get_cuda_rng_tracker()
    quiet.add("a", 1)
    with quiet.fork("whatever"):
        assert quiet.get_states() == {}
    random.initialize_rng_tracker(force_reset=True)


def test_seeds_of_experts_beside_megatron_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SimpleNamespace(is_initialized=lambda: True, get_expert_model_parallel_rank=lambda: 3)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", theirs)  # type: ignore[arg-type]
    seeds = {}
    for there in (True, False):
        theirs.is_initialized = lambda there=there: there
        random.model_parallel_cuda_manual_seed(5, tp_rank=0, etp_rank=1, force_reset_rng=True)
        seeds[there] = random.get_all_rng_states()["expert-parallel-rng"]
    for there, seed in ((True, 5 + 1024 + 300 + 1), (False, 5 + 1024 + 1)):
        assert torch.equal(seeds[there], torch.Generator().manual_seed(seed).get_state())
    theirs.get_expert_gtp_weight_remat_world_size, theirs.is_initialized = lambda: 2, lambda: True
    for given, name in (({}, "egtp_remat_world_size"), ({"gtp_remat_world_size": 4}, "gtp_remat_world_size")):
        with pytest.raises(SpecError, match=f"manual_seed: {name} must be at most 1"):
            random.model_parallel_cuda_manual_seed(5, tp_rank=0, etp_rank=1, **given)  # type: ignore[arg-type]
    random.initialize_rng_tracker(force_reset=True)


@pytest.mark.parametrize("name", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weights_that_megatron_would_shard_once_more_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"config.{name} must be left at 1, got 2"):
        check_settings("ColumnParallelLinear", SimpleNamespace(**{name: 2}))


def test_checkpoint_draws_the_same_numbers_again() -> None:
    tracker = random.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    held = tracker.get_states()

    def fn(x: Tensor, scale: float) -> Tensor:
        with tracker.fork():
            return F.dropout(x, 0.5).cos() * scale

    found = []
    for call in (fn, lambda *args: random.checkpoint(fn, None, *args)):
        tracker.set_states(held)
        x = torch.ones(6, 5, requires_grad=True)
        y = call(x, 3.0)
        found.append([y, *torch.autograd.grad(y.sum(), x)])
    assert all(map(torch.equal, *found))


class _NormAndResidual(torch.autograd.Function):
    """(2 x, x): the second result is the argument itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x

    @staticmethod
    def backward(ctx: Any, d: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * d + residual


@pytest.mark.parametrize("managed", [False, True])
def test_outputs_that_are_arguments_are_kept(managed: bool) -> None:
    x = torch.linspace(0, 1, 6, requires_grad=True)
    manager = CheckpointWithoutOutputManager() if managed else None
    call = CheckpointWithoutOutput(ckpt_manager=manager, retain_input_tensors=True)
    normed, residual = call.checkpoint(_NormAndResidual.apply, x)
    y = normed.sin() + residual
    if manager is None:
        call.discard_output_and_register_recompute(y)
    else:
        call.discard_output_and_register_recompute(y)  # nothing: the manager sees to it
        assert normed.untyped_storage().nbytes()
        manager.discard_all_outputs_and_register_unified_recompute(y)
    assert (normed.untyped_storage().nbytes(), residual.untyped_storage().nbytes()) == (0, 24)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * (2 * x.detach()).cos() + 1)
    with pytest.raises(SpecError, match="the output shares the memory of an argument"):
        CheckpointWithoutOutput().checkpoint(_NormAndResidual.apply, x)


def test_calls_in_a_row_come_back_in_order() -> None:
    x, manager = torch.linspace(0, 1, 6, requires_grad=True), CheckpointWithoutOutputManager()
    first, second = (CheckpointWithoutOutput(ckpt_manager=manager) for _ in range(2))
    a = first.checkpoint(torch.sin, x)
    b = second.checkpoint(torch.exp, a)
    y = b.square()
    manager.discard_all_outputs_and_register_unified_recompute(y)
    assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes() == 0
    y.sum().backward()
    plain = x.detach().requires_grad_()
    plain.sin().exp().square().sum().backward()
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]


def test_what_checkpoints_refuse() -> None:
    with pytest.raises(SpecError, match="fp8 must be False or None"):
        CheckpointWithoutOutput(fp8="e4m3")
    manager = CheckpointWithoutOutputManager()
    with pytest.raises(TypeError, match="ckpt must be a CheckpointWithoutOutput"):
        manager.add_checkpoint(None)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="ckpt has not run a call"):
        manager.add_checkpoint(CheckpointWithoutOutput())


def test_marks() -> None:
    tensor, copied = nn.Parameter(torch.ones(2)), torch.ones(2)
    megatron.set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "expert_tp", "is_qkv", "qkv_split_shapes")
    assert [getattr(tensor, name) for name in names] == [False, -1, 1, False, False, None]
    with pytest.raises(SpecError, match="tensor is marked already"):
        megatron.set_tensor_model_parallel_attributes(tensor, True, 0, 1)
    given: Any = torch.ones(2)
    given.is_qkv, given.qkv_split_shapes, given.is_gtp_weight_remat = True, [4, 2, 2], True
    with pytest.raises(SpecError, match="it has is_qkv"):
        megatron.set_tensor_model_parallel_attributes(given, True, 0, 1)
    megatron.copy_tensor_model_parallel_attributes(copied, given)
    megatron.copy_gtp_attributes(copied, given)
    assert [vars(copied)[name] for name in vars(given)] == [True, [4, 2, 2], True]
    marked = torch.ones(2)
    megatron.set_tensor_model_parallel_attributes(marked, True, 1, 2)
    assert attributes.param_is_not_tensor_parallel_duplicate(marked)


class _Group:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def test_which_copies_count() -> None:
    parameter: Any = torch.ones(1)
    assert not megatron.param_is_not_tensor_parallel_duplicate(parameter, _Group(1), _Group(0))
    assert megatron.param_is_not_tensor_parallel_duplicate(parameter, _Group(0))
    parameter.allreduce = False
    assert megatron.param_is_not_tensor_parallel_duplicate(parameter, _Group(1), _Group(0))
    assert megatron.param_is_not_gtp_duplicate(parameter)


def test_parts() -> None:
    whole = torch.arange(12).view(2, 6)
    parts = megatron.split_tensor_along_last_dim(whole, 3, contiguous_split_chunks=True)
    assert torch.equal(parts[1], whole[:, 2:4])
    assert parts[1].is_contiguous()
    assert utils.VocabUtility.vocab_range_from_global_vocab_size(12, 1, 3) == (4, 8)
