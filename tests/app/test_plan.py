"""`plan`: sizes of published models, what fits and what no longer does, times beside published ones, the command."""

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from shared_specs.app.bench.records import read_records
from shared_specs.app.bench.tables import RECORDS
from shared_specs.app.command import main, shared_command
from shared_specs.app.finetune.context import context_axes
from shared_specs.app.options import FinetuneOptions, InputError, PlanOptions
from shared_specs.app.plan.decoder import MODELS, Decoder, decoder_named, decoder_of, tensor_ranks
from shared_specs.app.plan.held import Held
from shared_specs.app.plan.moments.compiled import cudnn_groups
from shared_specs.app.plan.moments.compiled_loss import vocab_ranks
from shared_specs.app.plan.published import PUBLISHED, Published
from shared_specs.app.plan.record import KIND, simulated_setting
from shared_specs.app.plan.search import contexts, parts_of_sequence, plan, step_flop, step_seconds
from shared_specs.app.plan.show import as_json, plan_of, show_plan, what_to_set
from shared_specs.app.plan.simulated import Simulated, Simulator, predicted_device, simulated_step
from shared_specs.app.plan.step import RESERVE, Setting, optimizer_bytes, parts_of
from shared_specs.config import HALVES
from shared_specs.kernels.roofline import GPUS
from shared_specs.layers.block_costs import block_row_bytes, cudnn_block_row_bytes
from shared_specs.layers.ring import ring_multiple
from shared_specs.loss.costs import LossShape, loss_peak_bytes
from shared_specs.tolerances import PLAN_BYTES, PLAN_COMPILED, PLAN_PUBLISHED, PLAN_RECORDED

# Of the published weight files.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
ROOT = Path(__file__).parents[2]
EIGHT = decoder_named("qwen3-8b")
H100 = GPUS["h100"]


SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


def test_parameters_of_published_models() -> None:
    assert {name: decoder.parameters for name, decoder in MODELS.items()} == PARAMETERS


