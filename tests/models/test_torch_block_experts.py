"""`tile_model(scope="block")` of layers whose MLP is a mixture of experts: gradients, FLOP and bytes of the untiled model."""

from typing import Any

import pytest
import torch
import transformers

from shared_specs import Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.layers.block_costs import eager_block_row_bytes
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, MODEL_FLOAT32, limit
from tests.core.torch_counting import GemmFlop, LiveBytes
from tests.models.test_torch_block import gradients, layer_paths
from tests.models.test_torch_models import IDS
from tests.models.test_torch_models import build as built
from tests.models.torch_decoders import exact
from tiled_torch import tile_model, tiling_paths, untile_model

# Sizes that the configurations of mixtures have, each where it has it; the first layer of some is dense.
SIZES: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
SIZES |= {"num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}
SIZES |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1, "decoder_sparse_step": 1}
SIZES |= {"first_k_dense_replace": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 5}
LATENT = {
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 3,
    "v_head_dim": 7,
    "head_dim": 4,
}
LATENT |= {"num_key_value_heads": 4}
CHANGES = {"olmoe": {"head_dim": 4}, "flex_olmo": {"head_dim": 4}, "deepseek_v2": LATENT, "deepseek_v3": LATENT}
CHANGES["glm4_moe_lite"] = LATENT
CHANGES["gpt_oss"] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = "mixtral qwen2_moe flex_olmo gpt_oss deepseek_v3 deepseek_v2 ernie4_5_moe dots1".split()
KINDS += "exaone_moe glm4_moe glm4_moe_lite hunyuan_v1_moe hy_v3 mellum minimax_m2 olmoe qwen3_moe solar_open".split()
FLOAT32 = {
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "hy_v3",
    "minimax_m2",
    "solar_open",
}  # whose routers are, whatever the model is


def build(kind: str, **changes: Any) -> Any:
    config = transformers.CONFIG_MAPPING[kind]()
    sizes = {name: size for name, size in SIZES.items() if hasattr(config, name)} | CHANGES.get(kind, {})
    sizes |= {"num_attention_heads": 4, "experts_implementation": "eager", "attn_implementation": "eager"}
    model = exact(built(kind, **sizes | changes).train())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def assert_gradients(model: Any, expected: dict[str, torch.Tensor], allowed: float = DISTRIBUTED_FLOAT64) -> None:
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(found[name].numpy(), gradient.numpy()) <= allowed, name


@pytest.mark.deep_but(6)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    """Of routers, experts and shared experts; dense layers beside them, norms behind them."""
    model = build(kind)
    expected = gradients(model)
    assert any("experts" in name for name in expected)
    tile_model(model, scope="block", num_shards=4)
    assert_gradients(model, expected, limit(0.0, "float32") if kind in FLOAT32 else DISTRIBUTED_FLOAT64)
    assert layer_paths(model) == {"tiled_block"}
    assert {path for name, path in tiling_paths(model).items() if name.endswith(".mlp.experts")} == {"tiled_experts"}


def test_positions_as_complex_numbers_in_float32() -> None:
    """Elements are taken as they lie, without a copy in another dtype."""
    model = build("deepseek_v2", qk_nope_head_dim=4, kv_lora_rank=6).float()  # even, as they have to be there
    expected = gradients(model)
    assert_gradients(tile_model(model, scope="block", num_shards=4), expected, MODEL_FLOAT32)
    assert layer_paths(model) == {"tiled_block"}


class Scaled(torch.nn.Module):
    """Somebody's own module around experts: their result times a trained number a feature."""

    def __init__(self, experts: Any, size: int) -> None:
        super().__init__()
        self.experts, self.scale = experts, torch.nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=torch.float64))

    def forward(self, *given: Any) -> torch.Tensor:
        return self.experts(*given) * self.scale


@pytest.mark.parametrize(
    ("kind", "around"), [("mixtral", "experts"), ("qwen3_moe", "experts"), ("dots1", "shared_experts")]
)
def test_what_multiplies_the_experts_result_gets_its_gradient(kind: str, around: str) -> None:
    model = build(kind)
    tiled = tile_model(build(kind), scope="block", num_shards=3)
    tiled.load_state_dict(model.state_dict())
    for one in (model, tiled):
        mlp: Any = one.model.layers[-1].mlp
        setattr(mlp, around, Scaled(getattr(mlp, around), model.config.hidden_size))
    expected, name = gradients(model), f"model.layers.{len(model.model.layers) - 1}.mlp.{around}.scale"
    assert expected[name].norm() > 0
    assert_gradients(tiled, expected, limit(0.0, "float32") if kind in FLOAT32 else DISTRIBUTED_FLOAT64)
    assert layer_paths(tiled) == {"tiled_block"}


@pytest.mark.parametrize("offload", [False, True])
def test_under_the_models_own_checkpointing(offload: bool) -> None:
    """The layer is its own checkpoint; its input may wait on the host."""
    model = build("mixtral")
    expected = gradients(model)
    tile_model(model, scope="block", num_shards=3)
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=offload)
    assert_gradients(model, expected)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.filterwarnings("ignore:tile_model. the loss of MixtralForCausalLM")
