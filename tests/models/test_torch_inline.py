"""Layers whose own forward calls the linear layers of their MLP are tiled inside it, and are otherwise what they were."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_specs import UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32
from tests.core.torch_counting import LiveBytes, saved_bytes
from tests.models.supported import IDS, LABELS, build, difference, step
from tests.models.test_torch_models import Adapter
from tests.ranks import Ranks
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.models.mlps.inline import TiledInline

transformers = pytest.importorskip("transformers")

LAYER = "model.decoder.layers.0"
KINDS = ["opt", "bart", "xglm"]
ADVICE = "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"


def quiet(kind: str) -> Any:
    """A model in training that draws nothing between its layers."""
    model = build(kind)
    for module in model.modules():
        if hasattr(module, "activation_dropout"):
            module.activation_dropout = 0.0
    return model


def layers(model: Any) -> list[Any]:
    """Those whose forward calls fc1 and fc2."""
    return [module for module in model.modules() if hasattr(module, "fc1")]


def place(model: Any) -> str:
    """The name of the first of them."""
    return next(name for name, module in model.named_modules() if hasattr(module, "fc1"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"num_shards": 3, "keep": 0.5}, {"num_shards": 18}])
def test_equal_to_the_untiled_model(kind: str, options: dict[str, Any]) -> None:
    model = quiet(kind)
    keys, expected = list(model.state_dict()), step(model, kind)
    assert tile_model(model, strict=True, **options) is model
    before = tiling_paths(model)
    assert difference(step(model, kind), expected) <= MODEL_FLOAT32
    assert tiling_paths(model) == before
    assert before[place(model)] == "tiled_mlp"
    assert list(model.state_dict()) == keys
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert difference(step(again, kind), expected) <= MODEL_FLOAT32
        assert isinstance(layers(again)[0], TiledInline)
    untile_model(model)
    assert tiling_paths(model) == {}
    assert type(layers(model)[0].fc1) is nn.Linear
    assert not [key for layer in layers(model) for key in vars(layer) if key in TiledInline.__annotations__]


@pytest.mark.parametrize("before_attention", [True, False])
def test_float64_layer_with_norms_on_either_side(before_attention: bool) -> None:
    """The layer alone: results and gradients to rounding of float64."""
    config = build("opt").config
    config.do_layer_norm_before = before_attention
    layer = transformers.models.opt.modeling_opt.OPTDecoderLayer(config, layer_idx=0).double().eval()
    x = torch.randn(2, 5, config.hidden_size, dtype=torch.float64, requires_grad=True)

    def run() -> list[Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    expected = run()
    tile_model(layer, num_shards=3)
    for a, b in zip(run(), expected, strict=True):
        assert float((a - b).detach().norm()) <= DISTRIBUTED_FLOAT64 * max(float(b.detach().norm()), 1.0)
    assert tiling_paths(layer) == {"": "tiled_mlp"}


@pytest.mark.filterwarnings(ADVICE)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing(kind: str, reentrant: bool) -> None:
    model = quiet(kind)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    expected = step(model, kind)
    tile_model(model, num_shards=3)
    assert difference(step(model, kind), expected) <= MODEL_FLOAT32
    assert tiling_paths(model)[place(model)] == "tiled_mlp"


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["opt", "bart"])
def test_adapters(kind: str, order: str) -> None:
    model = quiet(kind)
    if order == "after":
        tile_model(model, num_shards=3)
    torch.manual_seed(5)
    for layer in layers(model):
        layer.fc1, layer.fc2 = Adapter(layer.fc1), Adapter(layer.fc2)
    expected = step(untile_model(copy.deepcopy(model)), kind)
    if order == "before":
        tile_model(model, num_shards=3)
    assert tiling_paths(model)[place(model)] == "tile: fc1 is Adapter"
    assert difference(step(model, kind), expected) <= MODEL_FLOAT32
    assert tiling_paths(model)[place(model)] == "tile: fc1 is Adapter"


@pytest.mark.parametrize("part", ["fc1", "fc2", "activation_fn"])
def test_hooks_run_once_in_a_layer_that_is_left(part: str) -> None:
    model = quiet("opt")
    expected = step(model, "opt")
    tile_model(model, num_shards=3)
    calls = []
    getattr(layers(model)[0], part).register_forward_hook(lambda *args: calls.append(1))
    assert difference(step(model, "opt"), expected) <= MODEL_FLOAT32
    assert len(calls) == 1
    assert tiling_paths(model)[LAYER] == f"untiled: {part} has hooks"


def test_dropout_between_the_layers_draws_what_it_drew() -> None:
    """It reads every value, on the same random numbers; evaluation drops nothing and is tiled."""
    model = build("xglm")
    for layer in layers(model):
        layer.activation_dropout = 0.3
    expected = step(model, "xglm")
    with pytest.raises(UnsupportedError, match=r"strict=True, got .*layers\.0: untiled: dropout reads what fc1 makes"):
        tile_model(model, num_shards=3, strict=True)
    tile_model(model, num_shards=3)
    name = place(model)
    assert tiling_paths(model)[name] == "untiled: dropout reads what fc1 makes"
    assert difference(step(model, "xglm"), expected) <= MODEL_FLOAT32
    assert tiling_paths(model)[name] == "untiled: dropout reads what fc1 makes"
    step(model.eval(), "xglm")
    assert tiling_paths(model)[name] == "tiled_mlp"


def test_weights_that_a_zero_3_engine_has_are_left_to_its_hooks() -> None:
    model = tile_model(quiet("opt"), num_shards=3)
    layers(model)[0].fc2.weight.ds_id = 0
    paths = tiling_paths(model)
    assert paths[LAYER] == "untiled: a ZeRO-3 engine would gather its weights for every shard"
    assert paths[LAYER.replace("0", "1")] == "tiled_mlp"


def test_x_that_is_changed_before_the_last_layer_is_refused() -> None:
    class Changing(Reading):
        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.fc1(x))
            self.between(x)
            return self.fc2(h)

    layer: Any = tile_model(Changing(lambda x: x), num_shards=3)
    x = torch.randn(3, 4)
    layer(x)
    layer.between = lambda x: x.mul_(2)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="x was changed in place after its first layer"):
        layer(x)


class Reading(nn.Module):
    """A layer whose MLP is part of its forward, with something between."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(4, 4))
        self.fc1, self.fc2, self.act = nn.Linear(4, 12), nn.Linear(12, 4), nn.GELU()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.between(self.act, self.fc1(self.mix(x))))


