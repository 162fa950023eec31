"""What runs is what is reported: `tiling_paths` after a call, and one warning where a loss goes past the tiled one."""

import copy
import warnings
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from shared_specs import UnsupportedError
from shared_specs.check.compare import error_of, least_of
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32
from tests.models.test_torch_models import IDS, Adapter, assert_same, build, loss_and_gradients
from tests.models.tiny_configs import tiny_config, tiny_model
from tests.models.tiny_overrides import OVERRIDES
from tiled_torch import tile_model, tiling_paths, untile_model

transformers = pytest.importorskip("transformers")

TILED = "tiled_linear_cross_entropy"
ALONE = "untiled: its layers were called past its forward, by a trainer with a head of its own, say"


def told(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in found]


def test_the_path_is_that_of_the_last_call() -> None:
    model = tile_model(build("llama").train(), num_shards=3)
    assert tiling_paths(model)["lm_head"] == TILED
    assert told(lambda: model(input_ids=IDS, labels=IDS)) == []
    assert tiling_paths(model)["lm_head"] == TILED
    with pytest.warns(
        UserWarning, match=r"^tile_model: the loss of LlamaForCausalLM does not run through .*without labels"
    ):
        model(input_ids=IDS)
    assert tiling_paths(model)["lm_head"].startswith("untiled: it was called without labels")
    assert told(lambda: model(input_ids=IDS)) == []  # once
    model(input_ids=IDS, labels=IDS)
    assert tiling_paths(model)["lm_head"] == TILED
    for name in ("copy", "untile"):
        assert tiling_paths(copy.deepcopy(model) if name == "copy" else untile_model(model)) == (
            tiling_paths(model) if name == "copy" else {}
        )
    assert not [
        key for module in model.modules() for key in vars(module) if key in ("_ran", "_told", "_alone", "_tiling")
    ]


def test_inference_is_not_warned_about() -> None:
    model = tile_model(build("llama").eval(), num_shards=3)
    assert told(lambda: model(input_ids=IDS)) == []
    with torch.no_grad():
        assert told(lambda: model.train()(input_ids=IDS)) == []
        assert told(lambda: model.eval().generate(input_ids=IDS, max_new_tokens=2, do_sample=False)) == []
    assert tiling_paths(model)["lm_head"].startswith("untiled: it was called without labels")


def test_generate_is_the_untiled_models() -> None:
    model = build("llama").eval()
    options = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**options)
    assert torch.equal(tile_model(model, num_shards=3).generate(**options), expected)


def test_an_adapter_that_comes_later_is_told() -> None:
    """Once for the model, of the first layer that is called."""
    model = tile_model(build("llama").train(), num_shards=3)
    loss_and_gradients(model)
    for layer in model.model.layers[:1]:
        layer.mlp.up_proj = Adapter(layer.mlp.up_proj)
    assert tiling_paths(model)["model.layers.0.mlp"] == "tiled_mlp"  # what ran, not what would
    said = told(lambda: [loss_and_gradients(model) for _ in range(2)])
    assert said == [
        "tile_model: LlamaMLP runs through tile, which recomputes all of it: up_proj is Adapter. "
        "tiling_paths(model) says which ones."
    ]
    assert tiling_paths(model)["model.layers.0.mlp"] == "tile: up_proj is Adapter"
    assert tiling_paths(model)["model.layers.1.mlp"] == "tiled_mlp"


BLOCKS = {"model.layers.0": "tiled_block", "model.layers.1": "tiled_block"}


def paths_of_layers(model: Any) -> dict[str, str]:
    return {name: path for name, path in tiling_paths(model).items() if name.count(".") == 2}


@pytest.mark.filterwarnings("ignore:tile_model. the loss of LlamaForCausalLM .* without labels")
@pytest.mark.parametrize("asked", ["use_cache", "output_hidden_states", "output_attentions"])
def test_an_evaluation_between_steps_leaves_blocks(asked: str) -> None:
    """transformers' hooks that collect outputs stay in the modules, and collect nothing in a step of training."""
    model = build("llama").train()
    model.set_attn_implementation("eager")
    expected = loss_and_gradients(model)
    tile_model(model, num_shards=3, scope="block")
    with torch.no_grad():
        found = model.eval()(IDS, **{asked: True})
    assert asked == "use_cache" or len(found[asked.removeprefix("output_")]) >= len(model.model.layers)
    assert told(lambda: assert_same(loss_and_gradients(model.train()), expected)) == []
    assert paths_of_layers(model) == BLOCKS


