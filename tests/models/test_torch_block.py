"""`tile_model(scope="block")`: a decoder layer but its attention by shards, with the gradients of the untiled model."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2

from shared_specs import SpecError, Tiling, UnsupportedError
from shared_specs.config import Checkpointing, ParallelConfig
from shared_specs.core.rounding import relative_error
from shared_specs.layers.block_costs import eager_block_row_bytes
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.core.torch_counting import GemmFlop, LiveBytes
from tests.models.test_torch_models import IDS, Adapter, assert_same, build, loss_and_gradients
from tests.models.torch_decoders import exact
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.models.block.host_memory import host_memory
from tiled_torch.parallel import parallelize

KINDS = ["llama", "mistral", "qwen2", "qwen3"]
OTHERS = [
    *"arcee cohere exaone4 gpt_neox hunyuan_v1_dense phi deepseek_v3 apertus youtu cohere2 minicpm3".split(),
    *"cwm ernie4_5 gemma gemma2 gemma3_text glm glm4 granite helium hyperclovax jais2".split(),
    *"ministral nemotron olmo olmo2 olmo3 phi3 seed_oss smollm3 starcoder2 vaultgemma".split(),
    *["phi3, dropout", "gpt_neox, dropout", "phi, dropout", "gpt_neox, in turn", "exaone4, no window"],
    *["deepseek_v3, one query", "ministral3"],
]


def gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Of a function of the last hidden states that no token and no channel leaves out."""
    model.zero_grad()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a loss past the model's own forward, which this is
        y = model.base_model(input_ids=IDS, use_cache=False, **inputs).last_hidden_state
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(found[name].numpy(), gradient.numpy()) <= DISTRIBUTED_FLOAT64, name


def layer_paths(model: Any) -> set[str]:
    return {path for name, path in tiling_paths(model).items() if name.rsplit(".", 1)[-1].isdigit()}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str, implementation: str) -> None:
    model = build(kind, num_attention_heads=4, attn_implementation=implementation)
    expected = gradients(model)
    tile_model(model, scope="block", num_shards=4)
    assert_equal(gradients(model), expected)
    assert layer_paths(model) == {"tiled_block"}


# What a family's attention and norms differ in besides: of sequences of nine tokens, with gradients of all parameters.
TURNED = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
LATENT = {
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 3,
    "v_head_dim": 7,
    "head_dim": 4,
}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 2}
SCALING = {"rope_type": "default", "rope_theta": 100.0, "llama_4_scaling_beta": 0.5}
SCALING |= {"original_max_position_embeddings": 4, "max_position_embeddings": 64}
CHANGES: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True},
    "exaone4": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4, no window": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "gpt_neox": {"rope_parameters": TURNED},
    "gpt_neox, dropout": {"hidden_dropout": 0.5},
    "gpt_neox, in turn": {"use_parallel_residual": False, "attention_bias": False},
    "phi": {"head_dim": 4, "rope_parameters": TURNED, "qk_layernorm": True},
    "phi, dropout": {"resid_pdrop": 0.5},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "minicpm3": LATENT,
    "youtu": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v3, one query": LATENT | {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 4},
    "glm": {"attention_bias": True},
    "granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "helium": {"head_dim": 4},
    "hyperclovax": {"residual_multiplier": 0.3, "use_post_norm": True},
    "ministral": {"sliding_window": 4},
    "ministral3": {"sliding_window": 4, "rope_parameters": SCALING},
    "olmo3": {"sliding_window": 4},
    "phi3": {"sliding_window": 4},
    "phi3, dropout": {"resid_pdrop": 0.5},
    "seed_oss": {"residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"residual_dropout": 0.0, "sliding_window": 4},
    "vaultgemma": {"sliding_window": 4, "attn_logit_softcapping": 2.0},
}