def quietly_clamped(act: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        largest = h.abs().max()
    return act(h) if largest > 0 else h


BETWEEN = {
    "plain": (lambda act, h: act(h), "tiled_mlp"),
    "shape": (lambda act, h: act(h) if h.shape[-1] == 12 and h.dtype.is_floating_point else h, "tiled_mlp"),
    "function": (lambda act, h: torch.nn.functional.silu(h), "tiled_mlp"),
    "twice": (lambda act, h: act(act(h)), "untiled: GELU reads"),
    "clamped": (lambda act, h: act(h).clamp(-1, 1), "untiled: clamp reads"),
    "nothing": (lambda act, h: h, "untiled: Linear reads"),
    "written": (lambda act, h: act(h).mul_(2), "untiled: mul_ reads"),
    "no_grad": (quietly_clamped, "untiled: abs reads"),
    "second": (lambda act, h: 2 * act(h), "untiled: "),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_comes_between_is_the_layers_own(name: str) -> None:
    """With an activation alone first, so that it is taken; then what it does in calls changes."""
    torch.manual_seed(0)
    layer: Any = Reading(BETWEEN["plain"][0]).double()
    tile_model(layer, num_shards=3)
    layer.between, path = BETWEEN[name]
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)

    def run(module: Any) -> list[Tensor]:
        y = module(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    found, expected = run(layer), run(untile_model(copy.deepcopy(layer)))
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.detach().numpy(), b.detach().numpy()) <= DISTRIBUTED_FLOAT64
    assert tiling_paths(layer)[""].startswith(path)
    assert type(layer.fc1) is nn.Linear
    assert type(layer.act) is nn.GELU


def test_a_layer_that_reads_between_is_left_with_a_reason() -> None:
    model = nn.Sequential(Reading(BETWEEN["plain"][0]), Reading(BETWEEN["clamped"][0]))
    with pytest.warns(UserWarning, match=r"1 stays as it is in Sequential: clamp reads what fc1 makes\."):
        tile_model(model, num_shards=3)
    assert tiling_paths(model) == {"0": "tiled_mlp", "1": "untiled: clamp reads what fc1 makes"}


def test_an_error_leaves_the_layers_as_they_were() -> None:
    def fails(act: Any, h: Tensor) -> Tensor:
        raise KeyError

    layer: Any = tile_model(Reading(BETWEEN["plain"][0]), num_shards=3)
    layer.between = fails
    with pytest.raises(KeyError):
        layer(torch.randn(2, 4))
    assert [type(layer.fc1), type(layer.act), type(layer.fc2)] == [nn.Linear, nn.GELU, nn.Linear]


def test_autocast_is_that_of_the_untiled_layer() -> None:
    layer = Reading(BETWEEN["plain"][0])
    x = torch.randn(2, 5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
        found = tile_model(layer, num_shards=3)(x)
    assert found.dtype == expected.dtype
    assert relative_error(found.detach().numpy(), expected.detach().numpy()) <= 2**-7


def test_generate_says_the_same() -> None:
    model = build("opt").eval()
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(input_ids=IDS, **options)
    tile_model(model, num_shards=3)
    assert torch.equal(model.generate(input_ids=IDS, **options), expected)


def test_what_is_kept_and_what_is_largest() -> None:
    """A layer with a wide MLP keeps neither of its two [T, I], and has none at any time."""
    config = build("opt").config
    config.ffn_dim = 40 * config.hidden_size
    layer = transformers.models.opt.modeling_opt.OPTDecoderLayer(config, layer_idx=0).eval()
    x = torch.randn(2, 32, config.hidden_size, requires_grad=True)
    wide = 64 * config.ffn_dim * 4
    given = [x, *layer.parameters()]
    _, whole = saved_bytes(lambda: layer(x), exclude=given)
    tile_model(layer, num_shards=16)
    _, kept = saved_bytes(lambda: layer(x), exclude=given)
    assert whole - kept >= wide
    assert kept < wide
    layer.requires_grad_(False)  # gradients of weights are as large
    with LiveBytes() as live:
        layer(x).sum().backward()
    assert live.largest < wide / 2


def test_compiled_code_is_the_untiled_layers() -> None:
    model = quiet("opt").eval()
    expected = model(input_ids=IDS, labels=LABELS).logits
    tile_model(model, num_shards=3)
    layer = layers(model)[0]
    layer.compile(backend="eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = model(input_ids=IDS).logits
    texts = [str(warning.message) for warning in told]
    assert "tile_model: the MLP in OPTDecoderLayer is not tiled" in " ".join(texts)
    assert relative_error(found.detach().numpy(), expected.detach().numpy()) <= MODEL_FLOAT32


@pytest.mark.ranks
@pytest.mark.parametrize("units", ["layers", "adapters", "linears"])
def test_units_of_fsdp2(pools: dict[int, Ranks], units: str) -> None:
    paths = {"layers": "tiled_mlp", "adapters": "tile: fc1 is Adapter", "linears": "untiled: fc1 has hooks"}
    for found in pools[2].run("tests.models.ranks_torch_inline:sharded", kind="bart", units=units):
        assert set(found["paths"]) == {paths[units]}
        assert found["error"] <= MODEL_FLOAT32


def test_both_halves_of_an_encoder_and_decoder() -> None:
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= {"d_model": 16, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 50, "pad_token_id": 1}
    config = transformers.M2M100Config(**sizes, encoder_layerdrop=0.0, decoder_layerdrop=0.0, dropout=0.3)
    model = transformers.M2M100ForConditionalGeneration(config).double().train()
    expected = step(model, "m2m_100")
    tile_model(model, num_shards=4, strict=True)
    assert difference(step(model, "m2m_100"), expected) <= MODEL_FLOAT32
    paths = tiling_paths(model)
    assert len(paths) == 5
    assert {path for name, path in paths.items() if ".layers." in name} == {"tiled_mlp"}