@pytest.mark.parametrize("kind", ["mixtral", "dots1", "hunyuan_v1_moe", "hy_v3", "ernie4_5_moe"])
def test_flop_are_eleven_units_of_a_routed_token(kind: str) -> None:
    """And of a token of the MLP beside experts whose result is added to theirs: down is not computed again.

    Attention's products run once in forward and once in backward beside their two gradients; its output's and the router's
    once more, so that what stands before the experts need not be kept, and queries and keys where norms of heads want them.
    """
    model = tile_model(build(kind, attn_implementation="sdpa"), scope="block", num_shards=3)
    layer: Any = model.model.layers[-1]
    normed = ("q_proj", "k_proj") if any("norm" in name for name, _ in layer.self_attn.named_children()) else ()
    sizes = {name: p.numel() for name, p in layer.named_parameters() if p.ndim > 1 and "bias" not in name}
    attention, routed, shared, router, again = (
        sum(size for name, size in sizes.items() if any(part in name for part in parts))
        for parts in (["attn"], [".experts."], ["shared"], [".gate."], [".gate.", "o_proj", *normed])
    )
    count = len(layer.mlp.experts.down_proj)
    x = torch.randn(*IDS.shape, 16, dtype=torch.float64, requires_grad=True)
    places = model.model.rotary_emb(x, torch.arange(IDS.shape[1])[None])
    with GemmFlop() as meter:
        layer(x, position_embeddings=places).sum().backward()
    tried = 2 * 2 * router  # `tile` tries the router on two tokens
    of_mlps = 11 * (2 * routed // count + shared) // 3  # of the two experts of a token
    assert meter.flop - tried == 2 * IDS.numel() * (4 * (attention + router) + again + of_mlps)


def peak(tokens: int, layers: int) -> int:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=layers, vocab_size=64, num_local_experts=4)
    model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager").train()
    tile_model(model, scope="block", tiling=Tiling(shard_tokens=256))
    ids = torch.arange(tokens)[None] % 64
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return live.peak


@pytest.mark.deep
def test_bytes_a_token_are_those_of_a_dense_block_and_three_rows() -> None:
    """What the experts are given, its gradient, and the router's share in that; one row more for every further layer."""
    sizes = {"hidden": 128, "heads": 16, "kv_heads": 4, "head_dim": 8, "itemsize": 4}
    slopes = [(peak(1536, layers) - peak(1024, layers)) / 512 for layers in (1, 2)]
    for layers, slope in zip((1, 2), slopes, strict=True):
        assert slope <= (eager_block_row_bytes(**sizes, kept_layers=layers) + 3 * 128 * 4) * (1 + COST_BYTES)
    assert slopes[1] - slopes[0] == pytest.approx(128 * 4, rel=COST_BYTES)


def test_what_a_layer_adds_that_is_not_computed_leaves_it_to_its_mlp() -> None:
    """Clipped projections and noise before the router: the layer runs as its class does, and says why."""
    for kind, changes, reason in (
        ("olmoe", {"clip_qkv": 0.01}, "mlp: clip_qkv is not 0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "mlp: jitter_noise is not 0"),
    ):
        model = build(kind, **changes)
        expected = gradients(model)
        tile_model(model, scope="block", num_shards=4)
        assert tiling_paths(model)["model.layers.0"] == reason
        found = gradients(model)
        if kind == "olmoe":  # of noise a shard draws other numbers than all tokens
            for name, gradient in expected.items():
                assert relative_error(found[name].numpy(), gradient.numpy()) <= DISTRIBUTED_FLOAT64, name


@pytest.mark.filterwarnings("ignore:tile_model. .* in spite of scope=.block.")
def test_the_loss_with_its_balancing_term_is_the_models() -> None:
    """Router logits are collected from hooks, which want the router of all tokens: such a call runs its layers whole."""
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    for parameter in model.parameters():
        parameter.grad = None
    found, expected = [], []
    for results in (expected, found):
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
        out.loss.backward()
        results += [out.aux_loss.detach(), model.model.layers[0].mlp.gate.weight.grad.clone()]
        model.zero_grad()
        if results is expected:
            tile_model(model, scope="block", num_shards=3)
    assert layer_paths(model) == {"mlp: mlp.gate has hooks"}
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours.numpy(), theirs.numpy()) <= limit(0.0, "float32")


def test_untiled_again() -> None:
    model = build("qwen3_moe").eval()
    kinds, expected = [type(module) for module in model.modules()], model(IDS).logits
    tile_model(model, scope="block", num_shards=3)
    assert relative_error(model(IDS).logits.detach().numpy(), expected.detach().numpy()) <= DISTRIBUTED_FLOAT64
    assert [type(module) for module in untile_model(model).modules()] == kinds