def test_a_step_that_collects_outputs_collects_them() -> None:
    """The reason is told once, for all layers and steps."""
    model = tile_model(build("llama").train(), num_shards=3, scope="block")
    model.set_attn_implementation("eager")
    loss_and_gradients(model)
    seen: list[Any] = []
    said = told(lambda: seen.extend(model(IDS, labels=IDS, output_attentions=True).attentions for _ in range(2)))
    assert [text.partition("in spite of scope='block': ")[2] for text in said] == [
        "attention weights are asked for. tiling_paths(model) says which ones."
    ]
    assert all(len(each) == len(model.model.layers) for each in seen)
    loss_and_gradients(model)
    assert paths_of_layers(model) == BLOCKS


TOOLS: dict[str, Any] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "ModuleTracker": ModuleTracker,
    "ModTracker": ModTracker,
    "MemTracker": MemTracker,
    "CommDebugMode": CommDebugMode,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_follow_a_model_follow_its_blocks(tool: str) -> None:
    """CommDebugMode cannot follow a module that is called twice: under it the MLPs alone run a shard at a time."""
    model = build("llama").train()
    expected = loss_and_gradients(model)
    tile_model(model, num_shards=3, scope="block")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*there are hooks of all modules")
        warnings.filterwarnings("ignore", message=".*ackward hook")  # of CommDebugMode itself
        with TOOLS[tool]():
            assert_same(loss_and_gradients(model), expected)
    assert (paths_of_layers(model) == BLOCKS) == (tool != "CommDebugMode")
    assert_same(loss_and_gradients(model), expected)
    assert paths_of_layers(model) == BLOCKS


def test_what_keeps_a_layer_from_running_as_a_block_is_told_once() -> None:
    model = tile_model(build("llama").train(), num_shards=3, scope="block")
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: None)
    said = told(lambda: [loss_and_gradients(model) for _ in range(2)])
    assert said == [
        "tile_model: LlamaDecoderLayer runs whole, its MLP alone a shard at a time, in spite of scope='block': "
        "self_attn.q_proj has hooks. tiling_paths(model) says which ones."
    ]


def test_hooks_on_the_head_are_called_and_told() -> None:
    model = build("llama")
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    tile_model(model, num_shards=3)
    assert [
        text.partition("entropy: ")[2] for text in told(lambda: [model(input_ids=IDS, labels=IDS) for _ in range(2)])
    ] == ["lm_head has hooks. tiled_loss calls it for every shard instead."]
    assert tiling_paths(model)["lm_head"] == "tiled_loss: lm_head has hooks"
    assert calls


def doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("path", ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.act_fn"])
@pytest.mark.filterwarnings("ignore:tile_model. the loss of LlamaForCausalLM .* lm_head has a forward of its own")
def test_a_forward_put_into_a_part_is_called(path: str) -> None:
    """By kernels, accelerate or a trainer: the weights alone would be another model."""
    model = build("llama")
    tile_model(model, num_shards=3)
    before = loss_and_gradients(model)[0]
    part = model.get_submodule(path)
    name = path.rpartition(".")[2]
    part.forward = MethodType(doubled, part) if name != "act_fn" else lambda x: 2 * F.silu(x)
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
        if name == "lm_head":
            assert torch.equal(logits, 2 * F.linear(model.model(input_ids=IDS)[0], model.lm_head.weight))
    found = loss_and_gradients(model)[0]
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert (
        relative_error(found.numpy(), expected.numpy()) <= MODEL_FLOAT32 < relative_error(found.numpy(), before.numpy())
    )
    place = path.removesuffix(f".{name}")
    assert tiling_paths(model)[place].endswith(f": {name} has a forward of its own")


@pytest.mark.filterwarnings("ignore:tile_model. .* runs through tile")
def test_an_activation_that_was_exchanged_is_the_one_that_runs() -> None:
    """One that the specification does not know was computed as silu."""
    model = build("llama")
    tile_model(model, num_shards=3)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Softplus()
    found = loss_and_gradients(model)
    assert tiling_paths(model)["model.layers.0.mlp"] == "tile: act_fn is Softplus"
    assert_same(found, loss_and_gradients(untile_model(model)))


class OwnMLP(transformers.models.llama.modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnModel(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.loss = 2 * outputs.loss
        return outputs


def test_a_subclass_with_a_forward_of_its_own_is_what_a_probe_shows() -> None:
    model = build("llama")
    model.model.layers[1].mlp.__class__ = OwnMLP
    expected = loss_and_gradients(model)
    paths = tiling_paths(tile_model(model, num_shards=3))
    assert paths["model.layers.1.mlp"] == "tile: a probe shows another formula than that of tiled_mlp"
    assert paths["model.layers.0.mlp"] == "tiled_mlp"
    assert_same(loss_and_gradients(model), expected)


def test_a_model_with_a_forward_of_its_own_runs_that() -> None:
    """Around its class's, whose loss is tiled all the same."""
    model = build("llama").float()
    model.__class__ = OwnModel
    expected = model(input_ids=IDS, labels=IDS).loss
    assert tiling_paths(tile_model(model, num_shards=3))["lm_head"] == TILED
    found = model(input_ids=IDS, labels=IDS).loss
    assert relative_error(found.detach().numpy(), expected.detach().numpy()) <= MODEL_FLOAT32
    assert tiling_paths(model)["lm_head"] == TILED


@pytest.mark.parametrize("part", ["", "model.layers.0.mlp"])
def test_a_forward_in_an_instance_stays_and_is_told(part: str) -> None:
    """As accelerate's hooks put it there: it calls the forward that was there before."""
    model = build("llama")
    expected = loss_and_gradients(model)
    module = model.get_submodule(part)
    module.forward = lambda *args, known=module.forward, **kwargs: known(*args, **kwargs)
    place = part or "lm_head"
    with pytest.warns(
        UserWarning, match=rf"^tile_model: {place} stays as it is in LlamaForCausalLM: its forward is <lambda>"
    ):
        tile_model(model, num_shards=3)
    assert tiling_paths(model)[place].startswith("untiled: its forward is <lambda>")
    assert tiling_paths(model)["model.layers.1.mlp"] == "tiled_mlp"
    if part:
        assert_same(loss_and_gradients(model), expected)
    with pytest.raises(
        UnsupportedError, match=rf"tiled as a whole with strict=True, got {place}: its forward is <lambda>"
    ):
        tile_model(untile_model(model), strict=True)
    assert tiling_paths(model) == {}


HEADS = {"SequenceClassification": "score", "TokenClassification": "score", "QuestionAnswering": "qa_outputs"}


@pytest.mark.parametrize("kind", HEADS)
def test_the_head_of_another_loss_stays_and_is_told(kind: str) -> None:
    """Without a warning: it has a few outputs for a token. strict refuses it as it refuses all that stays."""
    model = build("llama")
    model = getattr(transformers, f"LlamaFor{kind}")(model.config)
    head, reason = HEADS[kind], f"the loss of LlamaFor{kind} is no language model's"
    assert told(lambda: tile_model(model, num_shards=3)) == []
    assert tiling_paths(model) == {
        head: f"untiled: {reason}",
        **{f"{model.base_model_prefix}.layers.{i}.mlp": "tiled_mlp" for i in range(len(model.base_model.layers))},
    }
    assert tiling_paths(untile_model(model)) == {}
    with pytest.raises(UnsupportedError, match=rf"tiled as a whole with strict=True, got {head}: {reason}"):
        tile_model(model, strict=True)
    tile_model(model.base_model, strict=True)
    assert head not in tiling_paths(model)


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("kind", ["mixtral", "bert", "qwen2", "mistral", "gemma2", "gpt2", "gpt_neox", "opt"])
def test_models_with_a_head_of_another_loss_train_as_before(kind: str) -> None:
    """A reward model: its MLPs are tiled, and the head stays."""
    config = tiny_config(kind, OVERRIDES.get(kind, {}) | {"pad_token_id": 0, "num_labels": 1})
    model = tiny_model(config, transformers.AutoModelForSequenceClassification)

    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model.zero_grad()
        found = model(input_ids=IDS, labels=torch.tensor([[0.5], [1.0]]))
        found.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": found.loss.detach(), "logits": found.logits.detach()}, gradients

    results, gradients = run()
    assert told(lambda: tile_model(model, num_shards=3)) == []
    found, of_params = run()
    assert of_params.keys() == gradients.keys()
    least = least_of(gradient.numpy() for gradient in gradients.values())
    for name, theirs in (results | gradients).items():
        assert error_of((found | of_params)[name].numpy(), theirs.numpy(), least) <= MODEL_FLOAT32, name
    paths = tiling_paths(model)
    left = [path for path in paths.values() if path.startswith("untiled")]
    assert left == [f"untiled: the loss of {type(model).__name__} is no language model's"]
    assert len(paths) > config.num_hidden_layers


def fused(self: Any, *args: Any, labels: Any = None, fused_lm_head: bool = False, **kwargs: Any) -> Any:
    """As trl's SFTTrainer: a head of its own behind the layers, the original forward for whoever does not ask for it."""
    if not fused_lm_head:
        return type(self).forward(self, *args, labels=labels, **kwargs)
    hidden = self.base_model(*args, **kwargs).last_hidden_state[:, :-1]
    return F.cross_entropy(F.linear(hidden, self.lm_head.weight).flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("called", ["model", "forward"])  # peft calls the forward itself
def test_a_trainer_with_a_head_of_its_own_is_told(called: str) -> None:
    model = tile_model(build("llama"), num_shards=3)
    expected = model(input_ids=IDS, labels=IDS).loss
    assert tiling_paths(model)["lm_head"] == TILED
    model.forward = MethodType(fused, model)
    call = model if called == "model" else model.forward
    with pytest.warns(UserWarning, match="its layers were called past its forward"):
        found = call(input_ids=IDS, labels=IDS, fused_lm_head=True)
    assert relative_error(found.detach().numpy(), expected.detach().numpy()) <= DISTRIBUTED_FLOAT64
    assert tiling_paths(model)["lm_head"] == ALONE
    assert told(lambda: call(input_ids=IDS, labels=IDS, fused_lm_head=True)) == []
    call(input_ids=IDS, labels=IDS)
    assert tiling_paths(model)["lm_head"] == TILED


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_replay_in_backward_is_no_call(reentrant: bool) -> None:
    """Checkpointing runs the layers again outside of any forward."""
    model = tile_model(build("llama").train(), num_shards=3)
    model.get_input_embeddings().register_forward_hook(lambda module, args, found: found.requires_grad_())
    loss = checkpoint(
        lambda: model(input_ids=IDS, labels=IDS).loss + 0 * model.model.norm.weight.sum(), use_reentrant=False
    )
    loss.backward()
    options = {"use_reentrant": reentrant}
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(options)
    assert told(lambda: model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()) == []
    assert tiling_paths(model)["lm_head"] == TILED


def test_a_loss_of_the_same_name_is_the_users() -> None:
    model = tile_model(build("llama"), num_shards=3)

    def ForCausalLMLoss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return logits.sum()

    model.loss_function = ForCausalLMLoss
    with pytest.warns(UserWarning, match="its loss_function is ForCausalLMLoss"):
        found = model(input_ids=IDS, labels=IDS)
    assert torch.equal(found.loss, found.logits.sum())


@pytest.mark.parametrize("arguments", [{"use_cache": True}, {"output_hidden_states": True, "output_attentions": True}])
def test_other_outputs_are_the_untiled_models(arguments: dict[str, Any]) -> None:
    model = build("llama", attn_implementation="eager")
    expected = model(input_ids=IDS, labels=IDS, **arguments)
    found = tile_model(model, num_shards=3)(input_ids=IDS, labels=IDS, **arguments)
    assert list(found) == list(expected)
    for name in ("hidden_states", "attentions"):
        for ours, plain in zip(found.get(name) or (), expected.get(name) or (), strict=True):
            assert relative_error(ours.detach().numpy(), plain.detach().numpy()) <= DISTRIBUTED_FLOAT64
    if "use_cache" in arguments:
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() == IDS.shape[1]


def test_arguments_by_place() -> None:
    model = build("llama").float()
    expected = model(IDS, None, None, None, None, IDS).loss.detach()
    tile_model(model, num_shards=3)
    found = model(IDS, None, None, None, None, IDS).loss.detach()
    assert relative_error(found.numpy(), expected.numpy()) <= MODEL_FLOAT32
    with pytest.raises(TypeError, match="positional arguments"):
        model(IDS, None, None, None, None, IDS, None, 0, 1)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(IDS, input_ids=IDS, labels=IDS)
