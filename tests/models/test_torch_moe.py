"""`tile_model` on models with experts: the logits, losses with their balancing term, gradients, keys and files of before."""

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from shared_specs import UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32
from tests.core.torch_counting import GemmFlop, LiveBytes
from tests.models.test_torch_trainer import padded, rows
from tests.ranks import Ranks
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.models.experts.aux_loss import WITH_EXPERTS

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 2,
}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32, "num_experts_per_tok": 2}
SIZES |= {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "shared_expert_intermediate_size": 20}
GROUPS = {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
LATENT |= {"first_k_dense_replace": 1, "n_shared_experts": 1, **GROUPS}
LINEAR = {"layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1},
    "axk1": LATENT,
    "bailing_hybrid": GROUPS,
    "dbrx": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 20, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | INDEXER,
    "dots1": GROUPS | {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    "ernie4_5_moe": {"moe_num_shared_experts": 1},
    "exaone_moe": GROUPS,
    "flex_olmo": {},
    "flint": {},
    "glm4_moe": GROUPS,
    "glm4_moe_lite": LATENT,
    "gpt_oss": {},
    "granitemoe": {"logits_scaling": 7.0},
    "granitemoeshared": {"logits_scaling": 7.0},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
              "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "kolibri1": {},
    "laguna": {},
    "llama4_text": {"intermediate_size_mlp": 20, "interleave_moe_layer_step": 1, "moe_layers": None},
    "longcat_flash": LATENT | {"zero_expert_num": 2, "moe_topk": 2, "ffn_hidden_size": 20, "expert_ffn_hidden_size": 20,
                               "num_layers": 1},
    "mellum": {},
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_moe": {},
    "qwen3_next": LINEAR,
    "solar_open": GROUPS,
}  # fmt: skip
IDS = torch.arange(2 * 9).reshape(2, 9) % 31 + 1

# The families that the documents name: one or more of each form of weights.
ADAPTED = (
    "mixtral",
    "gpt_oss",
    "llama4_text",
    "deepseek_v3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "olmoe",
    "glm4_moe",
)


def build(kind: str, implementation: str = "eager", **changes: Any) -> Any:
    """In float64, but for what a model itself computes in float32: most routers."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | KINDS[kind] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation).double()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def step(model: Any, **arguments: Any) -> dict[str, Tensor]:
    """The loss, what is beside it, and every gradient, by name."""
    model.zero_grad()
    arguments = {"labels": IDS, "output_router_logits": True, "use_cache": False} | arguments
    found = model(input_ids=IDS, **arguments)
    found.loss.backward()
    results = {"loss": found.loss, "logits": found.logits}
    if getattr(found, "aux_loss", None) is not None:
        results["aux_loss"] = found.aux_loss
    results |= {f"router_logits.{i}": logits for i, logits in enumerate(found.router_logits or ())}
    results |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach().clone() for name, tensor in results.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = MODEL_FLOAT32) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        assert found[name].shape == theirs.shape, name
        assert relative_error(found[name].double().numpy(), theirs.double().numpy()) <= limit, name


@pytest.mark.parametrize("kind", KINDS)
def test_family(kind: str) -> None:
    model = build(kind)
    expected, keys = step(model), list(model.state_dict())
    tile_model(model, num_shards=4)
    assert_same(step(model), expected)
    paths = tiling_paths(model)
    assert paths.pop("lm_head") == "tiled_linear_cross_entropy"
    experts = {path for name, path in paths.items() if name.endswith(".experts")}
    assert experts == {"tiled_experts"}
    assert "tile" in {path for name, path in paths.items() if name.endswith(("gate", "router"))}
    assert {path for name, path in paths.items() if name.endswith("shared_experts")} <= {"tiled_mlp"}
    assert list(model.state_dict()) == keys
    recorded = [logits for name, logits in expected.items() if name.startswith("router_logits")]
    assert all(len(logits) == IDS.numel() for logits in recorded)


def test_a_router_that_changes_its_input_is_called() -> None:
    """With noise DBRX's does so in place, which its experts see."""
    model = build("dbrx", ffn_config=KINDS["dbrx"]["ffn_config"] | {"moe_jitter_eps": 0.2})
    torch.manual_seed(3)
    expected = step(model)
    tile_model(model, num_shards=4)
    torch.manual_seed(3)
    assert_same(step(model), expected)
    assert tiling_paths(model)["transformer.blocks.0.ffn.router"] == "untiled: it changes its input in place"
    model.eval()
    assert tiling_paths(model)["transformer.blocks.0.ffn.experts"] == "tiled_experts"


def test_of_every_known_loss_most_are_built() -> None:
    """Those that are not have the same forward, word by word, in transformers."""
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    built = {mapping[kind] for kind in KINDS} - {"DbrxForCausalLM"}  # whose loss is found by running it
    assert built <= WITH_EXPERTS
    assert len(WITH_EXPERTS - built) < 14


def test_labels_masks_and_counts() -> None:
    """The balancing term leaves out what the mask hides, and counts where the model is called with it in its configuration."""
    mask = torch.ones_like(IDS)
    mask[0, -4:] = 0
    labels = torch.where((IDS % 3 == 0) | (mask == 0), -100, IDS)
    given = {"labels": labels, "attention_mask": mask, "num_items_in_batch": torch.tensor(40)}
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.3)
    expected = step(model, output_router_logits=None, **given)
    without = step(model, output_router_logits=False, **given)
    tile_model(model, num_shards=3)
    assert_same(step(model, output_router_logits=None, **given), expected)
    assert_same(step(model, output_router_logits=False, **given), without)
    assert expected["aux_loss"] > 0
    assert "aux_loss" not in without


@pytest.mark.deep_but(3)
@pytest.mark.parametrize("kind", KINDS)
def test_terms_of_the_users(kind: str) -> None:
    """A balancing term and a z loss: gradients reach the routers through their recorded logits, all tokens' at once."""

    def run(with_loss: float) -> dict[str, Tensor]:
        model.zero_grad()
        found = model(input_ids=IDS, labels=IDS, output_router_logits=True, use_cache=False)
        assert found.router_logits
        terms = [a.softmax(-1).square().sum() + a.logsumexp(-1).square().mean() for a in found.router_logits]
        (with_loss * found.loss + torch.stack(terms).sum()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model = build(kind)
    expected = [run(1.0), run(0.0)]
    assert any(gradient.any() for name, gradient in expected[1].items() if "gate" in name or "router" in name)
    tile_model(model, num_shards=4)
    for found, theirs in zip((run(1.0), run(0.0)), expected, strict=True):
        assert_same(found, theirs)


class LowRank(nn.Module):
    """What peft puts on a parameter of experts: it frozen, and two small ones beside it."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(len(whole), 2, whole.shape[2], dtype=whole.dtype) / 4)
        self.b = nn.Parameter(torch.randn(len(whole), whole.shape[1], 2, dtype=whole.dtype) / 4)

    def forward(self, whole: Tensor) -> Tensor:
        return whole + self.b @ self.a


def with_low_rank(model: Any) -> Any:
    """The same model, of whose experts low-rank parts alone train."""
    torch.manual_seed(3)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(".experts"):
            for weight in ("gate_up_proj", "down_proj"):
                parametrize.register_parametrization(module, weight, LowRank(getattr(module, weight)))
                getattr(module.parametrizations, weight)[0].requires_grad_(True)
    return model


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("first", ["tiled", "adapted"])
@pytest.mark.parametrize("kind", ADAPTED)
def test_low_rank_parts_of_experts_in_each_family(kind: str, first: str) -> None:
    model = with_low_rank(build(kind))
    expected = step(model)
    adapters = [name for name in expected if name.endswith((".0.a", ".0.b"))]
    assert len(adapters) >= 4
    assert all(expected[name].any() for name in adapters)
    other = build(kind) if first == "tiled" else with_low_rank(build(kind))
    tile_model(other, num_shards=4)
    if first == "tiled":
        with_low_rank(other)
    assert_same(step(other), expected)
    assert "tiled_experts" in {path for name, path in tiling_paths(other).items() if name.endswith(".experts")}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3", "llama4_text"])
def test_gradient_checkpointing(kind: str, reentrant: bool) -> None:
    model = build(kind).train()
    # Reentrant checkpointing records router logits without gradients, untiled too.
    expected = step(model, output_router_logits=not reentrant)
    tile_model(model, num_shards=4)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same(step(model, output_router_logits=not reentrant), expected)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "qwen2_moe"])
def test_a_replay_stops_before_the_experts(kind: str) -> None:
    """Non-reentrant checkpointing computes no product of experts again, shared experts after them or not."""
    model: Any = tile_model(build(kind).eval(), num_shards=2)
    block = model.model.layers[1].mlp
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    flop = []
    for checkpointed in (False, True):
        with GemmFlop() as counter:
            if checkpointed:
                y = checkpoint(lambda x: x + block(x), x, use_reentrant=False)
            else:
                y = x + block(x)
            y.sum().backward()
        flop.append(counter.flop)
    experts = 6 * 2 * 18 * 16 * 20 * 2  # a forward of the experts alone: 6 T k H I
    assert flop[1] - flop[0] < experts / 2


def test_hooks_see_all_tokens_once() -> None:
    """As those of who balances experts without a loss do: they count, and move the bias, of this step for the next."""
    model = build("deepseek_v3")
    gate = model.model.layers[1].mlp.gate

    def steps(tiled: bool) -> tuple[Tensor, Tensor, list[int]]:
        with torch.no_grad():
            gate.e_score_correction_bias.zero_()
        counts, rows = torch.zeros(4), []

        def count(module: nn.Module, args: Any, output: Any) -> None:
            rows.append(len(output[2]))
            counts.add_(torch.bincount(output[2].reshape(-1), minlength=4))

        handle = gate.register_forward_hook(count)
        for _ in range(2):
            step(model)
            gate.e_score_correction_bias += 0.3 * (counts.mean() - counts).sign()
        handle.remove()
        return gate.e_score_correction_bias.clone(), counts, rows

    expected = steps(tiled=False)
    tile_model(model, num_shards=4)
    found = steps(tiled=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2] == [18, 18]
    assert expected[0].any()


def test_a_bias_that_moves_before_backward_is_told() -> None:
    """A recomputed router would choose other experts: autograd's own error, no wrong gradient."""
    model: Any = tile_model(build("deepseek_v3"), num_shards=4)
    loss = model(input_ids=IDS, labels=IDS).loss
    model.model.layers[1].mlp.gate.e_score_correction_bias += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_as_many_tokens_as_experts() -> None:
    """A router that is given one number for each expert takes all of them for every shard."""
    block = build("minimax_m2").model.layers[0].mlp
    block.e_score_correction_bias.copy_(torch.tensor([0.0, 9.0, 0.0, 9.0]))
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    expected = block(x)
    assert (
        relative_error(tile_model(block, num_shards=4)(x).detach().numpy(), expected.detach().numpy()) <= MODEL_FLOAT32
    )


def test_a_router_that_counts_by_itself() -> None:
    model = build("mixtral")
    gate = model.model.layers[0].mlp.gate

    class Counting(type(gate)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            logits, weights, index = super().forward(x)
            with torch.no_grad():
                self.counts += torch.bincount(index.reshape(-1), minlength=4)
            return logits, weights, index

    gate.__class__ = Counting
    gate.counts = nn.Buffer(torch.zeros(4, dtype=torch.long))
    expected = step(model)
    counts = gate.counts.clone()
    gate.counts.zero_()
    tile_model(model, num_shards=4)
    assert_same(step(model), expected)
    assert torch.equal(gate.counts, counts)
    assert counts.sum() == 18 * 2
    paths = {name: path for name, path in tiling_paths(model).items() if name.endswith(".gate")}
    assert paths == {"model.layers.0.mlp.gate": "untiled: it writes to its state", "model.layers.1.mlp.gate": "tile"}
    with torch.no_grad():
        model(input_ids=IDS)
    assert torch.equal(gate.counts, 2 * counts)


@pytest.mark.filterwarnings("ignore:tile_model")
@pytest.mark.parametrize("moved", ["bias", "attribute"])
@pytest.mark.parametrize(("scope", "num_shards"), [("mlp", 4), ("block", 4), ("block", 1)])
def test_a_router_that_moves_its_bias_moves_it_once(scope: Any, num_shards: int, moved: str) -> None:
    """With the choice of all tokens, of which no shard's and no recomputation chooses by what another has moved."""
    model = build("deepseek_v3")
    gate = model.model.layers[1].mlp.gate

    class Moving(type(gate)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            with torch.no_grad():
                counts = torch.bincount(found[-1].reshape(-1), minlength=4)
                self.load = counts
                if moved == "bias":
                    self.e_score_correction_bias += 0.5 * (counts.double().mean() - counts).sign()
            return found

    gate.__class__, bias = Moving, gate.e_score_correction_bias
    expected, after, load = step(model, output_router_logits=None), bias.clone(), gate.load
    assert after.any() == (moved == "bias")
    bias.zero_()
    tile_model(model, num_shards=num_shards, scope=scope)
    assert_same(step(model, output_router_logits=None), expected)
    assert torch.equal(bias, after)
    assert torch.equal(gate.load, load)


@pytest.mark.parametrize("kind", ["mixtral", "llama4_text"])
def test_generate_save_load_copy_untile(kind: str, tmp_path: Any) -> None:
    model = build(kind).eval()
    pickled = pickle.dumps(tile_model(copy.deepcopy(model), num_shards=3))  # before transformers hangs hooks on it
    expected = step(model)
    assert_same(step(pickle.loads(pickled)), expected)
    options = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(**options)
    classes = [type(module) for module in model.modules()]
    tile_model(model, num_shards=3)
    assert torch.equal(model.generate(**options), tokens)
    assert_same(step(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="eager"
    )
    assert_same(step(loaded), expected)
    assert tiling_paths(loaded) == {}
    assert [type(module) for module in untile_model(model).modules()] == classes
    assert not [key for module in model.modules() for key in vars(module) if key in ("_ran", "_tiling", "_alone")]


def test_a_replaced_forward_is_left_and_refused_with_strict_before_anything_changes() -> None:
    untiled = build("mixtral")
    gate = untiled.model.layers[1].mlp.gate
    gate.forward = MethodType(type(gate).forward, gate)
    model = copy.deepcopy(untiled)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=r"got model\.layers\.1\.mlp\.gate: its forward is forward"):
        tile_model(model, strict=True)
    assert [type(module) for module in model.modules()] == classes
    with pytest.warns(UserWarning, match=r"model\.layers\.1\.mlp\.gate stays as it is"):
        tile_model(model, num_shards=4)
    paths = tiling_paths(model)
    assert paths["model.layers.1.mlp.gate"].startswith("untiled: its forward is forward")
    assert paths["model.layers.1.mlp.experts"] == "tiled_experts"
    assert_same(step(model), step(untiled))


class Adapter(nn.Module):
    """A LoRA-style linear: a frozen base and a trainable low-rank pair."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x.to(self.a) @ self.a.T @ self.b.T).to(x)


@pytest.mark.parametrize("first", ["tiled", "adapted"])
def test_adapters_in_the_router(first: str) -> None:
    model = build("hunyuan_v1_moe")
    untiled = copy.deepcopy(model)
    for each in (untiled, model):
        if each is model and first == "tiled":
            tile_model(model, num_shards=4)
        torch.manual_seed(4)
        gate = each.model.layers[0].mlp.gate
        gate.wg = Adapter(gate.wg).double()
        if each is model and first == "adapted":
            tile_model(model, num_shards=4)
    assert_same(step(model), step(untiled))


def test_layers_called_past_the_model_are_told() -> None:
    model: Any = tile_model(build("mixtral").train(), num_shards=2)
    with pytest.warns(UserWarning, match="its layers were called past its forward"):
        model.model(input_ids=IDS, use_cache=False)
    assert tiling_paths(model)["lm_head"].startswith("untiled: its layers were called past its forward")


def test_trainer(tmp_path: Any) -> None:
    """Accumulation, padding, evaluation; the balancing term is in what it logs, as it is untiled."""
    model = build(
        "mixtral", "grouped_mm", output_router_logits=True, router_aux_loss_coef=0.3, intermediate_size=24
    ).float()

    def logged(model: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            eval_strategy="steps", eval_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=rows() * 2, eval_dataset=rows(), data_collator=padded
        )
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss")
        return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]

    expected = logged(copy.deepcopy(model))
    found = logged(tile_model(model, num_shards=3))
    assert len(found) == 5
    assert relative_error(torch.tensor(found).numpy(), torch.tensor(expected).numpy()) <= MODEL_FLOAT32


def test_bf16_training_step() -> None:
    """The default implementation, in bfloat16: as near to float32 as the untiled model is."""
    truth = build("qwen3_moe", moe_intermediate_size=24).float()
    expected = step(truth)
    model = copy.deepcopy(truth).bfloat16()
    model.set_experts_implementation("grouped_mm")
    untiled = step(model)
    tile_model(model, num_shards=4)
    found = step(model)
    assert found.keys() == expected.keys()
    worse = [
        (relative_error(found[n].float().numpy(), e.numpy()), relative_error(untiled[n].float().numpy(), e.numpy()))
        for n, e in expected.items()
    ]
    assert sum(ours for ours, _ in worse) <= sum(theirs for _, theirs in worse)


def test_bytes_of_a_step() -> None:
    """What pairs of tokens and experts take is gone: less than half of the untiled step, which keeps it for backward."""
    peaks = []
    ids = torch.arange(2 * 256).reshape(2, 256) % 31 + 1
    model = build("mixtral", intermediate_size=128).float().eval()
    for tiled in (False, True):
        if tiled:
            tile_model(model, num_shards=16)
        with LiveBytes() as live:
            model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
        model.zero_grad()
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] / 2


def test_llama4_computes_the_chosen_experts_alone() -> None:
    """Untiled, every expert gets every token: here 4 experts where 1 is chosen."""
    block = build("llama4_text", num_experts_per_tok=1).model.layers[0].feed_forward
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    shared = 3 * 2 * 18 * 16 * 20 * 3
    with GemmFlop() as untiled:
        block(x)[0].sum().backward()
    tile_model(block, num_shards=3)
    with GemmFlop() as tiled:
        block(x)[0].sum().backward()
    assert untiled.flop > 4 * 18 * 18 * 16 * 20 + shared
    assert tiled.flop < 2 * 22 * 18 * 16 * 20 + 10 * 2 * 18 * 16 * 4  # the shared expert, a tiled MLP, and one chosen


# What the compiler does with tensors that it takes up after a break in the graph.
@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_callers() -> None:
    """Experts and routers stay as they are, between two compiled graphs."""
    model: Any = tile_model(build("mixtral").float().eval(), num_shards=3)
    block = model.model.layers[0].mlp
    x = torch.randn(1, 6, 16)

    def run(fn: Any) -> list[Tensor]:
        y = fn(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(block.parameters()))]

    expected = run(block)
    for ours, theirs in zip(run(torch.compile(block, backend="eager")), expected, strict=True):
        assert relative_error(ours.numpy(), theirs.numpy()) <= MODEL_FLOAT32


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["ddp", "layers", "experts"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharding_engines(pools: dict[int, Ranks], checkpointing: bool, engine: str) -> None:
    """DDP, and fully_shard around layers, or around the experts and routers too."""
    for found in pools[2].run("tests.models.ranks_torch_moe:sharded", engine=engine, checkpointing=checkpointing):
        assert "tiled_experts" in found["paths"]
        assert found["error"] <= DISTRIBUTED_FLOAT64


def test_loss_is_the_models_own() -> None:
    """Against cross-entropy of its logits in float64, with the term times its coefficient."""
    model = tile_model(build("gpt_oss", router_aux_loss_coef=0.7), num_shards=4)
    found = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    plain = F.cross_entropy(found.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert relative_error(found.loss.detach().numpy(), (plain + 0.7 * found.aux_loss).detach().numpy()) <= MODEL_FLOAT32


# What the compiler does with tensors that it takes up after a break in the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own tracer
@pytest.mark.deep
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_a_compiled_model(kind: str) -> None:
    """Whose experts run between two graphs, and whose outputs come from one graph into another."""
    only = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]} if kind == "deepseek_v3" else {}
    model = tile_model(build(kind, num_hidden_layers=1, **only), num_shards=4)
    expected = step(model)
    torch._dynamo.reset()
    found = step(torch.compile(model, backend="eager"))
    assert_same({name.removeprefix("_orig_mod."): tensor for name, tensor in found.items()}, expected)
