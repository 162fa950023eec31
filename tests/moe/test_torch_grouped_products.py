"""Experts with few rows are multiplied together, by as few grouped products as a shard's rows allow, and exactly as alone."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import MODEL_FLOAT32
from tests.core.torch_counting import GemmFlop
from tiled_torch.moe import steps
from tiled_torch.moe.loops import ExpertsCall
from tiled_torch.moe.routes import Routes
from tiled_torch.moe.steps import ExpertWeights

H, I, E, K = 16, 24, 16, 2  # noqa: E741


class Products(GemmFlop):
    """How many products there were of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"_grouped_mm": 0, "mm": 0, "addmm": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in self.count:
            self.count[name] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def weights_of(
    form: str, dtype: torch.dtype = torch.float32, experts: int = E, inter: int = I
) -> tuple[ExpertWeights, dict[str, Any]]:
    """Weights of experts, and how they are called: two in one, apart, with biases, transposed, or with the input weighed."""
    torch.manual_seed(0)
    width = inter if form in ("apart", "no gate") else 2 * inter
    up, down = torch.randn(experts, width, H) / H**0.5, torch.randn(experts, H, inter) / inter**0.5
    if form == "transposed":
        up, down = up.mT.contiguous(), down.mT.contiguous()
    biases = (
        [torch.randn(experts, width), torch.randn(experts, H)] if form in ("biases", "transposed") else [None, None]
    )
    gate = torch.randn(experts, inter, H) / H**0.5 if form == "apart" else None
    known = (None if a is None else a.to(dtype) for a in (up, down, *biases, gate))
    call = {"transposed": form == "transposed", "weigh_input": form == "weighed input"}
    return ExpertWeights(*known), call  # type: ignore[arg-type]


def gate_of(form: str) -> Any:
    if form == "no gate":
        return torch.relu
    return lambda both: torch.nn.functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]


def choice(tokens: int, experts: Sequence[int] = range(E), dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, the numbers of the experts of every token, which are among those given, what these count, and dy."""
    torch.manual_seed(1)
    weights, places = torch.rand(tokens, len(experts)).topk(K, -1)
    x, dy = torch.randn(tokens, H).to(dtype), torch.randn(tokens, H).to(dtype)
    return x, torch.tensor(experts)[places], weights.to(dtype), dy


def computed(w: ExpertWeights, call: ExpertsCall, given: tuple[Tensor, ...]) -> list[Tensor | None]:
    x, index, weights, dy = given
    return [call.forward(x, index, weights, w), *call.backward(dy, x, index, weights, w, [True] * 7)]


FORMS = ["in one", "apart", "biases", "transposed", "weighed input", "no gate"]


@pytest.mark.parametrize("experts", [range(E), [0, 3, 4, 9], [2, 15]])
@pytest.mark.parametrize("form", FORMS)
def test_together_as_alone(form: str, experts: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """y and all gradients, with experts that have no rows, or more than a shard has, between others; a number is nobody's."""
    (w, options), given = weights_of(form), choice(40, experts)
    given[1][7, 0] = E
    call = ExpertsCall(torch.float32, 12, gate_of(form), **options)
    with Products() as together:
        found = computed(w, call, given)
    monkeypatch.setattr("tiled_torch.moe.loops.takes_several", lambda w, dtype: False)
    with Products() as alone:
        expected = computed(w, call, given)
    assert together.flop == alone.flop
    assert together.count["_grouped_mm"] > 0
    assert alone.count["_grouped_mm"] == 0
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert relative_error(ours.numpy(), theirs.numpy()) <= MODEL_FLOAT32


def test_as_few_products_as_rows_allow() -> None:
    """Of 64 experts with few rows each: two products for every so many rows, where one by one they are two for each expert."""
    (w, options), (x, index, weights, _) = weights_of("in one", experts=64), choice(256, range(64))
    call = ExpertsCall(torch.float32, 64, gate_of("in one"), **options)
    with Products() as counter:
        call.forward(x, index, weights, w)
    # Two neighbours have more than 64 rows together, so that 128 pairs of each of four shards are three runs at most.
    assert 2 * 4 * 2 <= counter.count["_grouped_mm"] <= 2 * 4 * 3
    assert counter.count["mm"] == 0


@pytest.mark.parametrize("rows", [1, 5, 16, 100])
def test_runs_name_every_pair_once_and_are_as_full_as_can_be(rows: int) -> None:
    index = choice(60)[1]
    index[3] = E
    routes, seen = Routes(index, E, group_tokens=25, rows=rows, several=True), []
    for tokens, runs in routes:
        for run in runs:
            assert run.sizes.tolist() == [*run.counts]
            for piece in run.pieces:
                pairs = routes.order[piece]
                assert len(pairs) <= rows
                assert ((pairs // K >= tokens.start) & (pairs // K < tokens.stop)).all()
                whose = torch.full((len(pairs),), -1)
                for part in run.parts(piece):
                    whose[part.rows] = part.expert
                assert torch.equal(whose, index.reshape(-1)[pairs])
                seen += pairs.tolist()
        for before, after in pairwise(runs):
            assert after.stop - before.start > rows
            assert after.start == before.stop
    assert sorted(seen) == [pair for pair in range(60 * K) if pair // K != 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_which_weights_are_taken_together(dtype: torch.dtype) -> None:
    """Those of the products' dtype, whose rows begin where the kernel can read them."""
    w, _ = weights_of("apart", dtype)
    assert steps.takes_several(w, dtype)
    assert not steps.takes_several(w, torch.float64)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    assert not steps.takes_several(w._replace(b_up=torch.zeros(E, I, dtype=other)), dtype)
    assert not steps.takes_several(w._replace(down=w.down.to(other)), dtype)
    odd, _ = weights_of("apart", dtype, inter=I + 1)
    assert not steps.takes_several(odd, dtype)
    shifted = torch.empty(w.up.numel() + 1, dtype=dtype)[1:].view(w.up.shape)
    assert not steps.takes_several(w._replace(up=shifted), dtype)
    assert not steps.takes_several(w._replace(gate=w.gate.mT.contiguous().mT), dtype)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_without_values(dtype: torch.dtype) -> None:
    """Of these PyTorch knows the grouped product in bfloat16 alone."""
    with FakeTensorMode():
        w, options = weights_of("in one", dtype)
        found = computed(w, ExpertsCall(dtype, 12, gate_of("in one"), **options), choice(40, dtype=dtype))
    assert steps.takes_several(w, dtype) == (dtype == torch.bfloat16)
    assert [None if a is None else a.shape for a in found[4:6]] == [w.down.shape, None]


def test_which_gpus_have_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those where PyTorch reads nothing on the host. A simulation without a GPU takes experts one by one."""
    cuda, has = torch.device("cuda"), steps._has_kernel
    assert not has(cuda, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in {(8, 0): False, (9, 0): True, (10, 0): True, (12, 0): False}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has(cuda, torch.bfloat16) == expected
        assert not has(cuda, torch.float16)
        assert not has(cuda, torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not has(cuda, torch.bfloat16)
