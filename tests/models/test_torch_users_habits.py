"""What users do to a model in PyTorch gives with a tiled model what it gives with the untiled one, put through the same habit.

A habit is a few lines: it gets a fresh model, does something to it and returns what is compared: losses, gradients, parameters,
logits, keys. The same function runs the untiled model with the same weights, and what it returns is the reference. Where the
untiled model raises, the tiled one has to as well; what a tiled model is documented to refuse has the words of its refusal.
The models are a Llama of transformers ("mlp" and "block" are scopes of `tile_model`) and a small module with `TiledMLP` and
`TiledLinearCrossEntropy` ("module").
"""

import contextlib
import copy
import importlib.util
import io
import pickle
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import CheckpointError, checkpoint

from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tiled_torch import TiledLinearCrossEntropy, TiledMLP, tile_model, tiling_paths

transformers = pytest.importorskip("transformers")

Habit = Callable[[Any], Any]
VOCAB, H, I, SHARDS = 40, 16, 24, 4  # noqa: E741
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RANDOM = torch.Generator().manual_seed(0)
IDS, OTHER_IDS = (torch.randint(3, VOCAB, (2, 9), generator=RANDOM) for _ in range(2))
X = torch.randn(2, 9, H, generator=RANDOM)
LABELS = IDS.clone()
LABELS[0, 3] = -100
HAS_PEFT = importlib.util.find_spec("peft") is not None


# The models.


