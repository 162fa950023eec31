"""The loss of a model of any class: followed from its head to its cross entropy, or the untiled model's own."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs import UnsupportedError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, FACTOR, FLOOR, MODEL_FLOAT32
from tests.core.torch_counting import LiveBytes
from tests.models.supported import IDS, LABELS, build, difference, step
from tests.models.test_torch_models import Adapter
from tests.models.test_torch_models import build as build_known
from tests.models.test_torch_paths import told
from tests.models.tiny_configs import tiny_config
from tests.ranks import Ranks
from tiled_torch import Tiling, tile_model, tiling_paths, untile_model
from tiled_torch.models.heads.rows import RowLogits

transformers = pytest.importorskip("transformers")

TILED = "tiled_linear_cross_entropy"
WEIGHTS = torch.linspace(0.5, 1.5, 32, dtype=torch.float64)
INPUT = IDS % 29 + 2
TARGETS = torch.where(LABELS == -100, -100, INPUT)
BF16 = "bfloat16"


def shifted(logits: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), TARGETS[:, 1:].reshape(-1), **options
    )


def in_place(logits: Tensor) -> Tensor:
    logits += 1e-3 * torch.arange(32)
    return shifted(logits)


# What a model makes of its head's result -> by which path that runs.
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "shifted": (shifted, TILED),
    "whole": (lambda z: nn.CrossEntropyLoss()(z.reshape(-1, 32), TARGETS.flatten()), TILED),

    "scaled": (lambda z: shifted(3 * z.double() / 0.5), TILED),
    "capped": (lambda z: shifted(torch.tanh(2 * z / 0.3) * 0.3), TILED),
    "smoothed": (lambda z: shifted(z, label_smoothing=0.2, weight=WEIGHTS), TILED),
    "a sum": (lambda z: shifted(z, reduction="sum") / 12, TILED),
    "per token": (lambda z: shifted(z, reduction="none").square().mean(), TILED),
    "chosen": (lambda z: F.cross_entropy(z[TARGETS != -100], TARGETS[TARGETS != -100]), TILED),
    "rows": (lambda z: F.cross_entropy(z[0, 2:6], TARGETS[0, 2:6]), TILED),
    "twice": (lambda z: shifted(z) + 0.5 * F.cross_entropy(z.flatten(0, 1), TARGETS.flatten()), TILED),
    "first entries": (lambda z: shifted(z[..., :31]), "tiled_loss"),
    "capped twice": (lambda z: shifted(z.tanh().tanh()), "tiled_loss"),
    "rounded": (lambda z: shifted(z.to(torch.float32).to(torch.float64)), TILED),
    "read": (lambda z: shifted(z) + z.softmax(-1).square().mean(), "untiled: softmax reads"),
    "read before": (lambda z: shifted(z) * (1 + 0 * z.argmax()), "untiled: argmax reads"),
    "in place": (in_place, "untiled: add_ reads"),
    "a bias": (lambda z: shifted((WEIGHTS[None] + z) * 2), TILED),
    "a bias of a part": (lambda z: shifted((z + WEIGHTS)[..., :31]), "untiled: cross_entropy reads"),
    "a bias later": (lambda z: shifted(z * 2 + WEIGHTS), "untiled: add reads"),
    "a bias of tokens": (lambda z: shifted(z + WEIGHTS[:9, None]), "untiled: add reads"),
    "probabilities": (lambda z: F.cross_entropy(z.transpose(1, 2), z.detach().softmax(-1).transpose(1, 2)), "untiled: "),
    "none": (lambda z: z.new_ones(()).requires_grad_(), "untiled: "),
}  # fmt: skip


@cache
def kind_of(name: str) -> type[Any]:
    """A class of its own, whose forward is like those of transformers and ends as LOSSES say."""

    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
            logits = self.lm_head(hidden)
            loss = LOSSES[name][0](logits) if labels is not None else None
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    return Own


def own(name: str) -> Any:
    model = build_known("llama").train()
    model.__class__ = kind_of(name)
    return model


def trained(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    outputs = model(input_ids=INPUT, labels=TARGETS)
    outputs.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs.loss.detach(), outputs.logits.detach().clone(), gradients


@pytest.mark.filterwarnings("ignore:tile_model. the loss of Own does not run")
@pytest.mark.parametrize("name", LOSSES)
def test_what_follows_a_head_is_what_the_model_computes(name: str) -> None:
    model = own(name)
    expected = trained(model)
    tile_model(model, num_shards=3)
    planned = tiling_paths(model)["lm_head"]
    found = trained(model)
    path = tiling_paths(model)["lm_head"]
    assert path.startswith(LOSSES[name][1])
    assert planned == path or planned.startswith("unknown"), planned
    assert difference(found, expected) <= (MODEL_FLOAT32 if name == "rounded" else DISTRIBUTED_FLOAT64 * 10)


def test_the_logits_never_exist() -> None:
    """Of a class that nothing is known of: the largest tensor of a step is smaller than half of them."""
    model = build("gpt2").float()
    model.resize_token_embeddings(4096)
    tile_model(model, num_shards=8)
    ids = torch.arange(128).reshape(2, 64) % 31
    model.transformer.wpe = nn.Embedding(64, 32)
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids).loss.backward()
    assert 4096 * 32 * 4 <= live.largest < 128 * 4096 * 4 / 2


def test_a_loss_that_needs_its_logits_is_told_once() -> None:
    model = tile_model(own("read"), num_shards=3)
    texts = told(lambda: [trained(model) for _ in range(2)])
    assert len(texts) == 1
    assert "softmax reads the logits of all tokens. The logits of all tokens are made for it." in texts[0]


def test_strict_refuses_what_would_stay() -> None:
    model = own("read")
    with pytest.raises(UnsupportedError, match=r"tiled as a whole with strict=True, got head: untiled: softmax reads"):
        tile_model(model, strict=True)
    assert tiling_paths(model) == {}
    assert tiling_paths(tile_model(own("shifted"), strict=True))["lm_head"] == TILED


@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
def test_an_mlp_in_two_modules_is_told(kind: str) -> None:
    """Its layer calls both itself, with a residual that is no argument of the first."""
    model = transformers.AutoModelForMaskedLM.from_config(tiny_config(kind, {}))
    reason = "its MLP is in two modules, intermediate and output, which it calls itself"
    with pytest.raises(
        UnsupportedError, match=rf"tiled as a whole with strict=True, got deberta\.encoder\.layer\.0: {reason}"
    ):
        tile_model(model, strict=True)
    with pytest.warns(UserWarning, match=reason):
        tile_model(model)
    assert tiling_paths(model)["deberta.encoder.layer.1"] == f"untiled: {reason}"


def test_logits_that_are_changed_while_a_view_is_in_use_are_refused() -> None:
    def changed(logits: Tensor) -> Tensor:
        part = logits[:, 1:]
        logits.mul_(2)
        return F.cross_entropy(part.flatten(0, 1), TARGETS[:, 1:].flatten())

    model = own("shifted")
    LOSSES["changed"] = changed, ""
    try:
        model.__class__ = kind_of("changed")
        tile_model(model, num_shards=3)
        with pytest.raises(UnsupportedError, match="changed in place while a view"):
            trained(model)
    finally:
        del LOSSES["changed"]
    assert type(model.lm_head) is nn.Linear  # also after an error


def test_translation_models_add_a_bias_that_is_no_parameter() -> None:
    """BART's `final_logits_bias`, as Marian's, mBART's, Pegasus's, Blenderbot's and LED's; logits have it as it was."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16}
    untiled = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=32, **sizes, **heads))
    untiled.double().eval().final_logits_bias.normal_()
    model = tile_model(copy.deepcopy(untiled), num_shards=3, strict=True)
    expected, found = ((each, each(input_ids=INPUT, labels=TARGETS)) for each in (untiled, model))
    model.final_logits_bias.zero_()
    assert tiling_paths(model)["lm_head"] == TILED
    assert torch.equal(found[1].logits, expected[1].logits)
    for _, outputs in (expected, found):
        outputs.loss.backward()
    assert found[1].loss.item() == pytest.approx(expected[1].loss.item(), rel=DISTRIBUTED_FLOAT64)
    for (name, p), q in zip(untiled.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None and not name.endswith("k_proj.bias"):  # which has none
            assert torch.linalg.norm(p.grad - q.grad) <= DISTRIBUTED_FLOAT64 * torch.linalg.norm(p.grad), name


def test_a_user_may_change_logits_afterwards() -> None:
    model = tile_model(build("gpt2").eval(), num_shards=3)
    with torch.no_grad():
        outputs = model(input_ids=IDS, labels=LABELS)
        assert isinstance(outputs.logits, RowLogits)
        expected = model(input_ids=IDS).logits / 0.5
        outputs.logits.div_(0.5)
    assert torch.equal(outputs.logits, expected)


@pytest.mark.filterwarnings("ignore:tile_model. .* runs through tile")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:tile_model. the loss of GPT2LMHeadModel does not run .* lm_head is Adapter")
@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_on_everything(order: str) -> None:
    """A LoRA pair around every projection and the head, put there before or after tiling."""
    model = build("starcoder2")
    tile_first = order == "after"
    if tile_first:
        tile_model(model, num_shards=3)
    torch.manual_seed(5)
    for layer in model.model.layers:
        layer.mlp.c_fc, layer.mlp.c_proj = Adapter(layer.mlp.c_fc), Adapter(layer.mlp.c_proj)
    twin = untile_model(copy.deepcopy(model))
    expected = step(twin, "starcoder2")
    if not tile_first:
        tile_model(model, num_shards=3)
    assert difference(step(model, "starcoder2"), expected) <= MODEL_FLOAT32
    assert tiling_paths(model)["model.layers.0.mlp"] == "tile: c_fc is Adapter"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "stablelm"])