@pytest.mark.deep_but(24)
@pytest.mark.parametrize("kind", OTHERS)
def test_families_that_differ(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms behind attention and MLP, branches side by side, fused projections, multipliers, caps, windows, dropout.

    Of dropout one shard draws what the untiled layer draws.
    """
    changes = CHANGES.get(kind, {})
    model = exact(build(kind.split(",")[0], num_attention_heads=4, attn_implementation="eager", **changes).train())
    if kind.startswith("cohere"):
        home = {"cohere": modeling_cohere, "cohere2": modeling_cohere2}[kind]
        monkeypatch.setattr(home, "apply_rotary_pos_emb", _turned)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # scales of norms are alike otherwise
    expected = gradients(model)
    tile_model(model, scope="block", num_shards=1 if "dropout" in kind else 4)
    assert_equal(gradients(model), expected)
    assert layer_paths(model) == {"tiled_block"}


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cohere's rotary positions without their float32."""
    half = modeling_cohere.rotate_half
    q, k = (a * cos.unsqueeze(1) + half(a) * sin.unsqueeze(1) for a in (q, k))
    return q, k


def test_padding_positions_and_biases() -> None:
    model = build("llama", attention_bias=True)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    expected = gradients(model, **inputs)
    assert_equal(gradients(tile_model(model, scope="block", num_shards=3), **inputs), expected)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_dropout_of_attention(checkpointing: bool | None) -> None:
    """The same random numbers, also where the model's own checkpointing is on (and use_reentrant as given)."""
    model = build("llama", attention_dropout=0.5, attn_implementation="eager").train()
    expected = gradients(model)
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
    assert_equal(gradients(tile_model(model, scope="block", num_shards=3)), expected)


@pytest.mark.parametrize("checkpointing", [None, False])
def test_products_run_once_in_forward_and_once_in_backward(checkpointing: bool | None) -> None:
    """Beside their two gradients each; the down-projection in forward alone. Attention's kernel is none of the meter's."""
    model = build("llama").train()
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
    tile_model(model, scope="block", num_shards=3)
    layer = model.model.layers[0]
    weights = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    with GemmFlop() as meter:
        gradients(model)
    of_layer = 2 * IDS.numel() * (4 * weights - layer.mlp.down_proj.weight.numel())
    assert meter.flop == of_layer * len(model.model.layers)


def test_hooks_run_once_and_frozen_weights_get_nothing() -> None:
    model = build("llama")
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    expected, calls = gradients(model), []
    tile_model(model, scope="block", num_shards=4)
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.register_hook(lambda gradient: calls.append(gradient.shape))
    assert_equal(gradients(model), expected)
    assert calls == [weight.shape]


def test_a_hook_on_a_submodule_leaves_its_layer_to_its_mlp() -> None:
    model = build("llama").eval()
    expected, calls = gradients(model), []
    tile_model(model, scope="block", num_shards=4)
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert_equal(gradients(model), expected)
    assert calls == [1, 1]  # the layer keeps its input alone, whichever way it runs
    assert layer_paths(model) == {"mlp: self_attn has hooks", "tiled_block"}


def test_loss_of_the_whole_model() -> None:
    model = build("qwen2")
    expected = loss_and_gradients(model)
    assert_same(loss_and_gradients(tile_model(model, scope="block", num_shards=4)), expected)


def test_untiled_again_and_generation() -> None:
    model = build("llama").eval()
    classes = [type(module) for module in model.modules()]
    expected = model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False)
    tile_model(model, scope="block", num_shards=2)
    assert torch.equal(model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False), expected)
    assert [type(module) for module in untile_model(model).modules()] == classes


def test_refusals() -> None:
    with pytest.raises(SpecError, match=r"^tile_model: scope must be 'mlp' or 'block', got 'layer'\."):
        tile_model(build("llama"), scope="layer")  # type: ignore[arg-type]
    with pytest.raises(
        UnsupportedError, match=r"^tile_model: model must be a decoder of a family whose blocks are known"
    ):
        tile_model(build("stablelm"), scope="block")
    for options, text in (
        ({"keep": 0.5}, r"keep must be 0\.0 with scope='block', got 0\.5\."),
        ({"backend": "eager"}, r"backend must be auto with scope='block', got eager\."),
    ):
        with pytest.raises(UnsupportedError, match=rf"^tile_model: {text}"):
            tile_model(build("llama"), scope="block", **options)  # type: ignore[arg-type]
    model = tile_model(build("llama").eval(), scope="block", num_shards=2).model
    x = torch.randn(*IDS.shape, model.config.hidden_size, dtype=torch.float64)
    places = model.rotary_emb(x, torch.arange(IDS.shape[1])[None])
    y = model.layers[0](x, position_embeddings=places)
    with pytest.raises(UnsupportedError, match=r"^tile_model: create_graph must be False in backward"):
        torch.autograd.grad(y.sum(), list(model.layers[0].parameters()), create_graph=True)


