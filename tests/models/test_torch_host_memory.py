"""Host memory where layers' inputs wait: no copy meets another in the wrong order, nothing is taken twice or left behind, and
what cannot be pinned, or not be had at all, is told in one message.
"""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from shared_specs.config import Checkpointing, ParallelConfig
from shared_specs.errors import UnsupportedError
from shared_specs.layers.host_memory import MachineMemory
from tests.models.streams import Stream, Streams
from tiled_torch import tile_model
from tiled_torch.models.block import host_memory as room
from tiled_torch.models.block.host_memory import HostMemory, host_memory, powers_of_two
from tiled_torch.parallel import parallelize

CPU = torch.device("cpu")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
IDS = torch.arange(12)[None] % 8
LAYERS = 3
OFFLOAD = ParallelConfig(checkpointing=Checkpointing(offload=True))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory of a GPU machine: what is asked for pinned is had; the sizes are given."""
    sizes, empty = list[int](), torch.empty

    def had(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            sizes.append(shape[0])
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", had)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: sizes.append(0))
    return sizes


def on_streams() -> HostMemory:
    memory = HostMemory(CPU)
    memory.stream, memory.pinned = Stream("copies"), True  # type: ignore[assignment]
    return memory


def model_of(scope: str, config: ParallelConfig | None = OFFLOAD) -> Any:
    torch.manual_seed(0)
    config_of = transformers.LlamaConfig(**SIZES, num_hidden_layers=LAYERS, vocab_size=8)
    model: Any = transformers.LlamaForCausalLM(config_of).double().train()
    if scope != "none":
        tile_model(model, scope=scope, num_shards=2)
    host_memory.cache_clear()
    return model if config is None else parallelize(model, None, config)


def loss_of(model: Any) -> Tensor:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def waiting_now() -> int:
    """Inputs that are in a buffer which nobody else may have."""
    memory = host_memory(CPU)
    return memory.bytes // (12 * 16 * 8) - len(memory.free)


def train(memory: HostMemory, takes: int, sizes: tuple[int, ...] = (2560, 2560)) -> None:
    """Steps of a stack of three layers, with inputs of so many bytes, each of which lets go of what it has read."""
    for size in sizes:
        waiting = []
        x = torch.empty(size, dtype=torch.uint8).fill_(1)
        for number in range(3):
            waiting.append(memory.put(x, takes))
            x = torch.empty(size, dtype=torch.uint8).fill_(number + 2)
        for number, each in reversed([*enumerate(waiting)]):
            for _ in range(takes):
                x = each.take()
                assert x.eq(number + 1).all()
        del waiting, each, x


@pytest.mark.parametrize("takes", [1, 2])
def test_no_copy_meets_another(takes: int, pinned: list[int]) -> None:
    memory = on_streams()
    with Streams() as streams:
        train(memory, takes)
    assert streams.races == []
    assert pinned == 3 * [2048, 512]  # the second step has the first one's


@pytest.mark.parametrize("left_out", ["waits", "records", "events"])
def test_each_wait_is_needed(left_out: str, pinned: list[int]) -> None:
    """The race finder sees what each of them is there for."""
    options: dict[str, Any] = {left_out: False}
    with Streams(**options) as streams:
        train(on_streams(), 1)
    assert streams.races


def test_the_host_waits_for_copies_of_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets go of the buffers of shorter inputs, and may have their memory again at once."""
    streams, piece = Streams(), HostMemory._piece

    def pageable(memory: HostMemory, size: int) -> room.HostPiece:
        found = piece(memory, size)
        streams.pageable(found.bytes)
        return found

    monkeypatch.setattr(HostMemory, "_piece", pageable)
    with streams, pytest.warns(UserWarning, match="2048 bytes of host memory cannot be pinned"):
        train(on_streams(), 1, (2560, 5120, 7680))
    assert streams.races == []


def test_what_cannot_be_pinned_is_pageable_and_told_once() -> None:
    """As on a CPU, where pinning is refused."""
    memory = HostMemory(CPU)
    memory.pinned = True
    with pytest.warns(UserWarning, match="cannot be pinned") as told:
        train(memory, 1)
    assert len(told) == 1
    assert "pin_memory=True requires" in str(told[0].message)
    assert "\n" not in str(told[0].message)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 4096, 4097, 5 * 2**29, 5120 * 131072 * 2, 7 * 10**9 + 1])
def test_pinned_memory_is_taken_in_powers_of_two(size: int) -> None:
    sizes = powers_of_two(size)
    assert sum(sizes) == size
    taken = sum(1 << (each - 1).bit_length() for each in sizes)  # as PyTorch rounds them
    assert taken - size <= size / 16
    assert len(sizes) <= 5


