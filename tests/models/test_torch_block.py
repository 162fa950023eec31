"""`tile_model(scope="block")`: a decoder layer but its attention by shards, with the gradients of the untiled model."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from shared_specs import SpecError, Tiling, UnsupportedError
from shared_specs.config import Checkpointing, ParallelConfig
from shared_specs.core.rounding import relative_error
from shared_specs.layers.block_costs import eager_block_row_bytes
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.core.torch_counting import GemmFlop, LiveBytes
from tests.models.test_torch_models import IDS, Adapter, assert_same, build, loss_and_gradients
from tests.ranks import Ranks
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.models.block.offload import host_memory
from tiled_torch.parallel import parallelize

KINDS = ["llama", "mistral", "qwen2", "qwen3"]


def gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Of a function of the last hidden states that no token and no channel leaves out."""
    model.zero_grad()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a loss past the model's own forward, which this is
        y = model.model(input_ids=IDS, use_cache=False, **inputs).last_hidden_state
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
        tile_model(build("olmo2"), scope="block")
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


def test_a_compiled_model_runs_its_layers_as_they_are() -> None:
    model = build("llama")
    expected = gradients(model)
    tile_model(model, scope="block", num_shards=3)
    model.model.compile(backend="eager")
    assert_equal(gradients(model), expected)
    assert layer_paths(model) == {"tiled_block"}


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


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=[pytest.mark.slow, pytest.mark.figures])]
)
def test_bytes_a_token(dtype: torch.dtype, offload: bool) -> None:
    """Between two lengths, at two depths."""
    for layers in (1, 3):
        slope = (peak(2048, layers, dtype, offload) - peak(1024, layers, dtype, offload)) / 1024
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


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["layers", "fsdp", "ddp"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_of_sharding_engines(pools: dict[int, Ranks], checkpointing: bool, engine: str) -> None:
    """Each layer a unit: its parameters are gathered for its forward and again for its backward, where all is used."""
    options = {"engine": engine, "checkpointing": checkpointing}
    for found in pools[2].run("tests.models.ranks_torch_block:sharded", **options):
        assert found["paths"] == ["tiled_block"]
        assert found["error"] <= DISTRIBUTED_FLOAT64
