"""What users do to a model in PyTorch: optimizers, frozen parameters and adapters. See torch_habits.py."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.torch_habits import (
    IDS,
    LABELS,
    OTHER_IDS,
    Habit,
    check_habit,
    every_habit,
    forward_of,
    gradients_of,
    habit,
    llama,
    of_step,
    trained,
)
from tiled_torch import tiling_paths

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


@pytest.mark.deep_but(5)
@every_habit(__name__)
def test_habit(do: Habit, form: str, refused: str, raises: bool) -> None:
    check_habit(do, form, refused, raises)