def test_pieces_hold_tensors_of_any_layout(pinned: list[int]) -> None:
    """Also a shorter one in the buffer of a longer one, which is let go of where a longer one still is wanted."""
    memory = HostMemory(CPU)
    memory.pinned = True
    for x in (torch.randn(5, 64), torch.randn(64, 5).T, torch.randn(3, 64, dtype=torch.float64)[:, ::2]):
        assert memory.put(x).take().equal(x)
    assert pinned == [1024, 256]
    assert memory.bytes == 1280
    x = torch.randn(7, 64)
    assert memory.put(x).take().equal(x)
    assert pinned == [1024, 256, 0, 1024, 512, 256]
    assert memory.bytes == 1792


def test_an_input_that_came_ahead_is_not_copied_again() -> None:
    waiting = HostMemory(CPU).put(torch.ones(3))
    waiting.fetch()
    assert waiting.coming is not None
    ahead, _ = waiting.coming
    assert waiting.take() is ahead
    assert waiting.coming is None


@pytest.mark.parametrize("scope", ["none", "mlp", "block"])
def test_too_little_host_memory_is_told_before_a_layer_has_run(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    each = 12 * 16 * 8
    model = model_of(scope)
    monkeypatch.setattr(room, "read_host_memory", lambda: MachineMemory(total=2**40, available=3 * each - 1))
    with pytest.raises(
        UnsupportedError, match=r"Checkpointing\(offload=True\): the inputs of 3 layers take .* available"
    ):
        loss_of(model)
    assert (host_memory(CPU).bytes, host_memory(CPU).free) == (0, [])
    monkeypatch.setattr(room, "read_host_memory", lambda: MachineMemory(total=2**40, available=3 * each))
    loss_of(model).backward()  # nothing was lost
    monkeypatch.setattr(room, "read_host_memory", lambda: pytest.fail("asked again"))
    loss_of(model).backward()


def test_processes_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "read_host_memory", lambda: MachineMemory(total=300 * 2**30, available=2**40))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    x = torch.ones(()).expand(2**28)  # 1 GiB in 4 bytes
    with pytest.raises(
        UnsupportedError, match=r"take 40.0 GiB .* those of 8 processes 320.0 GiB, and this machine has 300"
    ):
        HostMemory(CPU).put(x, inputs=40)


@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_what_is_not_followed_by_backward_leaves_nothing(scope: str) -> None:
    """A forward without gradients, one that fails, one whose result is dropped, two before one backward."""
    model = model_of(scope)
    with torch.no_grad():
        loss_of(model)
    assert host_memory(CPU).bytes == 0
    last = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    last.remove()
    gc.collect()
    assert host_memory(CPU).bytes == LAYERS * 12 * 16 * 8
    assert waiting_now() == 0
    loss_of(model)
    gc.collect()
    assert waiting_now() == 0
    (loss_of(model) + loss_of(model)).backward()
    gc.collect()
    assert waiting_now() == 0
    assert host_memory(CPU).bytes == 2 * LAYERS * 12 * 16 * 8
    once = model_of(scope, None)
    (2 * loss_of(once)).backward()
    for found, wanted in zip(model.parameters(), once.parameters(), strict=True):
        assert found.grad.equal(wanted.grad)


@pytest.mark.parametrize("scope", ["none", "mlp", "block"])
@pytest.mark.parametrize("other", ["save_on_cpu", "transformers"])
def test_two_offloaders_never_take_the_same_tensor(other: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input waits once, whoever else offloads; transformers' checkpointing is taken for the layers' own."""
    taken, theirs, put = list[Tensor](), list[Tensor](), HostMemory.put
    monkeypatch.setattr(HostMemory, "put", lambda self, x, *more: taken.append(x) or put(self, x, *more))

    def pack(saved: Tensor) -> Tensor:
        theirs.append(saved)
        return saved.clone()

    model = model_of(scope, OFFLOAD if other == "save_on_cpu" else ParallelConfig(checkpointing=Checkpointing()))
    if other == "transformers":
        model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    around = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with around if other == "save_on_cpu" else nullcontext():
        loss = loss_of(model)
    places, others = ({x.data_ptr() for x in found} for found in (taken, theirs))
    assert len(places) == len(taken) == LAYERS
    assert not places & others
    loss.backward()
    assert len(taken) == LAYERS
    once = model_of(scope, None)
    loss_of(once).backward()
    for found, wanted in zip(model.parameters(), once.parameters(), strict=True):
        assert found.grad.equal(wanted.grad)


@pytest.mark.parametrize("mode", ["products", "op"])
def test_an_offload_that_a_mode_leaves_out_is_told(mode: Any) -> None:
    """Where layers keep more than their inputs, transformers' offload is not taken over: a warning says so."""
    model = model_of("none", ParallelConfig(checkpointing=Checkpointing(mode=mode)))
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    with pytest.warns(
        UserWarning, match=r"^parallelize: activation_checkpointing_enable\(offload=True\) has no effect"
    ):
        loss_of(model)
    assert host_memory(CPU).bytes == 0