def test_checkpointing(kind: str, reentrant: bool) -> None:
    model = build(kind)
    expected = step(model, kind)
    tile_model(model, num_shards=3)
    if reentrant:
        model.enable_input_require_grads()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    assert difference(step(model, kind, use_cache=False), expected) <= MODEL_FLOAT32


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "falcon", "bloom"])
def test_generate(kind: str) -> None:
    model = build(kind).eval()
    options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    with torch.random.fork_rng():
        texts = told(lambda: tile_model(model, num_shards=3))
    assert texts == []
    assert torch.equal(model.generate(IDS, **options), expected)


@pytest.mark.filterwarnings("ignore:tile_model. .* runs through tile")
def test_dropout_goes_through_tile_in_training_alone() -> None:
    model = build("gpt2")
    for layer in model.transformer.h:
        layer.mlp.dropout.p = 0.5
    expected = step(model.eval(), "gpt2")
    tile_model(model, num_shards=3)
    assert difference(step(model, "gpt2"), expected) <= MODEL_FLOAT32
    assert tiling_paths(model)["transformer.h.0.mlp"] == "tiled_mlp"
    assert float(step(model.train(), "gpt2")[0]) != float(expected[0])
    assert tiling_paths(model)["transformer.h.0.mlp"] == "tile: dropout drops values"


