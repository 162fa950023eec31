"""`plan` of transformers' models whose layers no formula knows: one of each kind runs without values, and its bytes count."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.command import main
from shared_specs.app.plan.function.measured import FEWEST
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.errors import SpecError
from shared_specs.tolerances import COST_BYTES, PLAN_BYTES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.app.test_torch_plan_structure import held_in_steps, on_meta  # noqa: E402
from tests.app.torch_frozen_steps import freeze  # noqa: E402
from tests.app.torch_structure_steps import LARGE, MEASURED, config_of  # noqa: E402
from tests.models.supported import TEXT  # noqa: E402
from tests.models.tiny_configs import tiny_config  # noqa: E402
from tests.models.tiny_overrides import NOT_BUILT, OVERRIDES  # noqa: E402
from tiled_torch import fits, plan, tile_model  # noqa: E402
from tiled_torch.__main__ import COMMANDS  # noqa: E402
from tiled_torch.plan import inputs  # noqa: E402
from tiled_torch.plan.inputs import inputs_of  # noqa: E402
from tiled_torch.plan.measured import _beside_layers, measured_layers  # noqa: E402
from tiled_torch.plan.sizes import decoder_of_model  # noqa: E402
from tiled_torch.plan.twin import twin_of  # noqa: E402

GPU = Setting(tokens=FEWEST, shard_tokens=256, kernels=False)


def small(kind: str, **more: Any) -> dict[str, Any]:
    return config_of(kind) | MEASURED.get(kind, {}) | more


def bytes_of(config: dict[str, Any], setting: Setting) -> int:
    found = measured_layers(on_meta(config), "plan: model")
    assert not isinstance(found, str), found
    return found.bytes_of(setting)


def large_model(kind: str) -> Any:
    model = on_meta(config_of(kind, large=True))
    if "+" in kind:
        freeze(model, ["self_attn", "mlp"])
    return model


@pytest.mark.parametrize(("kind", "dtype"), [("granite", "bfloat16"), ("phi", "float32")])
def test_what_has_a_formula_takes_as_much_measured(kind: str, dtype: str) -> None:
    decoder = decoder_of_model("plan", on_meta(config_of(kind, large=True)))
    layers = measured_layers(on_meta(config_of(kind, large=True)), "plan: model")
    assert decoder.measured is None
    assert not isinstance(layers, str)
    assert layers.scope == "block"
    setting = replace(GPU, tokens=4096, gpus=8, dtype=dtype, shard_tokens=1024)
    found, wanted = (parts_of(d, setting) for d in (replace(decoder, measured=layers.bytes_of), decoder))
    assert found.total - RESERVE == pytest.approx(wanted.total - RESERVE, rel=2 * PLAN_BYTES)  # each has that error


def test_the_kind_of_layer_that_takes_most_counts() -> None:
    """Of linear and full attention, whichever comes first."""
    linear, full = "linear_attention", "full_attention"
    lists = [[linear] * 3, [full] * 3, [linear, full, full], [full, full, linear]]
    found = [bytes_of(small("qwen3_next", layer_types=types), replace(GPU, tokens=256)) for types in lists]
    assert found[2] == found[3] == max(found[:2]) > min(found[:2])


def test_masks_of_all_pairs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a type that is not known to do without is given a mask for its window, of booleans, and attention one to add:
    1 and 2 bytes a pair. Of a known type there are blocks of queries, each with two windows' keys.
    """
    config = small("cohere2_moe", sliding_window=128, num_hidden_layers=1)
    settings = [replace(GPU, tokens=tokens) for tokens in (FEWEST, 8 * FEWEST)]

    def of_window() -> list[int]:
        window, every = (config | {"layer_types": [f"{kind}_attention"]} for kind in ("sliding", "full"))
        return [bytes_of(window, setting) - bytes_of(every, setting) for setting in settings]

    known = of_window()
    monkeypatch.setattr("tiled_torch.models.attention.WINDOWED_TYPES", frozenset())
    masked = of_window()
    assert masked == pytest.approx([3 * setting.tokens**2 for setting in settings], rel=COST_BYTES)
    assert known[1] < masked[1] / 8