def test_the_scope_that_was_asked_for_last_holds() -> None:
    model = build("llama")
    expected = gradients(model)
    tile_model(tile_model(model, scope="block", num_shards=2), num_shards=3)
    assert_equal(gradients(model), expected)
    paths = tiling_paths(model)
    assert {path for name, path in paths.items() if name != "lm_head"} == {"tiled_mlp"}
    assert_equal(gradients(tile_model(model, scope="block", num_shards=2)), expected)


class Noisy(Adapter):
    """With a dropout of its own, as LoRA's, whose mask it remembers."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape) < 0.5
        self.__dict__.setdefault("masks", []).append(mask)
        return self.base(x) + torch.where(mask, x, 0) @ self.a.T @ self.b.T


@pytest.mark.parametrize("names", [("self_attn.q_proj", "mlp.down_proj"), ("self_attn.o_proj", "mlp.gate_proj")])
def test_adapters_are_called_and_everything_else_stays_tiled(names: tuple[str, ...]) -> None:
    """Every gradient, those of the adapters included; frozen weights have none."""
    model = build("llama").train()
    for name in names:
        model.model.layers[0].set_submodule(name, Adapter(model.model.layers[0].get_submodule(name)))
    expected = gradients(model)
    assert_equal(gradients(tile_model(model, scope="block", num_shards=3)), expected)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.up_proj"])
def test_an_adapter_draws_the_same_numbers_again(name: str) -> None:
    """And the program outside goes on with the numbers that it would have had."""
    model = build("llama", num_hidden_layers=1).train()
    adapter = Noisy(model.model.layers[0].get_submodule(name))
    model.model.layers[0].set_submodule(name, adapter)
    tile_model(model, scope="block", num_shards=3)
    gradients(model)
    after = torch.rand(3)
    forward, *again = (adapter.masks[i : i + 3] for i in range(0, len(adapter.masks), 3))
    assert len(again) == (2 if name == "self_attn.v_proj" else 1)
    for found in again:
        assert all(map(torch.equal, found, forward))
    torch.manual_seed(1)
    assert [torch.equal(torch.rand(mask.shape) < 0.5, mask) for mask in forward] == [True] * 3
    assert torch.equal(torch.rand(3), after)


def test_a_layer_with_a_buffer_in_a_projection_runs_its_mlp_alone() -> None:
    model = build("llama")
    model.model.layers[0].self_attn.q_proj.register_buffer("seen", torch.zeros(()))
    expected = gradients(model)
    assert_equal(gradients(tile_model(model, scope="block", num_shards=3)), expected)
    assert layer_paths(model) == {"mlp: self_attn.q_proj has buffers", "tiled_block"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_autocast(implementation: str) -> None:
    """At most twice as wrong as the untiled model under autocast, both against float64; dtypes as there."""
    model = build("qwen3", num_attention_heads=4, attn_implementation=implementation).train()
    truth = gradients(model)

    def found() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model.float())

    expected = found()
    tile_model(model, scope="block", num_shards=3)
    for name, gradient in found().items():
        assert gradient.dtype == expected[name].dtype
        error = relative_error(gradient.numpy(), truth[name].numpy())
        assert error <= limit(relative_error(expected[name].numpy(), truth[name].numpy()), "bfloat16"), name
    assert layer_paths(model) == {"tiled_block"}


class Remembering(Adapter):
    """Which remembers the dtypes of what it returned."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.__dict__.setdefault("dtypes", []).append(y.dtype)
        return y


