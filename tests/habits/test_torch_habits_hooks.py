"""What users do to a model in PyTorch: hooks. See torch_habits.py."""

from typing import Any

import pytest
from torch import Tensor, nn

from tests.habits.torch_habits import (
    IDS,
    OTHER_IDS,
    Habit,
    check_habit,
    every_habit,
    gradients_of,
    habit,
    of_step,
)

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


@pytest.mark.deep_but(12)
@every_habit(__name__)
def test_habit(do: Habit, form: str, refused: str, raises: bool) -> None:
    check_habit(do, form, refused, raises)