def test_all_sequences_of_a_device_are_seen() -> None:
    one, two = (bytes_of(small("stablelm"), replace(GPU, tokens=FEWEST // n, sequences=n)) for n in (1, 2))
    assert two == pytest.approx(one, rel=COST_BYTES)


def test_gradients_of_frozen_weights_are_not() -> None:
    model = on_meta(config_of("stablelm", large=True))
    whole = decoder_of_model("plan", model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    frozen = decoder_of_model("plan", model)
    setting = replace(GPU, tokens=256, gpus=8)
    saved = parts_of(whole, setting).shard - parts_of(frozen, setting).shard
    assert saved == pytest.approx(2 * whole.layer_parameters, rel=COST_BYTES)
    assert frozen.measured is not None
    assert whole.measured is not None
    assert frozen.measured(setting) < whole.measured(setting)


def test_adapters_of_any_family() -> None:
    """Layers that had a formula are measured, with what their adapters leave behind; the base has no gradients."""
    model = large_model("granite+adapters")
    decoder, plain = (decoder_of_model("plan", m) for m in (model, large_model("granite")))
    assert plain.measured is None
    assert decoder.measured is not None
    assert decoder.held is not None
    assert decoder.held.trained == sum(p.numel() for name, p in model.named_parameters() if "lora" in name)
    setting = replace(GPU, gpus=8)
    found, without = parts_of(decoder, setting), parts_of(plain, setting)
    assert found.weights > without.weights
    assert found.optimizer < without.optimizer / 20
    assert found.shard < without.shard / 20


def test_a_plan_of_such_a_model() -> None:
    """Its MLPs and loss are what is tiled; no formula has the time of its layers."""
    config = small("stablelm")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    before, state = deepcopy(model.state_dict()), torch.get_rng_state()
    found = plan(model, 2**15, devices=8, device_memory="h100")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found.plan.decoder.held.count == sum(parameter.numel() for parameter in model.parameters())
    assert found.what_to_set["tile_model"] == 'scope="mlp"'
    assert found.what_to_set["mesh"].startswith("8 x 1 x 1: ")
    assert [reach.lever for reach in found.plan.reach] == [
        "MLP and loss tiled",
        "MLP and loss tiled, inputs on the host",
        "MLP and loss tiled, inputs and all state on the host",
    ]
    assert found.plan.reach[0].tokens < found.plan.reach[1].tokens <= found.plan.reach[2].tokens == found.longest
    assert found.seconds is None
    assert "one of each kind ran without values" in str(found)
    tile_model(model)
    assert str(plan(model, 2**15, devices=8, device_memory="h100")) == str(found)


def test_the_command_says_what_a_table_of_positions_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(small("gpt2", n_embd=64, n_head=4, max_position_embeddings=2048, n_positions=2048))
    )
    words = ["plan", "--model", str(tmp_path), "--json", "--tokens"]
    assert main("tiled_torch", COMMANDS, [*words, "2048"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["measured"] is True
    assert {reach["tokens"] for reach in found["longest"]} == {2048}
    assert main("tiled_torch", COMMANDS, [*words, "2049"]) == 1
    capsys.readouterr()
    assert main("tiled_torch", COMMANDS, [word for word in words if word != "--json"] + ["2049"]) == 1
    assert "The model has 2048 positions" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", ["stablelm", "stablelm+adapters"])
def test_attention_of_other_packages_is_flash_attention(kind: str) -> None:
    """Whose kernels run nothing without values; masks it has none."""
    models = [large_model(kind) for _ in range(2)]
    models[1].config._attn_implementation = "flash_attention_2"
    found = [measured_layers(model, "plan: model") for model in models]
    assert all(not isinstance(each, str) for each in found), found
    sdpa, flash = (each.bytes_of(GPU) for each in found)  # type: ignore[union-attr]
    assert flash == pytest.approx(sdpa, rel=PLAN_BYTES)
    assert models[1].config._attn_implementation == "flash_attention_2"


def test_a_length_that_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, also where only the search for the longest context comes to it."""
    model = on_meta(small("stablelm"))
    layers = measured_layers(model, "fits: model")
    known = type(layers)._measure

    def measure(self: Any, sequences: int, itemsize: int, shard: int, tokens: int) -> Any:
        if tokens > FEWEST:
            raise RuntimeError("no such\ntable")
        return known(self, sequences, itemsize, shard, tokens)

    monkeypatch.setattr(type(layers), "_measure", measure)
    with pytest.raises(SpecError, match=r"^fits: model must run 1 x \d+ tokens without values: no such$"):
        fits(model, 64)


class _Asking(torch.nn.Module):
    """Computes for those tokens alone whose sum is more than 0."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.mlp, self.scale = mlp, torch.nn.Parameter(torch.zeros((), device="meta"))

    def forward(self, x: Any) -> Any:
        return self.mlp(x) if x.sum().item() > 0 else x


def _asking(model: Any) -> Any:
    model.model.layers[0].mlp = _Asking(model.model.layers[0].mlp)
    return model


def _longer(model: Any) -> Any:
    """Whose first layer adds a token, and whose last one takes it away."""
    forwards = [lambda _, x, **__: torch.cat([x, x[:, :1]], 1), lambda _, x, **__: x, lambda _, x, **__: x[:, :-1]]
    for layer, forward in zip(model.model.layers, forwards, strict=True):
        layer.scale = torch.nn.Parameter(torch.zeros((), device="meta"))  # so that the twin is a copy
        layer.__class__ = type("StableLmDecoderLayer", (type(layer),), {"forward": forward})
    return model


def _base_layer(model: Any) -> Any:
    model.get_input_embeddings().num_embeddings, model.lm_head = 64, torch.nn.Identity()
    return model


@pytest.mark.parametrize("kind", ["gemma2", "llama", "granite"])
def test_what_has_formulas_is_measured_where_scores_of_all_pairs_are_written(kind: str) -> None:
    """By eager attention, or below a cap, of which the formulas have no term."""
    model = on_meta(small(kind))
    model.set_attn_implementation("eager")
    decoder = decoder_of_model("plan", model)
    assert (decoder.kind, decoder.by_structure, decoder.scope) == (kind, True, "block")
    found = [parts_of(decoder, replace(GPU, tokens=tokens)).attention for tokens in (512, 1024)]
    assert (
        found[1] - 2 * found[0] > 512 * 1024 * decoder.heads
    )  # bytes of scores, of which there are twice as many more


def test_several_streams_between_layers() -> None:
    """Each layer keeps all of them; and all layers' share of a table of their own waits with its gradient."""
    model = on_meta(small("gemma3n_text"))
    decoder, streams = decoder_of_model("plan", model), model.config.altup_num_inputs
    assert decoder.between == decoder.stream == streams * decoder.hidden
    kept = [parts_of(each, replace(GPU, tokens=256)).inputs for each in (decoder, replace(decoder, between=None))]
    assert kept[0] == streams * kept[1] > 0
    twin = twin_of(model)
    before = _beside_layers(twin, tuple(twin.model.layers), inputs_of(twin, 1, 256))
    waiting = 256 * decoder.layers * model.config.hidden_size_per_layer_input * 4
    assert before.count(waiting) >= 2  # what is kept, and the gradient


def test_layers_that_are_called_several_times() -> None:
    """Each call with gradients keeps its input, and what stands between the calls keeps what it needs: norms, here."""
    model = on_meta(small("hrm_text"))
    decoder = decoder_of_model("plan", model)
    assert (decoder.layers, decoder.inputs, len(decoder.lists)) == (4, 2 * (1 + 2 + 2), 2)
    setting = replace(GPU, tokens=256, offload=True)
    host = [parts_of(each, setting).host for each in (decoder, replace(decoder, kept=None))]
    assert 4 * host[0] == 10 * host[1] > 0
    layers = measured_layers(model, "plan: model")
    assert not isinstance(layers, str)
    assert layers.calls == 12
    given, norms, row = inputs_of(layers.twin, 1, 256), 4, decoder.hidden * 4
    found = [_beside_layers(layers.twin, layers.layers, given, calls).count(256 * row) for calls in (1, layers.calls)]
    assert found[1] - found[0] >= norms


def test_more_tokens_than_the_sequence() -> None:
    model = on_meta(small("cpmant"))
    layers = measured_layers(model, "plan: model")
    assert not isinstance(layers, str)
    assert (layers.between, layers.more) == (64, 3 * model.config.prompt_length * 64)
    found = [layers.bytes_of(replace(GPU, tokens=256, offload=offload)) for offload in (False, True)]
    assert found[0] - found[1] == layers.more * GPU.itemsize


def test_ends_of_other_features_than_the_layers() -> None:
    model = on_meta(small("rembert", max_position_embeddings=64))
    decoder = decoder_of_model("plan", model)
    assert (decoder.hidden, decoder.stream) == (96, 64)
    assert decoder.head_trained == 96 * decoder.vocab
    inside = sum(parameter.numel() for parameter in model.rembert.encoder.layer.parameters())
    assert decoder.held is not None
    assert decoder.end_parameters == decoder.held.count - inside
    assert decoder.beside < 0 < decoder.end_parameters


def tiny(kind: str) -> Any:
    with torch.device("meta"):
        config = tiny_config(kind, OVERRIDES.get(kind, {}))
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_an_image_is_kept_beside_the_text() -> None:
    """Of GIT, whose loss needs one: its tower's layers keep as much for any text, and text's layers see both."""
    decoder = decoder_of_model("plan", model := tiny("git"))
    text, tower = model.git.encoder.layer, model.git.image_encoder.vision_model.encoder.layers
    assert (decoder.layers, decoder.inputs, len(decoder.lists)) == (len(text) + len(tower), len(text), 2)
    assert decoder.positions == model.config.max_position_embeddings
    layers = measured_layers(model, "plan: model")
    assert not isinstance(layers, str)
    sizes = model.config.vision_config
    seen = 1 + (sizes.image_size // sizes.patch_size) ** 2
    assert layers.more == seen * (len(tower) * sizes.hidden_size + len(text) * model.config.hidden_size)
    assert parts_of(decoder, replace(GPU, tokens=32)).inputs >= 0


def test_the_adapter_of_one_language_has_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of X-MOD: that of no language of the model has none."""
    found = []
    for _ in range(2):
        layers = measured_layers(tiny("xmod"), "plan: model")
        assert not isinstance(layers, str)
        found.append(layers.bytes_of(replace(GPU, tokens=60)))
        monkeypatch.setitem(inputs._MORE, "xmod", lambda _, n, __: {"lang_ids": torch.full((n,), 7)})
    assert found[0] > found[1]


def test_each_expert_has_as_many_tokens() -> None:
    """Of JetMoE, whose routers ask how many."""
    model = tiny("jetmoe")
    with inputs.without_values(model):
        *_, parts, logits = model.model.layers[0].mlp.router(torch.empty(31, model.config.hidden_size, device="meta"))
    assert sum(parts) == 31 * model.config.num_experts_per_tok
    assert (len(parts), max(parts) - min(parts)) == (logits.shape[1], 1)
    assert decoder_of_model("plan", model).measured is not None


class _Around(torch.nn.Module):
    """As peft's modules are, whose names of parameters have theirs in front."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.config = model, model.config

    def get_base_model(self) -> Any:
        return self.base_model


def test_layers_that_share_weights_are_gathered_with_the_rest() -> None:
    """Of Zamba all that attend: their weights count once, outside of the layers."""
    model = tiny("zamba")
    decoder = decoder_of_model("plan", model)
    alone = [layer for layer in model.model.layers if not hasattr(layer, "shared_transf")]
    assert decoder.held is not None
    assert 0 < len(alone) < len(model.model.layers)
    assert decoder.held.layer == max(sum(p.numel() for p in layer.parameters()) for layer in alone)
    inside = sum(p.numel() for layer in alone for p in layer.parameters())
    assert decoder.end_parameters == decoder.held.count - inside
    assert decoder_of_model("plan", _Around(model)).held == decoder.held


def test_the_positions_that_a_model_makes_are_its_longest_sequence() -> None:
    decoder = decoder_of_model(
        "plan", on_meta({"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 96})
    )
    assert decoder.positions == 96


# Which compute in float32 beside weights in 16 bits: all three would fail under `fully_shard` in 16 bits as well.
WIDE = ("minimax", "openai-gpt", "xlstm")


@pytest.mark.parametrize("kind", ["minimax"])
def test_a_model_that_computes_in_float32_is_planned_in_that(kind: str) -> None:
    """Its buffers are; those of a model in 16 bits are not, and have a plan in 16 bits."""
    model = on_meta(small(kind))
    said = (
        "plan: model must run 1 x 64 tokens without values: expected scalar type torch.float32 but found torch.bfloat16"
    )
    with pytest.raises(SpecError) as caught:
        plan(model, 64)
    assert str(caught.value) == said
    assert plan(model, 64, dtype="float32").fits
    found = plan(model.to(torch.bfloat16), 64).plan.decoder
    assert found.held is not None
    assert found.held.bytes == 2 * found.held.count


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:tile_model")
def test_every_causal_model_has_a_plan() -> None:
    unlike = {}
    for kind in (kind for kind in TEXT if kind not in NOT_BUILT):
        with torch.device("meta"):
            config = tiny_config(kind, OVERRIDES.get(kind, {}))
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        try:
            tokens = 9 if kind == "reformer" else 60  # as its positions have places; some have no more
            found = plan(model, tokens, dtype="float32" if kind in WIDE else "bfloat16").plan.decoder.held
            assert found is not None
            said = "" if found.count == sum(parameter.numel() for parameter in model.parameters()) else "count"
        except SpecError as error:
            said = str(error)
        if said:
            unlike[kind] = said
    assert not unlike


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "values": (
        lambda model: _asking(model),
        "Its layers cannot run without values: a StableLmDecoderLayer asks for values, on which its sizes may depend. Nor does "
        "its step: a StableLmForCausalLM asks for values, on which its sizes depend.",
    ),
    "no head": (
        lambda model: _base_layer(model),
        "It has no embedding and head that are one weight each. Nor does its step: Expected input batch_size (8192) to match "
        "target batch_size (4096).",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_is_said(case: str) -> None:
    change, reason = REFUSED[case]
    model = change(on_meta(config_of("stablelm", large=True)))
    with pytest.raises(
        SpecError, match=r"^plan: model must have a model_type of llama, .*, or layers that can run without values"
    ) as caught:
        plan(model, 4096)
    advice = "Or pass a loss_fn that calls the model with all that it needs."
    assert str(caught.value).endswith(f"got stablelm. {reason} {advice}")


def test_where_layers_cannot_be_measured_the_step_is() -> None:
    """Whose tokens are others than the model's."""
    decoder = decoder_of_model("plan", _longer(on_meta(config_of("stablelm", large=True))))
    assert decoder.whole is not None
    assert decoder.measured is None
    assert decoder.whole(GPU) > decoder.held.bytes  # type: ignore[union-attr]


SETTINGS: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16", "offload": True, "tokens": 8192},
    {"dtype": "float32", "device": "cpu", "tokens": 4096},
)
# Of CPM-Ant fake tensors of a GPU lack an operation. LongCat's heads of values have another size: see `LATENTS`.
IN_FLOAT32 = ("minimax", "cpmant")
STEPS = [
    (kind, setting | ({"device": "gpu"} if kind == "longcat_flash" else {}))
    for setting in SETTINGS
    for kind in MEASURED
    if kind not in IN_FLOAT32 or setting["dtype"] == "float32"
]
SOME = STEPS[:2]


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("given", [SOME, pytest.param(STEPS[2:], marks=pytest.mark.slow)], ids=["some", "others"])
def test_bytes_of_a_step(given: list[tuple[str, dict[str, Any]]]) -> None:
    """Beside what simulated ranks hold."""
    decoders = {kind: decoder_of_model("plan", large_model(kind)) for kind, _ in given}
    assert LARGE["hidden_size"] == {decoder.hidden for decoder in decoders.values()}.pop()
    cases = [(kind, setting | {"scope": decoders[kind].scope}) for kind, setting in given]
    off = {}
    for (kind, setting), found in zip(cases, held_in_steps(cases), strict=True):
        parts = parts_of(decoders[kind], Setting(**found["set"]))
        ratio = (parts.total - RESERVE) / found["device"]
        print(f"{ratio:.3f}", kind, setting, parts.by_name)
        assert decoders[kind].measured is not None
        assert parts.host == pytest.approx(found["host"], rel=PLAN_BYTES)
        if ratio != pytest.approx(1, abs=PLAN_BYTES):
            off[kind, setting["dtype"]] = ratio
    assert not off