def test_an_adapter_computes_in_backward_in_the_dtype_that_autocast_gave_it_in_forward() -> None:
    """Three shards in forward, and twice again in backward, which runs outside of autocast."""
    model = build("llama", num_hidden_layers=1)
    adapter = Remembering(model.model.layers[0].self_attn.v_proj)
    model.model.layers[0].self_attn.v_proj = adapter
    tile_model(model.float().train(), scope="block", num_shards=3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    assert adapter.dtypes == [torch.bfloat16] * 9
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.deep
def test_a_compiled_decoder_runs_its_layers_as_they_are() -> None:
    model = build("llama", num_hidden_layers=1)
    expected = gradients(model)
    tile_model(model, scope="block", num_shards=3)
    model.model.compile(backend="eager")
    assert_equal(gradients(model), expected)
    assert layer_paths(model) == {"tiled_block, between two compiled graphs"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
@pytest.mark.parametrize(("backend", "offload"), [("eager", False), ("aot_eager", True)])
def test_a_compiled_model_runs_its_layers_as_they_are(backend: str, offload: bool) -> None:
    """With the loss that it has uncompiled, and of another length."""
    model: Any = tile_model(build("qwen3", num_hidden_layers=1).train(), scope="block", num_shards=3)
    if offload:
        parallelize(model, None, ParallelConfig(checkpointing=Checkpointing(offload=True)))

    def found(call: Any, ids: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        call(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = [found(model, ids) for ids in (IDS, IDS[:, :7])]
    assert layer_paths(model) == {"tiled_block"}
    compiled = torch.compile(model, backend=backend)
    for ids, gradient in zip((IDS, IDS[:, :7]), expected, strict=True):
        assert_equal(found(compiled, ids), gradient)
    assert layer_paths(model) == {"tiled_block, between two compiled graphs"}
    with torch.no_grad():
        compiled(input_ids=IDS)
    assert layer_paths(model) == {"mlp: no gradient is asked for"}


@pytest.mark.parametrize("how", ["transformers", "parallelize"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_inputs_that_wait_in_host_memory(kind: str, how: str) -> None:
    """The same gradients, and buffers that the next step uses again: one for each layer."""
    model = build(kind).train()
    expected = gradients(model)
    tile_model(model, scope="block", num_shards=3)
    if how == "transformers":
        model.activation_checkpointing_enable(offload=True)
    else:
        parallelize(model, None, ParallelConfig(checkpointing=Checkpointing(offload=True)))
    host_memory.cache_clear()
    for _ in range(2):
        assert_equal(gradients(model), expected)
        row = 8 * model.config.hidden_size
        assert host_memory(torch.device("cpu")).bytes == len(model.model.layers) * IDS.numel() * row


def peak(tokens: int, layers: int, dtype: torch.dtype, offload: bool) -> int:
    """Bytes of one step without those in host memory, of a decoder with the heads of Llama-3-8B and few weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=64)
    model = transformers.LlamaForCausalLM(config).to(dtype).train()
    tile_model(model, scope="block", tiling=Tiling(shard_tokens=32))
    checkpointing = Checkpointing(offload=offload)
    parallelize(model, None, ParallelConfig(checkpointing=checkpointing))
    ids = torch.arange(tokens)[None] % 64
    host_memory.cache_clear()
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return live.peak - host_memory(torch.device("cpu")).bytes


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=[pytest.mark.slow, pytest.mark.figures])]
)
def test_bytes_a_token(dtype: torch.dtype, offload: bool) -> None:
    """Between two lengths, at two depths."""
    for layers in (1, 3):
        slope = (peak(1024, layers, dtype, offload) - peak(512, layers, dtype, offload)) / 512
        sizes = {"hidden": 128, "heads": 16, "kv_heads": 4, "head_dim": 8, "itemsize": dtype.itemsize}
        predicted = eager_block_row_bytes(**sizes, kept_layers=0 if offload else layers)
        print(dtype, offload, layers, slope / (128 * dtype.itemsize), predicted / (128 * dtype.itemsize))
        assert slope == pytest.approx(predicted, rel=COST_BYTES)
        assert not offload or slope <= 7 * 128 * dtype.itemsize


def test_labels_that_do_not_count() -> None:
    """Compared with scope="mlp": transformers' own loss is float32 whatever the model is."""
    model, labels = tile_model(build("llama").train()), IDS.clone()
    labels[:, :4] = -100

    def found() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=IDS, labels=labels, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = found()
    tile_model(model, scope="block", num_shards=4)
    assert_equal(found(), expected)


def test_layers_called_past_the_model_are_told() -> None:
    """As with scope="mlp": the loss of whoever calls them is not the tiled one."""
    model = tile_model(build("llama").train(), scope="block", num_shards=2)
    with pytest.warns(UserWarning, match="its layers were called past its forward"):
        model.model(input_ids=IDS, use_cache=False)
