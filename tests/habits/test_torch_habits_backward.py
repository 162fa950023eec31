"""What users do to a model in PyTorch: ways to go backward, and precision. See torch_habits.py."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.habits.torch_habits import (
    IDS,
    OTHER_IDS,
    VOCAB,
    Habit,
    Net,
    X,
    check_habit,
    every_habit,
    forward_of,
    gradients_of,
    habit,
    of_step,
)

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


@pytest.mark.deep_but(10)
@every_habit(__name__)
def test_habit(do: Habit, form: str, refused: str, raises: bool) -> None:
    check_habit(do, form, refused, raises)