@pytest.mark.filterwarnings("ignore:tile_model. .* runs through tile")
def test_a_factor_that_is_changed_later_is_computed() -> None:
    model: Any = tile_model(build("falcon_h1"), num_shards=3)
    assert tiling_paths(model)["model.layers.0.feed_forward"] == "tiled_mlp"
    for layer in model.model.layers:
        layer.feed_forward.gate_multiplier = 0.5
    found = step(model, "falcon_h1")
    assert tiling_paths(model)["model.layers.0.feed_forward"] == "tile: its attributes are not those that were probed"
    assert difference(found, step(untile_model(model), "falcon_h1")) <= MODEL_FLOAT32


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own tracer
def test_a_compiled_model_of_an_unknown_class_says_that_it_makes_logits() -> None:
    model = build("stablelm")
    expected = step(model, "stablelm")
    tile_model(model, num_shards=3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"the loss of StableLmForCausalLM .* torch\.compile traces its forward"):
        loss = compiled(input_ids=IDS, labels=LABELS).loss
    assert abs(float(loss.detach() - expected[0])) <= MODEL_FLOAT32


def test_bfloat16_under_autocast() -> None:
    model = build("gpt2").float()
    tiled = tile_model(copy.deepcopy(model), num_shards=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(input_ids=IDS, labels=LABELS)
        found = tiled(input_ids=IDS, labels=LABELS)
    assert found.logits.dtype == expected.logits.dtype == torch.bfloat16
    exact = float(step(build("gpt2"), "gpt2")[0])
    assert abs(found.loss.item() - exact) <= 2 * abs(expected.loss.item() - exact) + exact * FLOOR["bfloat16"]


def test_the_long_form_of_tiling() -> None:
    model = build("gpt2")
    expected = step(model, "gpt2")
    tile_model(model, tiling=Tiling(shard_tokens=4, keep=0.5))
    assert difference(step(model, "gpt2"), expected) <= MODEL_FLOAT32


@pytest.mark.parametrize("kind", ["gpt2", "stablelm"])
def test_a_head_that_is_no_linear_layer_any_more_is_told(kind: str) -> None:
    untiled = build(kind)
    model: Any = tile_model(copy.deepcopy(untiled))
    head = copy.deepcopy(untiled.lm_head)
    for changed in (untiled, model):
        changed.set_output_embeddings(nn.Sequential(copy.deepcopy(head)))
    reason = "its output embeddings are no linear layer"
    with pytest.warns(UserWarning, match=reason):
        found = step(model, kind)
    assert difference(found, step(untiled, kind)) <= MODEL_FLOAT32
    assert tiling_paths(model)["lm_head"] == f"untiled: {reason}"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_inside_its_own_forward(kind: str) -> None:
    """generate in a hook: the loss around it stays tiled, and says so; the head is itself again afterwards."""
    untiled, made = build(kind).eval(), []
    model: Any = tile_model(copy.deepcopy(untiled))

    def looked_at(own: Any) -> Any:
        def hook(*_: Any) -> None:
            handle.remove()
            made.append(own.generate(IDS, max_new_tokens=3, do_sample=False))

        handle = own.get_decoder().register_forward_hook(hook)
        return step(own, kind)

    assert difference(looked_at(model), looked_at(untiled)) <= MODEL_FLOAT32
    assert torch.equal(*made)
    assert tiling_paths(model)["lm_head"] == TILED
    assert type(model.lm_head) is nn.Linear


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "units", "policy", "reshard"),
    [
        ("stablelm", "own", (BF16, None), True),
        ("stablelm", "own", (None, None), False),
        ("stablelm", "tail", (BF16, BF16), True),
        ("gpt2", "tail", (BF16, "float32"), False),
        ("mixtral", "own", (BF16, BF16), True),
        ("mixtral", "tail", (None, None), True),
    ],
)
def test_a_head_in_units_of_fsdp2(pools: dict[int, Ranks], kind: str, units: str, policy: Any, reshard: bool) -> None:
    arguments: dict[str, Any] = {"kind": kind, "units": units, "policy": policy, "reshard": reshard}
    for found in pools[2].run("tests.models.ranks_torch_units:in_units", **arguments):
        assert found["paths"]["lm_head"] == TILED
        mlps = {path for name, path in found["paths"].items() if name.endswith(".mlp")}
        assert mlps == {"tiled_mlp"} or kind == "mixtral"  # what FSDP2 writes into modules is no other formula
        assert found["tiled dtypes"] == found["untiled dtypes"]
        for error, of_untiled in zip(found["tiled"], found["untiled"], strict=True):
            assert error <= FACTOR * of_untiled + MODEL_FLOAT32


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["stablelm", "mixtral"])
def test_logits_of_a_unit_of_fsdp2_have_no_gradient_that_is_lost(pools: dict[int, Ranks], kind: str) -> None:
    for found in pools[2].run("tests.models.ranks_torch_units:refused", kind=kind):
        assert "does not reach the weights of a head that is a unit of FSDP2" in found["differentiated"]
        assert "an optimizer's step" in found["changed"]


def test_an_activation_that_is_changed_later_is_the_one_that_runs() -> None:
    untiled = build("gpt2").eval()
    for block in untiled.transformer.h:
        block.mlp.act = nn.GELU()
    model: Any = tile_model(copy.deepcopy(untiled))
    assert tiling_paths(model)["transformer.h.0.mlp"] == "tiled_mlp"
    for changed in (untiled, model):
        for block in changed.transformer.h:
            block.mlp.act = nn.GELU(approximate="tanh")
    assert difference(step(model, "gpt2"), step(untiled, "gpt2")) <= DISTRIBUTED_FLOAT64 * 10
    assert "not those that were probed" in tiling_paths(model)["transformer.h.0.mlp"]
