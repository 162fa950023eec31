"""What users do to a model in PyTorch: copies and state. See torch_habits.py."""

import copy
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.habits.torch_habits import (
    OTHER_IDS,
    Habit,
    Net,
    X,
    check_habit,
    every_habit,
    forward_of,
    gradients_of,
    habit,
    of_step,
    transformers,
)

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


@pytest.mark.deep_but(8)
@every_habit(__name__)
def test_habit(do: Habit, form: str, refused: str, raises: bool) -> None:
    check_habit(do, form, refused, raises)
