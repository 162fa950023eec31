"""torch.export of tiled layers: the program trains, with the values and gradients of the module that it was made of."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_specs import Tiling, UnsupportedError
from shared_specs.shards import ShardPlan, plan_tokens
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tiled_torch import TiledLinearCrossEntropy, TiledMLP
from tiled_torch.core.exporting import symbolic_plan
from tiled_torch.loss import loops

# Raised inside torch's own tracer.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

D = torch.float64


class Model(nn.Module):
    """What a decoder's end is: a layer before the MLP, so that gradients have somewhere to go, and a head."""

    def __init__(self, keep: float = 0.0, tiling: Tiling | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        tiling = Tiling(num_shards=3, keep=keep) if tiling is None else tiling
        self.first = nn.Linear(6, 6, dtype=D)
        self.mlp = TiledMLP(6, 10, bias=True, fused_gate_up=True, tiling=tiling, dtype=D)
        self.head = TiledLinearCrossEntropy(6, 11, num_shards=2, dtype=D)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        return self.head(x + self.mlp(self.first(x)), targets)


def batch(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, tokens, 6, dtype=D), torch.arange(2 * tokens).reshape(2, tokens) % 11


def results(module: Any, parameters: dict[str, nn.Parameter], tokens: int) -> dict[str, Tensor]:
    """The loss and the gradients of x and of every parameter; x needs one, which it did not where it was exported."""
    torch.manual_seed(tokens)
    x, targets = batch(tokens)
    loss = module(x.requires_grad_(), targets)
    leaves = {"x": x, **parameters}
    return {"loss": loss, **dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))}


def assert_trains(program: Any, model: Model, tokens: int) -> None:
    program = copy.deepcopy(program.module())
    found = results(program, dict(program.named_parameters()), tokens)
    expected = results(model, dict(model.named_parameters()), tokens)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert_within(found[name].detach().numpy(), value.detach().numpy(), DISTRIBUTED_FLOAT64, name)


def saved_and_loaded(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


LATER: dict[str, Any] = {
    "as it is": lambda program: program,
    "decomposed": lambda program: program.run_decompositions(),
    "saved and loaded": saved_and_loaded,
}


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_an_exported_model_trains(keep: float, later: str) -> None:
    """The weights of the MLP and everything before it got no gradient."""
    model = Model(keep)
    assert_trains(LATER[later](torch.export.export(model, batch(7))), model, 7)


@pytest.mark.slow  # the tracer of strict exports is that of torch.compile, which the other tests run through
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_strict_export_trains(keep: float) -> None:
    model = Model(keep)
    assert_trains(torch.export.export(model, batch(7), strict=True), model, 7)


@pytest.mark.parametrize(
    "tiling",
    [Tiling(num_shards=3), Tiling(), Tiling(shard_tokens=4), Tiling(memory_budget=10_000)],
    ids=["num_shards", "automatic", "shard_tokens", "memory_budget"],
)
def test_the_number_of_tokens_may_be_left_open(tiling: Tiling) -> None:
    """It was fixed to that of the example: "your code specialized it to be a constant"."""
    model, tokens = Model(tiling=tiling), torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(model, batch(7), dynamic_shapes=({1: tokens}, {1: tokens}))
    for length in (7, 2, 33):
        assert_trains(program, model, length)


def test_open_tokens_keep_nothing() -> None:
    tokens = torch.export.Dim("tokens")
    with pytest.raises(UnsupportedError) as caught:
        torch.export.export(Model(keep=0.5), batch(7), dynamic_shapes=({1: tokens}, {1: tokens}))
    assert str(caught.value).startswith(
        "tiled_mlp: keep must be 0 in an export with a dynamic number of tokens, got 0.5. Export with keep=0, or fixed shapes."
    )


def test_plans_of_exports_are_those_of_calls() -> None:
    """Where nothing is compared: by count, by length, and automatic ones that are not given up."""

    def peak(plan: ShardPlan) -> int:
        return 10 * plan.longest

    def planned(tokens: int, multiple: int, **cut: Any) -> ShardPlan:
        return symbolic_plan("f", tokens, Tiling(**cut), device="cpu", peak=peak, multiple_of=multiple)

    for tokens in (0, 1, 5, 1024, 1025, 5000):
        for multiple in (1, 128):
            for cut in ({"num_shards": 4}, {"shard_tokens": 3}, {}):
                expected = plan_tokens(tokens, device="cpu", multiple_of=multiple, **cut)
                assert planned(tokens, multiple, **cut) == expected
    assert planned(100, 1, memory_budget=75).longest == 7


def test_an_exported_model_evaluates_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported program is not told whether gradients will be wanted: it computes them when they are."""
    made: list[Any] = []
    original = loops.Gradients
    monkeypatch.setattr(loops, "Gradients", lambda *given: made.append(given) or original(*given))
    program = torch.export.export(Model(), batch(7)).module()
    with torch.no_grad():
        program(*batch(7))
    assert not made
    program(*batch(7)).backward()
    assert made


def test_a_frozen_weight_of_an_exported_model_gets_no_gradient() -> None:
    model = Model()
    program: Any = torch.export.export(model, batch(7)).module()
    program.mlp.w_down.requires_grad_(False)
    program(*batch(7)).backward()
    assert program.mlp.w_down.grad is None
    assert all(p.grad is not None for name, p in program.named_parameters() if name != "mlp.w_down")


def test_main_grad_is_refused_in_an_exported_model() -> None:
    program: Any = torch.export.export(Model(), batch(7)).module()
    program.mlp.w_down.main_grad = torch.zeros_like(program.mlp.w_down)
    with pytest.raises(UnsupportedError, match="main_grad must be None"):
        program(*batch(7))
