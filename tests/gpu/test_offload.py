"""Layers' inputs in pinned host memory: the same gradients, less of the device's memory, copies beside the computation."""

from typing import Any

import pytest
import torch
import transformers

from shared_specs.config import Checkpointing, ParallelConfig, Tiling
from shared_specs.tolerances import between
from tiled_torch import tile_model
from tiled_torch.models.block.host_memory import HostMemory, host_memory
from tiled_torch.parallel import parallelize

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, LAYERS = 16384, 512, 6


def step(scope: Any, offload: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the peak of the second step above what was there before it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=512)
    model: Any = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    tile_model(model, scope=scope, tiling=Tiling(shard_tokens=1024))
    parallelize(model, None, ParallelConfig(checkpointing=Checkpointing(offload=offload)))
    ids = torch.arange(TOKENS, device="cuda")[None] % 512
    peak = 0
    for _ in range(2):
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
    return [p.grad for p in model.parameters()], peak


@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_offloaded_inputs(scope: str) -> None:
    expected, on_device = step(scope, False)
    host_memory.cache_clear()
    found, offloaded = step(scope, True)
    for a, b in zip(found, expected, strict=True):
        assert ((a.double() - b.double()).norm() / b.double().norm()).item() <= between("bfloat16")
    row = 2 * TOKENS * HIDDEN
    print(scope, on_device / row, offloaded / row)
    assert host_memory(torch.device("cuda", 0)).bytes == LAYERS * row
    # But one input in use, one on its way, and what the allocator does not split off: less than 1 MiB of each block.
    assert on_device - offloaded >= (LAYERS - 2) * row - 2 * 2**20


def test_copies_run_beside_the_computation() -> None:
    """Some copy to the host and some copy back overlap with a kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step("block", True)
    events: Any = profiled.events()
    kernels = [event.time_range for event in events if "Mem" not in event.name]
    for kind in ("Memcpy DtoH", "Memcpy HtoD"):
        copies = [event.time_range for event in events if kind in event.name]
        assert len(copies) >= LAYERS
        assert any(a.start < b.end and b.start < a.end for a in copies for b in kernels)


def test_pinned_memory_is_little_more_than_the_inputs() -> None:
    """PyTorch rounds what it pins up to a power of two: 5 MiB in one piece would be eight."""
    memory, size = HostMemory(torch.device("cuda", 0)), 5 * 2**20
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    waiting = [memory.put(torch.full((size,), number, dtype=torch.uint8, device="cuda")) for number in range(3)]
    taken = torch.cuda.host_memory_stats()["active_bytes.current"] - before
    print(taken / (3 * size))
    assert 3 * size <= taken <= 3 * size * 17 / 16
    for number, each in reversed([*enumerate(waiting)]):
        assert each.take().eq(number).all()
