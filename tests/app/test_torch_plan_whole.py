"""`plan` of modules that no formula knows: their own step runs without values, with what `fully_shard` gathers and cuts."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.errors import SpecError
from shared_specs.tolerances import COST_BYTES, PLAN_BYTES, PLAN_RECORDED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from tests.app.test_torch_plan_structure import held_in_steps, on_meta  # noqa: E402
from tests.app.torch_structure_steps import WHOLE, as_one_unit, config_of  # noqa: E402
from tests.models.tiny_configs import tiny_config  # noqa: E402
from tests.models.tiny_overrides import OVERRIDES  # noqa: E402
from tiled_torch import fits, plan, tile_model  # noqa: E402
from tiled_torch.check.live_bytes import LiveBytes  # noqa: E402
from tiled_torch.parallel import Plan, register_plan  # noqa: E402
from tiled_torch.plan.sizes import decoder_of_model  # noqa: E402
from tiled_torch.plans import registry  # noqa: E402

HIDDEN, INSIDE, VOCAB = 64, 192, 512
ALONE = Setting(tokens=1024, gpus=1, dtype="float32", optimizer="sgd", kernels=False)


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, INSIDE), nn.ReLU(), nn.Linear(INSIDE, HIDDEN))

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, HIDDEN // 2)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Own(nn.Module):
    """A decoder as its users write one."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Known(Own):
    """One whose layers are told."""


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    register_plan(Known, Plan(blocks="layers"))


def own(kind: type[Own] = Own, layers: int = 2) -> Own:
    with torch.device("meta"):
        return kind(layers)


def program(model: Any, loss_fn: Any = None, **setting: Any) -> int:
    return parts_of(decoder_of_model("plan", model, loss_fn, 1024), replace(ALONE, **setting)).program


def mean_of_squares(model: Any, batch: Any) -> Any:
    return model.mlp(model.up(batch[:, :-1, None].float())).square().mean()