def test_a_config_says_the_sizes(tmp_path: Path) -> None:
    config = SIZES | {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert decoder_named(str(tmp_path)) == decoder_named(str(tmp_path / "config.json")) == EIGHT
    assert decoder_of(config | {"model_type": "llama", "num_key_value_heads": None}, "").kv_heads == 32


def test_experts_of_a_token_are_those_that_are_multiplied() -> None:
    """All of them are held: of Qwen3-30B-A3B 3.3 billion parameters are at work."""
    small = MODELS["qwen3-30b-a3b"]
    at_work = small.layers * small.layer_products + small.end_parameters
    assert (at_work // 10**8, small.parameters // 10**8) == (33, 305)
    setting = Setting(tokens=4096)
    products, _ = step_flop(small, setting, recomputed=False)
    assert products == 6 * 4096 * (small.layers * small.layer_products + small.hidden * small.vocab)


def test_a_config_says_windows_and_biases() -> None:
    """Of Gemma 3 five layers of six have one, and what it does not say is that family's; SmolLM3 has them where it says so."""
    gemma = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
    found = decoder_of(gemma | {"model_type": "gemma3_text", "sliding_window": 512}, "it")
    assert (found.window, found.windowed, found.kv_heads, found.head_dim, found.tied) == (512, 30, 4, 256, True)
    every, cut = 1024**2 // 2, 512 * 1024 - 512**2 // 2
    assert (found.pairs(512), found.pairs(1024)) == (36 * 512**2 // 2, 6 * every + 30 * cut)
    smol = SIZES | {"model_type": "smollm3", "sliding_window": 64}
    assert decoder_of(smol, "it").window is None
    assert decoder_of(smol | {"use_sliding_window": True}, "it").windowed == 9
    plain, biased = (
        decoder_of(SIZES | {"model_type": "llama"} | more, "it") for more in ({}, {"attention_bias": True})
    )
    assert biased.layer_parameters - plain.layer_parameters == 2 * 4096 + 2 * 1024


def test_families_of_which_one_scope_has_formulas(tmp_path: Path) -> None:
    """Everything but attention tiled, on the ranks that can share their sequences; with caps in JAX alone."""
    names = {"gemma-3-1b": 4, "phi-4": 1}
    for name, most in names.items():
        found = plan(decoder_named(name), 2**14, memory=int(H100.memory_bytes), gpus=8)
        assert found.setting is not None
        assert found.setting.scope == "block"
        assert {reach.setting.scope for reach in found.reach} == {"block"}
        rings = contexts(decoder_named(name), Setting(tokens=1, gpus=8))
        assert max(shared.context for shared in rings if shared.context_kind == "ulysses") == most
    given = PlanOptions(model="smollm3-3b", tokens=2**14)
    for gpus in (1, 8):
        found = plan_of(replace(given, gpus=gpus), "torch").setting
        assert found is not None
        assert found.gpus == gpus
    assert plan_of(replace(given, model="mixtral-8x7b", gpus=32), "jax").setting is not None
    config = {
        "model_type": "gemma2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    capped = replace(given, model=str(tmp_path))
    assert plan_of(capped, "jax").setting is not None
    with pytest.raises(InputError, match=r"^plan: --model must have no attn_logit_softcapping in PyTorch\. Of it"):
        plan_of(capped, "torch")


def test_families_that_jax_shares_or_splits_otherwise() -> None:
    """It shares the sequences of a Phi3 among ranks; of a Gemma's split layers it has no formula."""
    for name, most, splits in (("phi-4", 8, [1]), ("gemma-3-1b", 4, [1]), ("smollm3-3b", 8, [1, 2, 4])):
        decoder, base = decoder_named(name), Setting(tokens=1, gpus=8, half="jax")
        assert max(shared.context for shared in contexts(decoder, base) if shared.context_kind == "ulysses") == most
        assert tensor_ranks(decoder, 8, "jax") == splits
        assert plan_of(PlanOptions(model=name, tokens=2**14, gpus=8), "jax").setting is not None
    larger = replace(decoder_named("gemma-3-1b"), heads=8, kv_heads=4)
    assert [tensor_ranks(larger, 8, half) for half in HALVES] == [[1, 2, 4], [1]]
    with pytest.raises(
        InputError, match=r"plan: --tp must be 1 for gemma3_text in JAX, got 2[.] There is no formula of"
    ):
        plan_of(PlanOptions(model="gemma-3-1b", gpus=8, tp=2), "jax")
    with pytest.raises(InputError, match="--gpus must divide the model's 5120 hidden features in JAX, got 6"):
        plan_of(PlanOptions(model="phi-4", gpus=6), "jax")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt2"},
            "must have a model_type of llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, smoll",
        ),
        (
            [],
            "gemma2, gemma3_text, phi3, smollm3, mixtral, qwen3_moe, got list",
        ),
        ({"model_type": "gpt_neox"}, "phi3, smollm3, mixtral, qwen3_moe, got gpt_neox"),
        (
            SIZES | {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
            "must have decoder_sparse_step 1, got 2. Of another value there is no formula.",
        ),
        (
            SIZES | {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
            r"must have no mlp_only_layers, got \[1\]. All layers have experts.",
        ),
        (
            SIZES | {"model_type": "mixtral", "num_local_experts": 0},
            "must have whole numbers >= 1 for num_local_experts",
        ),
        (
            SIZES | {"model_type": "gemma3_text", "layer_types": ["sliding_attention"]},
            "its windows cannot be read: list ind",
        ),
        ({"model_type": "llama", "hidden_size": 8}, "must have whole numbers >= 1 for intermediate_size"),
    ],
)
def test_other_configs_are_refused(config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decoder_of(config, "it")


@pytest.mark.parametrize(("half", "gpus"), [("torch", 1), ("torch", 8), ("jax", 8)])
def test_the_longest_context_is_the_longest(half: Any, gpus: int) -> None:
    """It fits, 1024 tokens a GPU more do not, and every lever reaches further than the one before."""
    found = plan(EIGHT, 4096, memory=int(H100.memory_bytes), gpus=gpus, half=half)
    lengths = [reach.tokens for reach in found.reach]
    assert lengths
    assert sorted(set(lengths)) == lengths
    for reach in found.reach:
        assert reach.parts.total <= found.memory
        assert parts_of(EIGHT, replace(reach.setting, tokens=reach.tokens + 1024 * gpus)).total > found.memory


def test_the_first_setting_that_fits() -> None:
    """As few ranks in a context as possible, and nothing on the host that need not be there."""
    short, long = (plan(EIGHT, tokens, memory=int(H100.memory_bytes), gpus=8).setting for tokens in (8192, 2**20))
    assert short is not None
    assert (short.context, short.scope, short.offload, short.host_state) == (1, "none", False, False)
    assert long is not None
    assert (long.scope, long.offload, long.host_state) == ("block", True, False)
    fewer = [shared for shared in contexts(EIGHT, long) if shared.context < long.context]
    assert all(parts_of(EIGHT, shared).total > H100.memory_bytes for shared in fewer)
    assert plan(EIGHT, 2**20, memory=8 * 2**30).setting is None
    scarce = plan(EIGHT, 2**20, memory=int(H100.memory_bytes), host=40 * 2**30, gpus=8).setting
    assert scarce is not None
    assert parts_of(EIGHT, scarce).host <= 40 * 2**30 < parts_of(EIGHT, long).host
    assert scarce.context > long.context


MEMORY = {"torch": 26 * 2**30, "jax": 30 * 2**30}  # in which a million tokens of eight ranks fit, and no half of them


@pytest.mark.parametrize("half", HALVES)
def test_rings_beyond_the_heads(half: Any) -> None:
    """Ranks that divide the heads exchange tokens for them, others are a ring, of lengths that can be cut so."""
    three = replace(EIGHT, heads=3, kv_heads=3)
    found = contexts(three, Setting(tokens=1, gpus=6, half=half))
    kinds = [(shared.context, shared.context_kind, shared.ring) for shared in found]
    assert kinds == [(1, "ulysses", 1), (2, "ring", 2), (3, "ulysses", 1), (6, "2d", 2)]
    few = replace(EIGHT, heads=1, kv_heads=1)
    found, other = (plan(few, tokens, memory=MEMORY[half], gpus=8, half=half) for tokens in (2**20, 2**20 + 8))
    assert found.setting is not None
    assert found.setting.context == 8
    assert ("DataParallel", 'context="ring"') in what_to_set(found.setting)
    if half == "torch":  # fewer ranks, with their state on the host
        assert other.setting is not None
        assert other.setting.context < 8
    else:
        assert other.setting is None
    assert all(reach.setting.context_kind == "ring" and reach.tokens % 16 == 0 for reach in found.reach)


@pytest.mark.parametrize("half", HALVES)
def test_rings_of_groups(half: Any) -> None:
    """More ranks than heads: as many as divide them in each place of a ring, as `finetune --context 2d` makes them."""
    few = replace(EIGHT, heads=4, kv_heads=2)
    fitting = plan(few, 2**20, memory=MEMORY[half], gpus=8, half=half, tp=1)
    assert fitting.setting is not None
    assert len(fitting.reach) == {"torch": 4, "jax": 2}[half]
    assert all((reach.setting.context_kind, reach.setting.inside) == ("2d", 4) for reach in fitting.reach)
    for shared in contexts(few, Setting(tokens=2**20, gpus=24, half=half)):
        if shared.context > 1:
            kind = shared.context_kind
            run = FinetuneOptions(tokens=shared.tokens, cp=shared.context, context=kind)
            expected = [shared.context] if kind != "2d" else [shared.ring, shared.inside]
            assert list(context_axes(run, few.heads).values()) == expected
            if kind == "2d":
                lines = dict(what_to_set(shared))
                assert lines["DataParallel"] == 'context="2d"'
                assert lines["mesh"].startswith(f"{24 // shared.context} x {shared.ring} x {shared.inside} x 1:")
                assert parts_of_sequence(shared) == ring_multiple(shared.ring, shared.inside)
    assert {shared.ring for shared in contexts(few, Setting(tokens=1, gpus=24)) if shared.context_kind == "2d"} == {
        3,
        2,
        6,
    }


@pytest.mark.parametrize("half", HALVES)
def test_layers_are_split_where_nothing_else_fits(half: Any) -> None:
    """72 billion parameters on sixteen GPUs: a gathered layer, with its sums and gradients, is too much for one of them."""
    large, memory = decoder_named("qwen2.5-72b"), int(H100.memory_bytes)
    found, whole, two = (plan(large, 2**17, memory=memory, gpus=16, tp=tp, half=half).setting for tp in (None, 1, 2))
    assert found is not None
    assert (found.tensor, found.scope, found.host_state) == (8, "block", False)
    assert found.data * found.context * found.tensor == 16
    for setting in (whole, two):
        assert setting is None or setting.host_state
    lines = dict(what_to_set(found))
    assert lines["mesh"] == f"{found.data} x {found.context} x 8: data and fully sharded x context x tensor"
    assert lines["TensorParallel"] == "sequence_parallel=True, loss_parallel=True"
    for tokens in (8192, 2**20):
        short = plan(EIGHT, tokens, memory=memory, gpus=8).setting
        assert short is not None
        assert short.tensor == 1
    assert [setting.context for setting in contexts(EIGHT, Setting(tokens=1, gpus=16, tensor=4))] == [1, 2, 4]


def test_bytes_where_layers_are_split() -> None:
    """State, layers' inputs and whole weights are a part of what they are alone; kinds of ranks go by the heads of one."""
    alone = Setting(tokens=2**17, gpus=8, offload=True)
    one, two, eight = (parts_of(EIGHT, replace(alone, tensor=ranks)) for ranks in (1, 2, 8))
    norms = 36 * (2 * 4096 + 2 * 128) + 4096  # whole on every rank
    assert (two.optimizer, eight.optimizer) == (one.optimizer + norms, one.optimizer + 7 * norms)
    assert (two.host * 2, eight.host * 8) == (one.host, one.host)
    assert one.gathered / 2 < two.gathered < one.gathered / 1.9
    assert two.attention < one.attention
    # In a layer, behind attention: of the split embedding's gradient no rank has all tokens, which would be more.
    assert eight.attention == 2**17 * (7184 + 24) < 2**17 * 4096 * 2
    assert eight.total < two.total < one.total
    few = contexts(replace(EIGHT, heads=4, kv_heads=2), Setting(tokens=1, gpus=16, tensor=2))
    assert [(s.context_kind, s.ring) for s in few] == [("ulysses", 1), ("ulysses", 1), ("2d", 2), ("2d", 4)]


@pytest.mark.parametrize(
    ("given", "half", "message"),
    [
        ({"tp": 2}, "torch", "plan: --tp must be 1 on one GPU, got 2."),
        ({"tp": 3, "gpus": 8}, "torch", "plan: --tp must divide the 8 GPUs, got 3."),
        ({"tp": 16, "gpus": 16}, "torch", "plan: --tp must divide the model's 32 heads, 8 key-value heads and 14336"),
        ({"tp": 2, "gpus": 8, "model": "phi-4"}, "torch", "plan: --tp must be 1 for phi3, got 2. Its projections are"),
        ({"tp": 3, "gpus": 8}, "jax", "plan: --tp must divide the 8 GPUs, got 3."),
    ],
)
def test_layers_that_cannot_be_split(given: dict[str, Any], half: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        plan_of(PlanOptions(**given), half)
    found = plan_of(replace(PlanOptions(**given), tp=1, tokens=4096), half).setting
    assert found is not None
    assert found.tensor == 1


def test_what_jax_does_not_shard_is_not_planned() -> None:
    """Of PyTorch's parts of a parameter one may be smaller."""
    with pytest.raises(
        InputError, match=r"^plan: --gpus must divide the model's 4096 hidden features in JAX, got 6\. "
    ):
        plan_of(PlanOptions(gpus=6), "jax")
    assert plan_of(PlanOptions(gpus=6), "torch").setting is not None
    with pytest.raises(
        InputError,
        match=r"^plan: --tp must leave of 27 GPUs as many as divide the model's 576 hidden .* in JAX, got 1\. ",
    ):
        plan_of(PlanOptions(model="smollm2-135m", gpus=27, tp=1), "jax")
    for half, ranks in (("torch", 1), ("jax", 3)):
        found = plan_of(PlanOptions(model="smollm2-135m", tokens=3 * 2**15, gpus=27), half).setting
        assert found is not None
        assert found.tensor == ranks


def test_ranks_of_a_layer_in_jax_have_as_many_tokens_each() -> None:
    """Those of PyTorch may have one fewer. Several sequences count together."""
    odd = Setting(tokens=8, gpus=8, context=2, tensor=4, half="jax")
    assert [parts_of_sequence(replace(odd, sequences=each)) for each in (1, 2, 4)] == [8, 4, 2]
    assert parts_of_sequence(replace(odd, half="torch")) == 2
    for half, fits in (("torch", True), ("jax", False)):
        found = plan(EIGHT, 2**12 + 2, memory=MEMORY["torch"], gpus=8, half=half, tp=8).setting
        assert (found is not None) == fits


def test_bytes_of_the_state() -> None:
    """16 bytes of every parameter with AdamW, 8 with SGD, over all GPUs; on the host instead where that is asked for."""
    setting = Setting(tokens=2**20, gpus=8, context=8, offload=True)
    adamw, sgd = (parts_of(EIGHT, replace(setting, optimizer=name)) for name in ("adamw", "sgd"))  # type: ignore[arg-type]
    assert adamw.weights + adamw.optimizer == pytest.approx(1.5 * EIGHT.parameters, abs=8)
    assert adamw.gradients == 4 * (EIGHT.layers - 2) * EIGHT.layer_parameters // 8  # at the second layer
    assert adamw.total - sgd.total == adamw.optimizer == 2 * adamw.weights
    eight_bits = parts_of(EIGHT, replace(setting, optimizer="adamw_8bit"))
    assert eight_bits.total - sgd.total == eight_bits.optimizer == pytest.approx(2.03125 / 8 * EIGHT.parameters, abs=8)
    # What torchao keeps of [1024, 1024]: two times as many codes of a byte, and 4096 scales.
    whole = Held(
        **dict.fromkeys([f.name for f in fields(Held)], 2**20) | {"trains_head": True, "trains_embedding": True}
    )
    assert optimizer_bytes(replace(EIGHT, held=whole), "adamw_8bit") == 2 * (1048576 + 4 * 4096)
    host = parts_of(EIGHT, replace(setting, host_state=True))
    assert (host.weights, host.gradients, host.optimizer) == (0, 0, 0)
    assert host.host - adamw.host == pytest.approx(2 * EIGHT.parameters, abs=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_inputs_of_layers_in_jax_are_those_of_its_formula(dtype: Any) -> None:
    kept, waiting = (
        Setting(tokens=2**20, gpus=8, context=8, dtype=dtype, half="jax", offload=o) for o in (False, True)
    )
    sizes = {"hidden": EIGHT.hidden, "heads": EIGHT.heads, "kv_heads": EIGHT.kv_heads, "head_dim": EIGHT.head_dim}
    none, all_of = (block_row_bytes(**sizes, itemsize=kept.itemsize, kept_layers=n) for n in (0, EIGHT.layers))
    assert parts_of(EIGHT, kept).inputs == (all_of - none) * kept.rows == parts_of(EIGHT, waiting).host
    # In float32 the loss is the highest point, where the last layer's is there if the head is the embedding.
    assert parts_of(EIGHT, waiting).inputs == 0
    tied = parts_of(replace(EIGHT, tied=True), waiting)
    assert tied.inputs == (2**17 * 4096 * 4 if dtype == "float32" else 0)


def test_arrays_of_the_loss_in_the_room_of_results_in_jax() -> None:
    """The last layer's result, in float32, the hidden states and their gradient: not a byte of those that fit into the
    gradients of weights, one in each."""
    sizes: dict[str, Any] = {"hidden": 1024, "layers": 8, "heads": 8, "kv_heads": 8, "head_dim": 128, "vocab": 151936}
    large, small = (Decoder(**sizes, intermediate=intermediate, tied=True) for intermediate in (4096, 64))
    row = 2**13 * 1024 * 4
    assert row == 4 * 8 * 1024 * 1024  # as large as the gradients of q, k, v and o

    def beside_loss(decoder: Decoder, tokens: int) -> int:
        found = parts_of(decoder, Setting(tokens=tokens, half="jax", offload=True))
        assert found.loss >= 2 * 2**13 * 151936 * 2
        return found.attention

    assert beside_loss(large, 2**13) == beside_loss(small, 2**13) == 0
    # That in float32 has room in the gradients of the MLP alone.
    assert (beside_loss(large, 2**14), beside_loss(small, 2**14)) == (0, 2 * row)


def test_devices_of_one_axis_split_the_vocabulary_in_jax() -> None:
    """Where that moves less than the head and its gradient: not of several axes, not of many tokens, not of split layers."""
    one, more = Setting(tokens=2**14, gpus=8, half="jax"), {"context": 8, "context_kind": "2d", "inside": 2}
    ring = replace(one, context=8, context_kind="ring")
    several = [replace(one, **more), replace(one, context=4), replace(one, tensor=2), replace(one, tokens=2**18)]
    assert [vocab_ranks(EIGHT, setting) for setting in (one, ring, *several)] == [8, 8, 1, 1, 1, 1]


def test_inputs_of_layers_in_pytorch_are_one_row_of_16_bits_a_token_of_every_layer() -> None:
    """In the backward of a layer: on the GPU, or all of them in host memory but that of the layer at work."""
    kept, waiting = (parts_of(EIGHT, Setting(tokens=2**20, gpus=8, context=8, offload=o)) for o in (False, True))
    assert kept.inputs == waiting.host == 36 * 2**17 * 4096 * 2
    assert (waiting.inputs, kept.host) == (0, 0)
    assert kept.shard == waiting.shard
    assert kept.attention + 2**17 * 4096 * 2 == waiting.attention


@pytest.mark.parametrize(("dtype", "shard_tokens"), [("float32", None), ("bfloat16", 64), ("bfloat16", None)])
def test_beside_the_loss_stands_the_gradient_of_the_head(dtype: Any, shard_tokens: int | None) -> None:
    """Of a small model, where the loss is the highest point of a step. In 16 bits it is rounded when the logits are gone."""
    small = Decoder(hidden=512, intermediate=512, layers=4, heads=8, kv_heads=8, head_dim=64, vocab=151936, tied=True)
    setting = Setting(tokens=2**14, gpus=8, dtype=dtype, shard_tokens=shard_tokens)
    b, entries = setting.itemsize, small.hidden * small.vocab
    shape = LossShape(tokens=2**14, hidden=small.hidden, vocab=small.vocab, itemsize=b, weight_itemsize=b)
    of_loss = loss_peak_bytes(shape, setting.shards, device="gpu", kernels=True)
    expected = of_loss + 4 * entries if dtype == "float32" else max(of_loss, (4 + 2) * entries)
    assert (expected == of_loss) == (dtype == "bfloat16" and shard_tokens is None)
    assert parts_of(small, setting).loss == expected


def test_a_million_tokens_on_eight_gpus() -> None:
    """Qwen3-8B with float32 AdamW, without the reserve: others need 56.2 GB a GPU (TRL's documentation, 2026-09)."""
    found = parts_of(EIGHT, Setting(tokens=2**20, gpus=8, context=8, offload=True))
    assert found.total - RESERVE <= 34 * 2**30


def test_time_beside_a_published_one() -> None:
    """TRL's documentation (2026-09): a step of Qwen3-8B with 1,048,576 tokens on eight H100s takes 373 to 380 s."""
    setting = Setting(tokens=2**20, gpus=8, context=8, offload=True)
    assert step_seconds(EIGHT, setting, H100) == pytest.approx(376, rel=PLAN_PUBLISHED)
    products, attention = step_flop(EIGHT, setting)
    short, of_short = step_flop(EIGHT, replace(setting, tokens=2**19))
    assert (products, attention) == (2 * short, 4 * of_short)


@pytest.mark.parametrize("figure", PUBLISHED, ids=lambda figure: f"{figure.source.split(',')[0]}-{figure.what[:30]}")
def test_published_figures(figure: Published) -> None:
    """Of others, in their setup: bytes, times, longest contexts, use of the GPUs."""
    assert figure.planned() == pytest.approx(figure.figure, rel=PLAN_PUBLISHED)


RECORDED = [r | {"half": a["half"]} for a in read_records(RECORDS) if a["kind"] == KIND for r in a["results"]]


@pytest.mark.parametrize("run", RECORDED, ids=lambda r: f"{r['half']}-{r['model']}-{r['tokens']}-{r['gpus']}")
def test_formulas_beside_recorded_simulations(run: dict[str, Any]) -> None:
    """At real size, of whole steps: those of today beside what was held when they were run."""
    setting = simulated_setting(run)
    most = PLAN_RECORDED if setting.half == "torch" else PLAN_COMPILED
    assert predicted_device(MODELS[run["model"]], setting) == pytest.approx(run["simulated_bytes"], rel=most)
    assert parts_of(MODELS[run["model"]], setting).host == pytest.approx(run["simulated_host_bytes"], rel=PLAN_BYTES)


def test_attention_by_cudnn_takes_bytes_that_blocks_do_not() -> None:
    """In JAX on a GPU, in 16 bits: of the layer's row the formula that was measured; what needs blocks has theirs."""
    setting = Setting(tokens=2**18, gpus=8, half="jax", offload=True)
    sizes: dict[str, Any] = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}

    def row(**changes: Any) -> float:
        changed = replace(setting, **changes)
        return parts_of(replace(EIGHT, vocab=256), changed).by_name["attention"] / changed.rows

    assert row() == cudnn_block_row_bytes(**sizes, itemsize=2, groups=8)
    assert row(attention="blocks") == row(kernels=False)
    keys = (
        2 * 4 * sizes["kv_heads"] * sizes["head_dim"]
    )  # sums of their gradients, where attention is the highest point
    for b, found in ((2, row(attention="blocks")), (4, row(dtype="float32"))):
        assert block_row_bytes(**sizes, itemsize=b) - found in (0, keys)
    assert ("models.Llama", 'scope="block", attention="blocks"') in what_to_set(replace(setting, attention="blocks"))


def test_groups_of_heads_in_which_cudnn_attends() -> None:
    """As few as leave each of them enough rows; ranks that exchange tokens for heads have fewer heads, of all tokens."""
    setting = Setting(tokens=2**18, gpus=8, half="jax")
    found = [cudnn_groups(EIGHT, replace(setting, tokens=tokens)) for tokens in (4096, 8192, 16384, 2**15)]
    assert found == [1, 2, 4, 8]
    assert [cudnn_groups(EIGHT, replace(setting, context=ranks)) for ranks in (2, 8)] == [4, 1]
    assert cudnn_groups(EIGHT, replace(setting, context=8, context_kind="ring")) is None
    assert cudnn_groups(replace(EIGHT, window=4096, windowed=18), setting) is None
    assert cudnn_groups(replace(EIGHT, head_dim=100), setting) is None


def test_a_million_tokens_were_simulated_in_less_than_34_gib() -> None:
    (run,) = (
        r for r in RECORDED if (r["half"], r["model"], r["tokens"], r["gpus"]) == ("tiled_torch", "qwen3-8b", 2**20, 8)
    )
    assert run["set"]["optimizer"] == "adamw"
    assert run["simulated_bytes"] <= 34 * 2**30


def test_what_cannot_be_simulated_is_told() -> None:
    with pytest.raises(InputError, match="plan: --simulate must be left out here"):
        show_plan(PlanOptions(simulate=True), "torch")


def test_two_depths_give_any() -> None:
    """Each part of a step by its own line: with depth the peak moves from the loss to the first layer's backward."""

    def simulate(decoder: Any, setting: Setting) -> Simulated:
        run.append(decoder.layers)
        moments = {"loss": {"logits": 1000}, "layer": {"weights": 100 * decoder.layers, "rows": 7}}
        return Simulated(moments=moments, host=10 * decoder.layers, collectives={"gathers": 2 * decoder.layers})

    run: list[int] = []
    setting = Setting(tokens=8, gpus=8, optimizer="sgd")
    found = simulated_step(EIGHT, setting, Simulator(simulate))
    assert run == [3, 4]
    assert (found.device, found.peak, found.host, found.collectives) == (3607, "layer", 360, {"gathers": 72})
    with_state = simulated_step(EIGHT, replace(setting, optimizer="adamw"), Simulator(simulate, whole=True))
    assert run == [3, 4, 36]
    assert with_state.device == found.device + EIGHT.parameters  # eight bytes of each, over eight GPUs


@pytest.mark.parametrize("half", HALVES)
def test_tables_json_and_picture(half: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = PlanOptions(model="qwen3-8b", tokens=2**20, gpus=8, out=str(tmp_path / "new"))
    assert show_plan(given, half) == 0
    shown = capsys.readouterr().out
    for word in ("qwen3-8b", "What to set", 'scope="block"', "optimizer", "Longest context", "nothing was run"):
        assert word in shown
    stored = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert stored == as_json(plan_of(given, half))
    assert stored["bytes"]["total"] == sum(n for name, n in stored["bytes"].items() if name not in ("total", "host"))
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert show_plan(replace(given, json=True, out=None), half) == 0
    assert json.loads(capsys.readouterr().out) == stored


def test_what_fits_nowhere_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_plan(PlanOptions(model="llama-3-70b", gpu="24GB"), "torch") == 1
    assert "Does not fit with any setting" in capsys.readouterr().out
    assert plan_of(PlanOptions(gpu="80GB"), "torch").seconds is None
    assert show_plan(PlanOptions(model="qwen3-8b", tokens=2**22 + 1, gpus=8, tp=1), "torch") == 1
    assert "GPUs share a sequence" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt-5"], "plan: --model must be a config.json, a folder with one, or one of llama-2-7b"),
        (
            ["--gpu", "h300"],
            f"plan: --gpu must be one of {', '.join(GPUS)}, or a size such as 80GB, got h300.",
        ),
        (["--gpu", "80 apples"], "plan: --gpu must be a size, got '80 apples'."),
        (["--gpu", "80"], "plan: --gpu must be at least 1GiB, got 80, which is 80 bytes. Write for example 80GB."),
        (["--host", "64"], "plan: --host must be 0 or at least 1GiB, got 64 bytes. Write for example 128GiB."),
        (["--gpu", "512MiB"], "plan: --gpu must be at least 1GiB, got 512MiB, which is 536870912 bytes. Write"),
        (["--host", "a lot"], "plan: --host must be a size, got 'a lot'."),
        (["--tokens", "0"], "plan: --tokens must be between 1 and 1073741824, got 0."),
        (["--tp", "0"], "plan: --tp must be between 1 and 1073741824, got 0."),
        (["--gpus", "many"], "plan: --gpus must be a whole number, got many."),
        (["--dtype", "int4"], "plan: --dtype must be one of bfloat16, float32, got int4."),
        (["--out", "/dev/null/x"], "plan: --out cannot be written to"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = shared_command("plan", "cli", lambda given: show_plan(given, "torch"))
    assert main("tiled_torch", [command], ["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_who_plans_needs_no_framework() -> None:
    """Of both commands and of the third way, in one process that then knows all that was imported."""
    script = """
import runpy, sys
for words in (["tiled_torch", "plan"], ["tiled_jax", "plan"], ["shared_specs.app.plan", "jax"]):
    sys.argv = [*words, "--json", "--gpus", "8"]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert ended.code == 0, ended
print(*{"torch", "jax", "flax", "transformers", "matplotlib"} & set(sys.modules), file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.strip()) == (0, "")
    assert run.stdout.count('"longest"') == 3