@cache
def prototype(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
    return noisy(transformers.LlamaForCausalLM(config))


def noisy(model: Any) -> Any:
    """The model, with something added to every parameter: zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def llama(form: str, attention: str = "sdpa") -> Any:
    model = copy.deepcopy(prototype(attention))
    return model if form == "plain" else tile_model(model, scope=form, num_shards=SHARDS)  # type: ignore[arg-type]


class PlainMLP(nn.Module):
    """The parameters of `TiledMLP`, and three products."""

    def __init__(self) -> None:
        super().__init__()
        for name, (outputs, inputs) in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items():
            self.register_parameter(f"w_{name}", nn.Parameter(torch.zeros(outputs, inputs)))
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.named_parameters())
        gate, up = (F.linear(x, own[f"w_{name}"], own[f"b_{name}"]) for name in ("gate", "up"))
        return F.linear(F.silu(gate) * up, own["w_down"], own["b_down"])


class PlainHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(VOCAB, H)), nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.weight, self.bias).flatten(0, -2), targets.flatten())


class Net(nn.Module):
    """loss(x + mlp(norm(x))), the smallest module with all that is tiled."""

    def __init__(self, form: str) -> None:
        super().__init__()
        plain = form == "plain"
        self.norm: nn.Module = nn.LayerNorm(H)
        self.mlp: Any = PlainMLP() if plain else TiledMLP(H, I, bias=True, num_shards=SHARDS)
        self.lm_head: Any = PlainHead() if plain else TiledLinearCrossEntropy(H, VOCAB, bias=True, num_shards=SHARDS)

    def forward(self, x: Tensor, targets: Tensor = LABELS) -> Tensor:
        return self.lm_head(x + self.mlp(self.norm(x)), targets)


def module(form: str) -> Any:
    model = Net(form)
    torch.manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model


MODELS: dict[str, Callable[[str], Any]] = {"mlp": llama, "block": llama, "module": module}


# How habits are put down and compared.

HABITS: list[Any] = []


def habit(
    *forms: str,
    deep: bool = False,
    refused: str = "",
    raises: bool = False,
    faults: dict[str, str] | None = None,
    peft: bool = False,
) -> Callable[[Habit], Habit]:
    """Put a function on the list once for each form, of which all but the first are deep.

    deep: the first is too. refused: what a tiled model says where it is documented not to do this. raises: the untiled model
    raises. faults: what is wrong with a form today. peft: whether the package is needed.
    """

    def put_down(do: Habit) -> Habit:
        for form in forms:
            marks = [] if form == forms[0] and not deep else [pytest.mark.deep]
            if faults and form in faults:
                raised = (AssertionError, CheckpointError)
                marks.append(pytest.mark.xfail(strict=True, reason=faults[form], raises=raised))
            if peft:
                marks.append(
                    pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed (requirements/trainers.txt)")
                )
            HABITS.append(pytest.param(do, form, refused, raises, id=f"{do.__name__}-{form}", marks=marks))
        return do

    return put_down


@cache
def reference(do: Habit, kind: Callable[[str], Any]) -> Any:
    return outcome(do, kind("plain"))


def outcome(do: Habit, model: Any) -> Any:
    """What a habit returns, as tensors and values by their path, or the error that it raised."""
    torch.manual_seed(11)
    try:
        return dict(flat("", do(model)))
    except Exception as error:
        return error


def flat(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from flat(f"{name}.{index}", inner)
    else:
        yield name, value.detach().clone() if isinstance(value, Tensor) else value


@pytest.mark.filterwarnings("ignore:tile_model. the loss of LlamaForCausalLM does not run through:UserWarning")
@pytest.mark.filterwarnings("ignore:tile_model. .*(runs through tile|in spite of scope=.block.):UserWarning")
@pytest.mark.filterwarnings(
    "ignore:.* is deprecated and will be removed in v6:FutureWarning"
)  # of transformers, in peft too
@pytest.mark.deep_but(160)
@pytest.mark.parametrize(("do", "form", "refused", "raises"), HABITS)
def test_habit(do: Habit, form: str, refused: str, raises: bool) -> None:
    expected, found = reference(do, MODELS[form]), outcome(do, MODELS[form](form))
    if refused:
        assert not isinstance(expected, Exception), expected
        with pytest.raises((UnsupportedError, RuntimeError), match=refused):
            raise found if isinstance(found, Exception) else AssertionError("it is not refused")
        return
    if raises:
        assert isinstance(expected, Exception), "the untiled model raised nothing"
        assert isinstance(found, Exception), f"the untiled model raised {expected!r}"
        return
    for each in (expected, found):
        if isinstance(each, Exception):
            raise each
    assert found.keys() == expected.keys()
    assert any(isinstance(a, Tensor) and a.count_nonzero() for a in expected.values()), "nothing is compared"
    for name, a in expected.items():
        assert_same(found[name], a, name)


def assert_same(found: Any, expected: Any, name: str) -> None:
    if not isinstance(expected, Tensor):
        assert found == expected, name
        return
    assert found.dtype == expected.dtype, name
    if "gradient" in name:
        assert expected.count_nonzero(), f"{name} is zero"
    if expected.is_floating_point():
        allowed = between(str(expected.dtype).removeprefix("torch."))
        assert_within(found.double().numpy(), expected.double().numpy(), allowed, name)
    else:
        np.testing.assert_array_equal(found.numpy(), expected.numpy(), name)


def test_the_models_are_tiled() -> None:
    """And the untiled ones are not."""
    head = {"lm_head": "tiled_linear_cross_entropy"}
    mlps, layers = (
        {f"model.layers.{i}{part}": path for i in range(2)}
        for part, path in ((".mlp", "tiled_mlp"), ("", "tiled_block"))
    )
    assert tiling_paths(llama("mlp")) == mlps | head
    assert tiling_paths(llama("block")).items() >= (layers | head).items()
    assert tiling_paths(llama("plain")) == {}


# What habits have in common.


def forward_of(model: Any, ids: Tensor = IDS, **more: Any) -> Tensor:
    """The loss of any of the models."""
    if isinstance(model, Net):
        return model(X.to(next(model.parameters()).dtype), ids)
    return model(input_ids=ids, labels=more.pop("labels", ids), **more).loss


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def of_step(model: Any, ids: Tensor = IDS, **more: Any) -> dict[str, Any]:
    """The loss and all gradients of a step."""
    model.zero_grad()
    loss = forward_of(model, ids, **more)
    loss.backward()
    return {"loss": loss.detach(), "gradients": gradients_of(model)}


def trained(model: Any, optimizer: Any, between_steps: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """The losses and parameters of two steps, some of which have moved."""
    before, losses = {name: p.detach().clone() for name, p in model.named_parameters()}, []
    for ids in (IDS, OTHER_IDS):
        optimizer.zero_grad()
        loss = forward_of(model, ids)
        loss.backward()
        between_steps()
        optimizer.step()
        losses.append(loss)
    after = dict(model.named_parameters())
    moved = {name: not torch.equal(p, before[name]) for name, p in after.items()}
    assert any(moved.values())
    return {"losses": losses, "parameters": after, "moved": moved}


# Optimizers.


@habit("module", "mlp", "block")
def trains_with_adamw(model: Any) -> Any:
    return trained(model, torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1))


@habit("module", "mlp", "block")
def trains_with_momentum_and_clipping(model: Any) -> Any:
    norms: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    found = trained(model, optimizer, lambda: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    return found | {"norms": norms}


@habit("mlp", "block", deep=True)
def trains_with_a_fused_optimizer(model: Any) -> Any:
    return trained(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True))


@habit("mlp", "block", deep=True)
def trains_with_a_foreach_optimizer(model: Any) -> Any:
    return trained(model, torch.optim.Adam(model.parameters(), 1e-2, foreach=True))


@habit("mlp", deep=True)
def trains_with_adafactor(model: Any) -> Any:
    return trained(model, torch.optim.Adafactor(model.parameters(), 1e-2))


@habit("mlp", "block", deep=True)
def trains_with_lbfgs(model: Any) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = forward_of(model)
        loss.backward()
        return loss

    return {"loss": optimizer.step(closure), "parameters": dict(model.named_parameters())}


@habit("mlp", "block", deep=True)
def decays_matrices_alone_on_a_schedule(model: Any) -> Any:
    groups = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1]}], 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4)
    losses = []
    for ids in (IDS, OTHER_IDS, IDS):
        losses.append(of_step(model, ids)["loss"])
        optimizer.step()
        schedule.step()
    return {"losses": losses, "parameters": dict(model.named_parameters()), "rate": schedule.get_last_lr()}


@habit("mlp", "block", deep=True)
def keeps_a_moving_average(model: Any) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for ids in (IDS, OTHER_IDS):
        of_step(model, ids)
        optimizer.step()
        averaged.update_parameters(model)
    return {"loss": averaged(input_ids=IDS, labels=IDS).loss, "average": dict(averaged.module.named_parameters())}


@habit("module", "mlp", "block")
def adds_up_gradients(model: Any) -> Any:
    for ids in (IDS, OTHER_IDS, IDS):
        (forward_of(model, ids) / 3).backward()
    return {"gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def adds_up_gradients_of_all_tokens(model: Any) -> Any:
    """As the Trainer does: sums of losses over the number of labels of all micro-batches."""
    for row in range(2):
        forward_of(
            model, IDS[row : row + 1], labels=LABELS[row : row + 1], num_items_in_batch=torch.tensor(15)
        ).backward()
    return {"gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def steps_in_backward(model: Any) -> Any:
    """An optimizer of each parameter that steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for ids in (IDS, OTHER_IDS):
        losses.append(forward_of(model, ids))
        losses[-1].backward()
    return {"losses": losses, "parameters": dict(model.named_parameters()), "kept": len(gradients_of(model))}


@habit("mlp", "block", deep=True)
def keeps_gradients_that_are_zeroed(model: Any) -> Any:
    of_step(model)
    model.zero_grad(set_to_none=False)
    kept = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    forward_of(model, OTHER_IDS).backward()
    same = {name: p.grad.data_ptr() == kept[name] for name, p in model.named_parameters()}
    return {"gradients": gradients_of(model), "same": same}


# Freezing.


@habit("module", "mlp", "block")
def freezes_the_mlps(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    return of_step(model)


@habit("module", "mlp", "block")
def trains_the_mlps_alone(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    return of_step(model)


@habit("module", "mlp", "block")
def trains_the_norms_alone(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return of_step(model)


@habit("module", "mlp", "block")
def trains_the_head_alone(model: Any) -> Any:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return of_step(model)


@habit("mlp", "block")
def trains_one_projection_of_one_layer(model: Any) -> Any:
    model.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    return of_step(model)


@habit("mlp", "block", deep=True)
def freezes_and_thaws(model: Any) -> Any:
    first = of_step(model)
    model.model.layers[0].requires_grad_(False)
    frozen = of_step(model)
    model.model.layers[0].requires_grad_(True)
    return [first, frozen, of_step(model, OTHER_IDS)]


@habit("module", "mlp", "block")
def optimizes_a_part(model: Any) -> Any:
    part = [p for name, p in model.named_parameters() if "mlp" in name]
    return trained(model, torch.optim.SGD(part, 0.3))


@habit("mlp", "block")
def embeds_without_gradients(model: Any) -> Any:
    with torch.no_grad():
        embeds = model.get_input_embeddings()(IDS)
    loss = model(inputs_embeds=embeds, labels=IDS).loss
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block")
def detaches_between_layers(model: Any) -> Any:
    model.model.layers[0].register_forward_hook(lambda _, args, y: y.detach())
    return of_step(model)


# Adapters. The second factor of each is drawn: at zero it has no effect.


class LoRA(nn.Module):
    """An adapter around a layer, as many libraries write theirs."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(base.out_features)
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, 2, generator=generator))
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + F.linear(F.linear(x, self.a), self.b) if self.on else y


def adapted(model: Any, *names: str) -> Any:
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        if path.rpartition(".")[2] in names:
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], LoRA(layer))
    return model


PROJECTIONS = {
    "query_and_value": ("q_proj", "v_proj"),
    "gate_and_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "the_head": ("lm_head",),
    "all_linear_layers": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
}


def adapts(names: tuple[str, ...]) -> Habit:
    def do(model: Any) -> Any:
        adapted(model, *names)
        first = of_step(model)
        for layer in model.modules():
            if isinstance(layer, LoRA):
                layer.on = False
        return [first, forward_of(model)]

    return do


for _of, _names in PROJECTIONS.items():
    _do = adapts(_names)
    _do.__name__ = f"adapts_{_of}"
    habit("mlp", "block")(_do)


def of_peft(model: Any, **options: Any) -> Any:
    """The model of peft, whose second factors are drawn."""
    import peft  # pyright: ignore[reportMissingImports]

    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


PEFT: dict[str, dict[str, Any]] = {
    "lora_of_attention": {"target_modules": ["q_proj", "v_proj"]},
    "lora_of_all_linear_layers": {"target_modules": "all-linear"},
    "lora_of_the_head": {"target_modules": ["lm_head", "down_proj"]},
    "dora": {"target_modules": ["q_proj", "gate_proj", "down_proj"], "use_dora": True},
    "rank_stable_lora": {"target_modules": ["up_proj"], "use_rslora": True},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "one_layer": {"target_modules": ["gate_proj"], "layers_to_transform": [1]},
}


def has_peft(options: dict[str, Any]) -> Habit:
    def do(model: Any) -> Any:
        made = of_peft(model, **options)
        first = of_step(made)
        with made.disable_adapter():
            without = forward_of(made)
        return {"first": first, "without": without, "merged": of_step_of(made.merge_and_unload())}

    return do


def of_step_of(model: Any) -> Any:
    """Loss and logits, whatever requires gradients."""
    outputs = model(input_ids=IDS, labels=IDS)
    return {"loss": outputs.loss, "logits": outputs.logits}


for _of, _options in PEFT.items():
    _do = has_peft(_options)
    _do.__name__ = f"trains_{_of}"
    habit("mlp", "block", deep=True, peft=True)(_do)


@habit("mlp", "block", peft=True, deep=True)
def has_two_adapters_of_peft(model: Any) -> Any:
    import peft  # pyright: ignore[reportMissingImports]

    made = of_peft(model, target_modules=["q_proj", "up_proj"])
    made.add_adapter("other", peft.LoraConfig(r=1, target_modules=["down_proj"], init_lora_weights=False))
    found = []
    for name in ("default", "other"):
        made.set_adapter(name)
        found.append(of_step(made))
    return found


# Calls and outputs.


@habit("mlp", "block")
def reads_logits(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS)
    return {"loss": outputs.loss, "logits": outputs.logits, "best": outputs.logits.argmax(-1), "names": list(outputs)}


@habit("mlp", "block", refused="Read the logits before that: an optimizer's step")
def copies_logits_and_reads_them_after_a_step(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS)
    kept = outputs.logits.detach().clone()
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), 0.3).step()
    return {"logits": torch.from_numpy(kept.numpy())}


@habit("mlp", "block")
def adds_a_loss_of_logits(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS)
    loss = outputs.loss + 0.1 * outputs.logits.float().logsumexp(-1).square().mean()
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block")
def computes_its_own_loss(model: Any) -> Any:
    logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, IDS[:, 1:].flatten(), label_smoothing=0.1)
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def learns_from_a_teacher(model: Any) -> Any:
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
        target = teacher(input_ids=IDS).logits
    outputs = model(input_ids=IDS, labels=IDS)
    loss = (
        F.kl_div(outputs.logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean")
        + outputs.loss
    )
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def prefers_one_answer(model: Any) -> Any:
    """As DPO does: log probabilities of sequences, against those of a frozen copy."""

    def log_probs(model: Any, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).sum((1, 2))

    frozen = copy.deepcopy(model)
    with torch.no_grad():
        noisy(frozen)
        old = [log_probs(frozen, ids) for ids in (IDS, OTHER_IDS)]
    new = [log_probs(model, ids) for ids in (IDS, OTHER_IDS)]
    loss = -F.logsigmoid((new[0] - old[0]) - (new[1] - old[1])).mean()
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block")
def asks_for_tuples(model: Any) -> Any:
    found = model(input_ids=IDS, labels=IDS, return_dict=False)
    return {"loss": found[0], "logits": found[1], "length": len(found), "type": type(found).__name__}


@habit("mlp", "block")
def asks_for_hidden_states(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS, output_hidden_states=True)
    loss = outputs.loss + outputs.hidden_states[1].square().mean()
    loss.backward()
    return {"hidden": outputs.hidden_states, "loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def asks_for_attention(model: Any) -> Any:
    model.set_attn_implementation("eager")
    outputs = model(input_ids=IDS, labels=IDS, output_attentions=True)
    outputs.loss.backward()
    return {"attention": outputs.attentions, "loss": outputs.loss, "gradients": gradients_of(model)}


@habit("mlp", "block")
def keeps_a_few_logits(model: Any) -> Any:
    outputs = model(input_ids=IDS, logits_to_keep=3)
    outputs.logits.square().mean().backward()
    return {"logits": outputs.logits, "gradients": gradients_of(model)}


@habit("mlp", "block")
def unpacks_outputs(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS, use_cache=False)
    copied = {**outputs}
    return {
        "keys": list(copied),
        "tuple": outputs.to_tuple(),
        "item": outputs["logits"],
        "slice": outputs[:2],
        **copied,
    }


@habit("mlp", "block", deep=True)
def pickles_outputs(model: Any) -> Any:
    with torch.no_grad():
        outputs = model(input_ids=IDS, labels=IDS, use_cache=False)
    read = pickle.loads(pickle.dumps(outputs))
    return {"loss": read.loss, "logits": read.logits, "type": type(read).__name__}


@habit("mlp", "block", deep=True)
def goes_on_from_a_cache(model: Any) -> Any:
    model.eval()
    with torch.no_grad():
        first = model(input_ids=IDS[:, :6], use_cache=True)
        second = model(input_ids=IDS[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        whole = model(input_ids=IDS, use_cache=False)
    return {"first": first.logits, "second": second.logits, "whole": whole.logits}


@habit("mlp", "block", deep=True)
def generates_between_steps(model: Any) -> Any:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.3), []
    for ids in (IDS, OTHER_IDS):
        found.append(of_step(model, ids)["loss"])
        optimizer.step()
        model.eval()
        found.append(model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False))
        model.train()
    return [*found, of_step(model)]


@habit("mlp", "block", deep=True)
def samples_with_a_seed(model: Any) -> Any:
    model.eval()
    torch.manual_seed(2)
    options = {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(IDS[:, :3], max_new_tokens=4, do_sample=True, top_k=0, **options)
    return {"sequences": found.sequences, "scores": found.scores}


@habit("mlp", "block", deep=True)
def generates_with_beams(model: Any) -> Any:
    model.eval()
    return {"ids": model.generate(IDS[:, :3], max_new_tokens=4, num_beams=2), "loss": forward_of(model)}


@habit("mlp", "block", deep=True)
def evaluates_between_steps(model: Any) -> Any:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.3), []
    for ids, mode in ((IDS, torch.no_grad), (OTHER_IDS, torch.inference_mode)):
        model.train()
        found.append(of_step(model, ids)["loss"])
        optimizer.step()
        model.eval()
        with mode():
            outputs = model(input_ids=IDS, labels=IDS)
            found += [outputs.loss.clone(), torch.from_numpy(outputs.logits.numpy().copy())]
    return [*found, of_step(model)]


# Backward.


@habit("module", "mlp", "block")
def goes_on_after_an_error(model: Any) -> Any:
    for wrong in (IDS + VOCAB, IDS.float()):
        try:
            forward_of(model, wrong).backward()
        except Exception:
            continue
        raise AssertionError("no error")
    return of_step(model)


@habit("module", "mlp", "block")
def goes_on_after_an_error_in_backward(model: Any) -> Any:
    def fail(_: Tensor) -> None:
        raise KeyError("a hook of the user's")

    handle = next(p for name, p in model.named_parameters() if "up" in name).register_hook(fail)
    with contextlib.suppress(KeyError):
        forward_of(model).backward()
    handle.remove()
    return of_step(model)


@habit("module", "mlp", "block")
def calls_forward_between_forward_and_backward(model: Any) -> Any:
    loss = forward_of(model)
    with torch.no_grad():
        other = forward_of(model, OTHER_IDS)
    loss.backward()
    return {"loss": loss, "other": other, "gradients": gradients_of(model)}


@habit("module", "mlp", "block")
def calls_forward_twice_and_backward_in_either_order(model: Any) -> Any:
    first, second = forward_of(model), forward_of(model, OTHER_IDS)
    first.backward()
    one = {name: g.clone() for name, g in gradients_of(model).items()}
    second.backward()
    return {"gradients": gradients_of(model), "gradients of the first": one}


@habit("module", "mlp", "block")
def goes_backward_twice(model: Any) -> Any:
    loss = forward_of(model)
    loss.backward(retain_graph=True)
    once = {name: g.clone() for name, g in gradients_of(model).items()}
    loss.backward()
    return {"gradients": gradients_of(model), "gradients once": once}


@habit("module", "mlp", "block", raises=True)
def goes_backward_twice_without_keeping_the_graph(model: Any) -> Any:
    loss = forward_of(model)
    loss.backward()
    loss.backward()
    return {"gradients": gradients_of(model)}


@habit("module", "mlp", "block")
def asks_for_gradients_without_accumulating(model: Any) -> Any:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(forward_of(model), list(named.values()))
    return {"gradients": dict(zip(named, found, strict=True)), "kept": len(gradients_of(model))}


@habit("module", "mlp", "block")
def asks_for_gradients_of_a_few(model: Any) -> Any:
    named = {name: p for name, p in model.named_parameters() if "up" in name or "norm" in name}
    return {"gradients": torch.autograd.grad(forward_of(model), list(named.values()))}


@habit("module", "mlp", "block", refused="second|twice|once_differentiable")
def penalizes_gradients(model: Any) -> Any:
    if not isinstance(model, Net):
        model.set_attn_implementation("eager")
    found = torch.autograd.grad(forward_of(model), list(model.parameters()), create_graph=True)
    torch.stack([g.square().sum() for g in found]).sum().backward()
    return {"gradients": gradients_of(model)}


@habit("module", "mlp", "block", raises=True)
def changes_weights_between_forward_and_backward(model: Any) -> Any:
    loss = forward_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    loss.backward()
    return {"gradients": gradients_of(model)}


@habit("mlp", "block")
def takes_gradients_of_inputs(model: Any) -> Any:
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, labels=IDS).loss
    loss.backward()
    return {"loss": loss, "gradient of inputs": embeds.grad, "gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def attacks_its_inputs(model: Any) -> Any:
    """Adversarial training: a step up the gradient of the embeddings, then one of the weights."""
    embeds = model.get_input_embeddings()(IDS)
    (up,) = torch.autograd.grad(model(inputs_embeds=embeds, labels=IDS).loss, embeds, retain_graph=True)
    loss = model(inputs_embeds=embeds + 0.1 * up / up.norm(), labels=IDS).loss
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("module", "mlp", "block")
def looks_for_anomalies(model: Any) -> Any:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        return of_step(model)


@habit("module", "mlp", "block")
def keeps_saved_tensors_elsewhere(model: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return of_step(model)


@habit("module", "mlp", "block")
def packs_saved_tensors(model: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a.numpy(force=True).copy(), torch.from_numpy):
        return of_step(model)


@habit("mlp", "block", deep=True)
def checkpoints_layers(model: Any) -> Any:
    found = []
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        found.append(of_step(model))
    model.gradient_checkpointing_disable()
    return [*found, of_step(model)]


@habit("module", "mlp", "block")
def checkpoints_the_whole_model(model: Any) -> Any:
    loss = checkpoint(lambda ids: forward_of(model, ids), IDS, use_reentrant=False)
    assert isinstance(loss, Tensor)
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block")
def wraps_layers_in_checkpoints(model: Any) -> Any:
    """As `apply_activation_checkpointing` does."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    return of_step(model, use_cache=False)


@habit("module", "mlp", "block")
def checkpoints_with_reentrant_backward(model: Any) -> Any:
    for name, part in list(model.named_modules()):
        if name.endswith("mlp"):
            part.forward = lambda x, forward=part.forward: checkpoint(forward, x, use_reentrant=True)
    return of_step(model)


@habit("module", "mlp", "block")
def checkpoints_the_mlps(model: Any) -> Any:
    for name, part in list(model.named_modules()):
        if name.endswith("mlp"):
            part.forward = lambda x, forward=part.forward: checkpoint(forward, x, use_reentrant=False)
    return of_step(model)


# Copies and state.


@habit("module", "mlp", "block")
def copies(model: Any) -> Any:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return of_step(twin)


@habit("module", "mlp", "block")
def copies_after_a_step(model: Any) -> Any:
    of_step(model)
    twin = copy.deepcopy(model)
    return {"gradients of the copy": gradients_of(twin)} | of_step(twin)


@habit("module", "mlp", "block")
def saves_the_whole_model(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return of_step(torch.load(file, weights_only=False))


@habit("module", "mlp", "block")
def pickles(model: Any) -> Any:
    return of_step(pickle.loads(pickle.dumps(model)))


@habit("module", "mlp", "block")
def saves_its_state(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    read = torch.load(file)
    return {"keys": list(read), "report": str(model.load_state_dict(read)), **of_step(model)}


@habit("module", "mlp", "block", deep=True)
def loads_state_by_assignment(model: Any) -> Any:
    first = of_step(model)
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return [first, of_step(model)]


@habit("module", "mlp", "block")
def is_told_of_missing_keys(model: Any) -> Any:
    state = {name: value for name, value in model.state_dict().items() if "up_proj" not in name} | {"more": X}
    found = model.load_state_dict(state, strict=False)
    return {"missing": sorted(found.missing_keys), "unexpected": found.unexpected_keys, "loss": forward_of(model)}


@habit("mlp", "block", deep=True)
def saves_and_loads_a_folder(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        names = sorted(path.name for path in Path(folder).iterdir())
        read = transformers.LlamaForCausalLM.from_pretrained(folder)
    return {"names": names, **of_step(read)}


@habit("mlp", "block", deep=True)
def goes_on_from_a_saved_optimizer(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    of_step(model)
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    twin = copy.deepcopy(model)
    again = torch.optim.AdamW(twin.parameters(), 1e-2)
    twin.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    of_step(twin, OTHER_IDS)
    again.step()
    return {"parameters": dict(twin.named_parameters())}


@habit("module", "mlp", "block")
def loads_a_flat_vector(model: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(0.5 * vector, model.parameters())
    return of_step(model)


@habit("module", "mlp", "block")
def lists_what_it_has(model: Any) -> Any:
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "loss": forward_of(model),
    }


@habit("module", "mlp", "block")
def goes_through_the_meta_device(model: Any) -> Any:
    state = {name: a.clone() for name, a in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    if not isinstance(model, Net):  # its buffers are no part of the state
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return of_step(model)


@habit("module", "mlp", "block")
def is_shared_between_processes(model: Any) -> Any:
    model.share_memory()
    return of_step(model)


# Changes of weights and parts.


@habit("mlp", "block")
def changes_weights_in_place(model: Any) -> Any:
    first = of_step(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model.model.layers[1].self_attn.q_proj.weight[0].fill_(0.3)
        model.lm_head.weight.data.add_(0.1)
        model.model.norm.weight.clamp_(0.5, 1.0)
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def assigns_new_parameters(model: Any) -> Any:
    first = of_step(model)
    layer = model.model.layers[0]
    for part in (layer.mlp.down_proj, layer.self_attn.o_proj, layer.input_layernorm, model.lm_head, model.model.norm):
        part.weight = nn.Parameter(part.weight.detach().flip(0))
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def points_data_elsewhere(model: Any) -> Any:
    first = of_step(model)
    for parameter in model.parameters():
        parameter.data = 0.5 * parameter.data
    return [first, of_step(model)]


@habit("mlp", "block")
def ties_the_head_by_assignment(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    return of_step(model)


@habit("mlp", "block")
def shares_one_weight_between_gate_and_up(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight = layer.mlp.up_proj.weight
    return of_step(model)


@habit("mlp", "block")
def shares_one_mlp_between_layers(model: Any) -> Any:
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return of_step(model)


@habit("mlp", "block", deep=True)
def runs_one_layer_twice(model: Any) -> Any:
    model.model.layers = nn.ModuleList([model.model.layers[0], model.model.layers[0]])
    return of_step(model, use_cache=False)


@habit("mlp", "block")
def takes_layers_out(model: Any) -> Any:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return of_step(model)


@habit("mlp", "block", deep=True)
def makes_the_vocabulary_larger(model: Any) -> Any:
    first = of_step(model)
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[VOCAB:] = 0.1
    ids = IDS.clone()
    ids[0, 4] = VOCAB + 3
    return [first, of_step(model, ids), model.config.vocab_size]


class Doubled(nn.Linear):
    def forward(self, *args: Any) -> Tensor:
        return 2 * super().forward(*args)


@habit("mlp", "block")
def replaces_projections_by_a_subclass(model: Any) -> Any:
    for layer in (model.model.layers[0].mlp, model.model.layers[1].self_attn):
        layer._modules["down_proj" if "down_proj" in layer._modules else "v_proj"].__class__ = Doubled
    return of_step(model)


@habit("mlp", "block")
def replaces_the_head_by_a_subclass(model: Any) -> Any:
    model.lm_head.__class__ = Doubled
    return of_step(model)


@habit("mlp", "block")
def gives_the_head_a_bias(model: Any) -> Any:
    weight = model.lm_head.weight
    model.set_output_embeddings(noisy(nn.Linear(H, VOCAB)))
    model.lm_head.weight = weight
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.arange(VOCAB) / VOCAB)
    return of_step(model)


@habit("mlp", "block", deep=True)
def puts_dropout_and_a_layer_before_the_head(model: Any) -> Any:
    torch.manual_seed(1)
    model.lm_head = nn.Sequential(nn.Linear(H, H), nn.Tanh(), model.lm_head)
    return of_step(model)


@habit("mlp", "block", deep=True)
def changes_the_activation(model: Any) -> Any:
    first = of_step(model)
    model.model.layers[0].mlp.act_fn = nn.GELU()
    model.model.layers[1].mlp.act_fn = nn.Tanh()
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def changes_an_epsilon(model: Any) -> Any:
    first = of_step(model)
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5
    model.model.norm.variance_epsilon = 0.1
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def replaces_norms(model: Any) -> Any:
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.LayerNorm(H)
    return of_step(model)


@habit("mlp", "block")
def replaces_an_mlp(model: Any) -> Any:
    model.model.layers[0].mlp = noisy(nn.Sequential(nn.Linear(H, 5), nn.ReLU(), nn.Linear(5, H)).requires_grad_())
    return of_step(model)


@habit("mlp", "block")
def puts_a_layer_out_of_action(model: Any) -> Any:
    model.model.layers[0].mlp.down_proj = nn.Identity()
    model.model.layers[0].mlp.gate_proj = model.model.layers[0].mlp.up_proj = nn.Identity()
    return of_step(model)


@habit("mlp", "block")
def patches_the_forward_of_an_mlp(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(lambda self, x: self.down_proj(torch.tanh(self.up_proj(x))), layer.mlp)
        layer.mlp.gate_proj.requires_grad_(False)
    return of_step(model)


@habit("mlp", "block", deep=True)
def patches_the_forward_of_a_projection(model: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tanh())

    for layer in (model.model.layers[0].mlp.up_proj, model.model.layers[1].self_attn.q_proj, model.lm_head):
        layer.forward = MethodType(forward, layer)
    return of_step(model)


@habit("mlp", "block")
def patches_the_forward_of_a_layer(model: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = lambda x, *args, before=layer.forward, **options: 0.5 * before(x, *args, **options)
    return of_step(model)


@habit("mlp", "block")
def patches_the_forward_of_attention(model: Any) -> Any:
    attention = model.model.layers[0].self_attn

    def forward(*args: Any, before: Any = attention.forward, **options: Any) -> Any:
        y, *more = before(*args, **options)
        return (2 * y, *more)

    attention.forward = forward
    return of_step(model)


@habit("mlp", "block")
def has_a_loss_function_of_its_own(model: Any) -> Any:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)

    model.loss_function = loss
    return of_step(model)


@habit("mlp", "block")
def scales_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.5
    return of_step(model)


@habit("mlp", "block", deep=True)
def normalizes_weights(model: Any) -> Any:
    for name, layer in list(model.named_modules()):
        if name.endswith(("up_proj", "q_proj")):
            nn.utils.parametrizations.weight_norm(layer)
    return of_step(model)


@habit("mlp", "block", deep=True)
def parametrizes_weights(model: Any) -> Any:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.tanh()

    for name, layer in list(model.named_modules()):
        if name.endswith(("gate_proj", "down_proj", "o_proj")) or (name == "lm_head"):
            parametrize.register_parametrization(layer, "weight", Symmetric())
    return of_step(model)


@habit("mlp", "block", deep=True)
def prunes(model: Any) -> Any:
    for name, layer in list(model.named_modules()):
        if name.endswith(("up_proj", "v_proj")) or name == "lm_head":
            prune.l1_unstructured(layer, "weight", 0.5)
    return of_step(model)


@habit("mlp", "block", deep=True)
def prunes_for_good(model: Any) -> Any:
    for name, layer in list(model.named_modules()):
        if name.endswith(("up_proj", "v_proj")):
            prune.random_structured(layer, "weight", 0.3, dim=0)
            prune.remove(layer, "weight")
    return of_step(model)


@habit("module", "mlp", "block")
def calls_with_other_parameters(model: Any) -> Any:
    others = {name: (1.5 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    arguments: Any = (X, LABELS) if isinstance(model, Net) else ()
    options: Any = {} if isinstance(model, Net) else {"input_ids": IDS, "labels": IDS}
    found: Any = torch.func.functional_call(model, others, arguments, options)
    loss = found if isinstance(found, Tensor) else found.loss
    loss.backward()
    return {"loss": loss, "gradients": {name: p.grad for name, p in others.items()}, "own": len(gradients_of(model))}


@habit("module", "mlp", "block", refused="torch.func|setup_context|vmap")
def differentiates_with_torch_func(model: Any) -> Any:
    params = {name: p.detach() for name, p in model.named_parameters()}
    options: Any = {} if isinstance(model, Net) else {"input_ids": IDS, "labels": IDS, "use_cache": False}
    arguments: Any = (X, LABELS) if isinstance(model, Net) else ()

    def loss(params: Any) -> Any:
        found: Any = torch.func.functional_call(model, params, arguments, options)
        return found if isinstance(found, Tensor) else found.loss

    return {"gradients": torch.func.grad(loss)(params)}


# Hooks.


@habit("module", "mlp", "block")
def listens_to_the_mlps(model: Any) -> Any:
    heard: list[Any] = []
    for name, part in model.named_modules():
        if name.endswith("mlp"):
            part.register_forward_hook(lambda _, args, y: heard.append(y.detach().clone()))
    return {"step": of_step(model), "heard": heard}


@habit("mlp", "block")
def changes_results_of_projections(model: Any) -> Any:
    for name, part in model.named_modules():
        if name.endswith(("gate_proj", "down_proj", "q_proj")):
            part.register_forward_hook(lambda _, args, y: y.tanh())
    return of_step(model)


@habit("mlp", "block")
def listens_to_attention(model: Any) -> Any:
    heard: list[Any] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, args, y: heard.append(y[0].detach().clone()))
        layer.self_attn.v_proj.register_forward_hook(lambda _, args, y: heard.append(y.detach().clone()))
    return {"step": of_step(model), "heard": heard[:4]}  # a layer of "block" whose parts have hooks is recomputed


@habit("module", "mlp", "block")
def changes_the_input_of_the_mlps(model: Any) -> Any:
    for name, part in model.named_modules():
        if name.endswith("mlp"):
            part.register_forward_pre_hook(lambda _, args: (1.5 * args[0],))
    return of_step(model)


@habit("module", "mlp", "block")
def changes_the_output_of_the_mlps(model: Any) -> Any:
    for name, part in model.named_modules():
        if name.endswith("mlp"):
            part.register_forward_hook(lambda _, args, y: y.clamp(-0.2, 0.2))
    return of_step(model)


@habit("mlp", "block")
def steers_layers(model: Any) -> Any:
    model.model.layers[0].register_forward_hook(lambda _, args, y: y + 0.5)
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 1.1, *args[1:]))
    return of_step(model)


@habit("mlp", "block")
def steers_attention_and_norms(model: Any) -> Any:
    layer = model.model.layers[0]
    layer.self_attn.register_forward_hook(lambda _, args, y: (1.5 * y[0], *y[1:]))
    layer.post_attention_layernorm.register_forward_hook(lambda _, args, y: y + 0.1)
    model.model.norm.register_forward_hook(lambda _, args, y: 1.2 * y)
    return of_step(model)


@habit("mlp", "block", deep=True)
def changes_logits_by_a_hook(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda _, args, y: y / 2)
    outputs = model(input_ids=IDS, labels=IDS)
    outputs.loss.backward()
    return {"loss": outputs.loss, "logits": outputs.logits, "gradients": gradients_of(model)}


@habit("mlp", "block")
def changes_the_input_of_the_head(model: Any) -> Any:
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    return of_step(model)


@habit("module", "mlp", "block")
def listens_to_gradients_of_modules(model: Any) -> Any:
    heard: dict[str, Any] = {}
    for name, part in model.named_modules():
        if name.endswith("mlp"):
            part.register_full_backward_hook(lambda _, dx, dy, name=name: heard.update({name: [*dx, *dy]}))
    return {"step": of_step(model, OTHER_IDS), "gradients heard": heard}


@habit("mlp", "block")
def changes_gradients_of_layers(model: Any) -> Any:
    model.model.layers[1].register_full_backward_pre_hook(lambda _, dy: (2 * dy[0],))
    model.model.layers[0].mlp.register_full_backward_hook(lambda _, dx, dy: (0.5 * dx[0],))
    return of_step(model)


@habit("module", "mlp", "block")
def changes_gradients_of_weights(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: grad.clamp(-1e-3, 1e-3) if "mlp" in name else 2 * grad)
    return of_step(model)


@habit("mlp", "block")
def listens_everywhere(model: Any) -> Any:
    heard: list[Any] = []

    def listen(part: nn.Module, args: Any, y: Any) -> None:
        if type(part).__name__.endswith(("LlamaMLP", "LlamaDecoderLayer")):
            heard.append(y.detach().clone())

    handle = nn.modules.module.register_module_forward_hook(listen)
    try:
        step = of_step(model)
    finally:
        handle.remove()
    return {"step": step, "heard": heard}


@habit("mlp", "block", deep=True)
def takes_hooks_off_again(model: Any) -> Any:
    handles = [part.register_forward_hook(lambda _, args, y: None) for part in model.modules()]
    first = of_step(model)
    for handle in handles:
        handle.remove()
    return [first, of_step(model)]


@habit("mlp", "block")
def keeps_gradients_of_hidden_states(model: Any) -> Any:
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: Any, y: Tensor) -> None:
        y.retain_grad()
        kept.append(y)

    for layer in model.model.layers:
        layer.register_forward_hook(keep)
    step = of_step(model)
    return {"step": step, "gradients of states": [a.grad for a in kept]}


# Batches.


@habit("mlp", "block")
def pads_on_the_right(model: Any) -> Any:
    mask = torch.ones_like(IDS)
    mask[1, 5:] = 0
    return of_step(model, labels=IDS.masked_fill(mask == 0, -100), attention_mask=mask)


@habit("mlp", "block")
def pads_on_the_left(model: Any) -> Any:
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(0)
    return of_step(model, labels=IDS.masked_fill(mask == 0, -100), attention_mask=mask, position_ids=places)


@habit("mlp", "block")
def gives_a_mask_of_pairs(model: Any) -> Any:
    mask = torch.ones(9, 9).tril().bool()
    mask[5:, :2] = False
    return of_step(model, attention_mask=mask[None, None].expand(2, 1, 9, 9))


@habit("mlp", "block")
def packs_documents(model: Any) -> Any:
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    labels = IDS.masked_fill(places == 0, -100)
    return of_step(model, labels=labels, position_ids=places, use_cache=False)


IN_A_CACHE = (
    "documents are kept apart where transformers does not: its cache, on by default, tells it that they are not packed"
)


@habit("mlp", "block", faults={"mlp": IN_A_CACHE, "block": IN_A_CACHE})
def packs_documents_and_leaves_the_cache_on(model: Any) -> Any:
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    return of_step(model, labels=IDS.masked_fill(places == 0, -100), position_ids=places)


@habit("mlp", "block")
def gives_positions(model: Any) -> Any:
    return of_step(model, position_ids=torch.arange(9)[None] + 5)


@habit("mlp", "block")
def ignores_all_of_a_row(model: Any) -> Any:
    labels = LABELS.clone()
    labels[1] = -100
    return of_step(model, labels=labels)


@habit("mlp", "block")
def shifts_labels_itself(model: Any) -> Any:
    shifted = F.pad(LABELS[:, 1:], (0, 1), value=-100)
    return of_step(model, labels=LABELS, shift_labels=shifted)


@habit("module", "mlp", "block")
def has_a_last_small_batch(model: Any) -> Any:
    if isinstance(model, Net):
        return [model(X), model(X[:1, :5], LABELS[:1, :5]), model(X[0, :1], LABELS[0, :1])]
    return [of_step(model), of_step(model, IDS[:1, :5]), of_step(model, IDS[:, :4])]


@habit("mlp", "block")
def has_batches_of_one_token(model: Any) -> Any:
    model.eval()
    return {"logits": model(input_ids=IDS[:1, :1]).logits}


@habit("mlp", "block", deep=True)
def gives_narrow_and_strided_tokens(model: Any) -> Any:
    strided = torch.stack([IDS, OTHER_IDS], -1)[..., 0]
    return [of_step(model, strided), forward_of(model, IDS.int(), labels=IDS)]


@habit("mlp", "block")
def repeats_a_row_without_a_copy(model: Any) -> Any:
    return of_step(model, IDS[:1].expand(3, -1))


@habit("mlp", "block")
def gives_embeddings_and_a_prefix(model: Any) -> Any:
    """As prompt tuning does."""
    prefix = nn.Parameter(torch.full((1, 2, H), 0.2))
    embeds = torch.cat([prefix.expand(2, -1, -1), model.get_input_embeddings()(IDS)], 1)
    loss = model(inputs_embeds=embeds, labels=F.pad(IDS, (2, 0), value=-100)).loss
    loss.backward()
    return {"loss": loss, "gradient of the prefix": prefix.grad, "gradients": gradients_of(model)}


# Precision.


@habit("module", "mlp", "block")
def computes_in_float64(model: Any) -> Any:
    model.to(torch.float64)
    if isinstance(model, Net):
        return of_step(model)
    logits = model(input_ids=IDS).logits  # transformers' loss is of float32
    logits.square().mean().backward()
    return {"logits": logits, "gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def goes_to_bfloat16_and_back(model: Any) -> Any:
    """Weights that bfloat16 holds."""
    model.bfloat16()
    half = {"loss": forward_of(model).dtype, "parameters": [p.dtype for p in model.parameters()]}
    return [half, of_step(model.float())]


@habit("module", "mlp", "block")
def computes_in_bfloat16(model: Any) -> Any:
    return {"loss": forward_of(model.bfloat16()).bfloat16()}


@habit("mlp", "block", deep=True)
def evaluates_in_float16(model: Any) -> Any:
    with torch.no_grad():
        return {"logits": model.half().eval()(input_ids=IDS).logits.float().argmax(-1), "loss": X}


@habit("module", "mlp", "block")
def computes_under_autocast(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = forward_of(model)
    loss.backward()
    return {"loss": loss.bfloat16(), "dtypes": {name: g.dtype for name, g in gradients_of(model).items()}}


@habit("module", "mlp", "block")
def leaves_autocast_for_a_part(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        return of_step(model)


@habit("module", "mlp", "block")
def scales_its_loss(model: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for ids in (IDS, OTHER_IDS):
        optimizer.zero_grad()
        scaler.scale(forward_of(model, ids)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return {"parameters": dict(model.named_parameters()), "gradients": gradients_of(model)}


@habit("mlp", "block", raises=True)
def has_one_part_in_float64(model: Any) -> Any:
    model.model.layers[0].mlp.double()
    return of_step(model)


@habit("mlp", "block", deep=True)
def sets_a_default_dtype(model: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return of_step(model)
    finally:
        torch.set_default_dtype(torch.float32)


@habit("mlp", "block", deep=True)
def runs_on_a_default_device(model: Any) -> Any:
    with torch.device("meta"):
        return of_step(model)


@habit("module", "mlp", "block", deep=True)
def runs_in_threads(model: Any) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(lambda ids: forward_of(model, ids), [IDS, OTHER_IDS] * 2))
    for loss in losses:
        loss.backward()
    return {"losses": losses, "gradients": gradients_of(model)}


# Random numbers.


@habit("mlp", "block", deep=True)
def drops_in_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    torch.manual_seed(4)
    return of_step(model)


@habit("mlp", "block", deep=True)
def drops_behind_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda part, args, y: F.dropout(y, 0.5, part.training))
    torch.manual_seed(4)
    first = of_step(model)
    model.eval()
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def adds_noise_to_embeddings(model: Any) -> Any:
    """NEFTune."""

    def noise(part: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y + torch.zeros_like(y).uniform_(-0.1, 0.1)

    model.get_input_embeddings().register_forward_hook(noise)
    torch.manual_seed(4)
    return of_step(model)


@habit("mlp", "block", deep=True)
def has_dropout_in_an_mlp_and_evaluates(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    model.train()
    trained = forward_of(model)
    torch.manual_seed(4)
    first = torch.rand(3)
    model.eval()
    return {"finite": bool(trained.isfinite()), "eval": of_step(model), "stream": first}


@habit("mlp", "block")
def draws_the_same_after_a_step(model: Any) -> Any:
    torch.manual_seed(9)
    step = of_step(model)
    return {"step": step, "drawn": torch.rand(4)}