class OnePath(nn.Module):
    """Layers whose arrays are the same on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, INSIDE), nn.GELU(), nn.Linear(INSIDE, HIDDEN))


def test_bytes_are_those_of_a_step_with_values() -> None:
    """Beside a copy of the weights, which one rank gathers too."""
    model = OnePath()
    batch = torch.randint(9, (1, 2049))
    with LiveBytes() as live:
        mean_of_squares(model, batch).backward()
    with torch.device("meta"):
        twin = OnePath()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    parts = parts_of(decoder_of_model("plan", twin, mean_of_squares), replace(ALONE, tokens=2048))
    found = parts.gradients + parts.program
    assert found == pytest.approx(live.peak + weights + batch.nbytes, rel=COST_BYTES)


def test_the_loss_function_is_used() -> None:
    twice = lambda model, batch: sum(model(batch[:, :-1]).square().mean() for _ in range(2))  # noqa: E731
    once = lambda model, batch: model(batch[:, :-1]).square().mean()  # noqa: E731
    found = [program(own(), each) for each in (once, twice)]
    logits = 4 * 1024 * VOCAB
    assert found[1] - found[0] >= logits
    assert program(own()) < found[0] - logits  # the default loss is tiled
    llama = on_meta(config_of("granite") | {"model_type": "llama"})
    of_model = lambda model, batch: model(input_ids=batch[:, :-1]).logits.square().mean()  # noqa: E731
    decoder = decoder_of_model("plan", llama, of_model)
    assert (decoder.kind, decoder.recomputed) == ("LlamaForCausalLM", True)


def test_layers_that_are_told_are_recomputed_and_gathered_one_by_one(known: None) -> None:
    """The others are one unit: no checkpoints, and all weights at once."""
    told, one = (plan(own(kind, 8), 4096, devices=8) for kind in (Known, Own))
    assert "Checkpointing" in told.what_to_set
    assert one.what_to_set == {"mesh": told.what_to_set["mesh"]}
    assert one.bytes["program"] > 3 * told.bytes["program"]
    weights = {kind: program(own(kind, 32), gpus=8, tokens=8) for kind in (Known, Own)}
    layer = sum(parameter.numel() for parameter in own().layers[0].parameters())
    assert weights[Own] - weights[Known] > 4 * 20 * layer


def test_the_model_is_planned_as_it_is_and_stays() -> None:
    model = Own(1)
    before = deepcopy(model.state_dict())
    plain = program(model)
    assert {name: p.device.type for name, p in model.named_parameters()} == dict.fromkeys(before, "cpu")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert type(model) is Own
    assert not model._forward_hooks
    assert program(tile_model(model, num_shards=8)) < plain
    model.requires_grad_(False).head.requires_grad_(True)
    found = decoder_of_model("plan", model).held
    assert found is not None
    assert found.trained == HIDDEN * VOCAB < found.count


def test_a_config_that_is_not_transformers() -> None:
    """As models of many have one."""
    model = own()
    bytes_before = program(model)
    model.config = Setting(tokens=1)  # type: ignore[assignment]
    assert program(model) == bytes_before


def test_gradients_have_the_dtype_of_the_parameters(known: None) -> None:
    """They are summed in float32, and a device keeps its part of each in the dtype of its weight."""
    models = own(Known, 32), own(Known, 32).bfloat16()
    wide, narrow = (parts_of(decoder_of_model("plan", model), replace(ALONE, tokens=8)) for model in models)
    count = sum(parameter.numel() for parameter in models[0].parameters())
    assert (wide.gradients, narrow.gradients) == (4 * count, 2 * count)
    assert wide.total - narrow.total == pytest.approx(
        4 * count, rel=PLAN_BYTES
    )  # of weights and of gradients, half of each


def test_fits() -> None:
    assert fits(own(), 4096)
    assert not fits(own(), 2**22, device_memory="4GB")
    found = plan(own(), 4096, device_memory="4GB")
    assert fits(own(), found.longest, device_memory="4GB")
    assert not fits(own(), found.longest + 1024, device_memory="4GB")
    assert str(found).splitlines()[-1].startswith("From the model's own step, without values at a few lengths")


@pytest.mark.filterwarnings("ignore:tile_model")
@pytest.mark.parametrize(("kind", "tokens"), [("xlm", 32), ("prophetnet", 32), ("reformer", 9)])
def test_models_of_transformers_whose_layers_or_loss_no_formula_knows(kind: str, tokens: int) -> None:
    with torch.device("meta"):
        config = tiny_config(kind, OVERRIDES.get(kind, {}))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = plan(model, tokens, devices=8)
    assert found.fits
    assert found.bytes["program"] > 0
    assert ("Checkpointing" in found.what_to_set) == (kind == "prophetnet")
    if kind == "reformer":  # which takes as many tokens as its positions have places, and no others
        with pytest.raises(SpecError, match=r"Nor does its step: .*axial_pos_shape factors: .3, 3. multiply"):
            plan(model, 2 * tokens)
    else:
        assert not fits(model, 64 * tokens)  # it has no more positions


class _Asking(nn.Module):
    """Asks for a value, for an assertion or for a size."""

    def __init__(self, sizes: bool) -> None:
        super().__init__()
        self.table, self.head, self.sizes = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB), sizes

    def forward(self, ids: Any) -> Any:
        most = ids.max().item()
        assert most < VOCAB
        x = self.table(ids)
        return self.head(torch.cat([x] * (1 + most), 1)[:, : ids.shape[1]] if self.sizes else x)


class _Failing(Own):
    def forward(self, ids: Any) -> Any:
        raise ValueError("no such thing\nat all")


class _AssertingSizes(Own):
    """Ends in an assertion that no value decides."""

    def forward(self, ids: Any) -> Any:
        assert ids.shape[1] < 0, "as many as never"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sizes": (lambda: _Asking(True), "a _Asking asks for values, on which its sizes depend"),
    "fails": (_Failing, "no such thing"),
    "asserts": (_AssertingSizes, "as many as never"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_step_is_said(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        plan(make(), 64)
    assert str(caught.value) == f"plan: model must have a step that runs without values: {reason}"


class _InParts(Own):
    """Takes whole parts of 64 tokens alone."""

    def forward(self, ids: Any) -> Any:
        return super().forward(ids.unflatten(1, (-1, 64)).flatten(1))


def test_a_model_that_takes_no_short_sequences_has_a_longest_one() -> None:
    assert plan(own(_InParts), 4096, device_memory="4GB").longest > 4096


def test_values_on_which_nothing_depends() -> None:
    assert plan(_Asking(False), 64).fits


class _Asserting(Own):
    """Takes no negative ids, as it finds out by their values; others it may not take either."""

    def __init__(self, none: bool = False) -> None:
        super().__init__()
        self.none = none

    def forward(self, ids: Any) -> Any:
        assert (ids >= 0).all().item(), "negative"
        assert not (self.none and (ids < VOCAB).all().item()), "large"
        return super().forward(ids)


def test_values_with_which_an_assertion_fails_are_none() -> None:
    with torch.device("meta"):
        model = _Asserting()
    assert plan(model, 1024).bytes["program"] == plan(own(), 1024).bytes["program"]
    with pytest.raises(SpecError, match=r"a step that runs without values: large$"):
        plan(_Asserting(none=True), 64)


@pytest.mark.parametrize("function", [plan, fits])
def test_a_loss_that_is_no_function(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__}: loss_fn must be a function or None, got int\."):
        function(own(), 64, loss_fn=3)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_bytes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what simulated ranks hold: of layers one by one, and of a model that is one unit."""
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    settings = [{"dtype": dtype, "gpus": gpus} for dtype in ("float32", "bfloat16") for gpus in (1, 2, 8)]
    cases = [(kind, each | {"tokens": 1024, "scope": "none"}) for kind in WHOLE for each in settings]
    off = {}
    for (kind, _), found in zip(cases, held_in_steps(cases), strict=True):
        if kind.endswith("+unit"):
            as_one_unit(kind)
        setting = Setting(**found["set"])
        model = on_meta(config_of(kind, large=True))
        decoder = decoder_of_model("plan", model, _own_loss)
        parts = parts_of(decoder, setting)
        ratio = (parts.total - RESERVE) / found["device"]
        print(f"{ratio:.4f}", kind, setting.dtype, setting.gpus, parts.by_name)
        if ratio != pytest.approx(1, abs=PLAN_RECORDED):
            off[kind, setting.dtype, setting.gpus] = ratio
    assert not off


def _own_loss(model: Any, batch: Any) -> Any:
    return model(input_ids=batch[:, :-1], labels=batch[:, :-1], use_cache=False).loss
