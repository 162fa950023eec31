"""Steps of frozen models over simulated ranks: reads decoders, settings and what is trained, prints a line of JSON for each.

A process of its own: what simulates brings a kind of device that stays.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.simulated import simulated_step
from shared_specs.app.plan.step import Setting
from tiled_torch.commands.plan import simulate
from tiled_torch.models import tile_model
from tiled_torch.plan.sizes import decoder_of_model

RANK, TILED = 16, simulate._tiled


class LoRA(nn.Module):
    """As peft's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False, device=base.weight.device)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 2.0


class Handle:
    """Of a hook that is none."""

    def remove(self) -> None: ...


def of_trained(register: Any) -> Any:
    """PyTorch's memory tracker wants hooks of parameters without a gradient as well."""
    return lambda self, hook: register(self, hook) if self.requires_grad else Handle()


def freeze(model: Any, places: list[str]) -> None:
    """Leave adapters on the projections of these parts of a layer trained, or the norms; or all, in 16 bits."""
    if places == ["bfloat16"]:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(parameter.detach().bfloat16())
        model.tie_weights()
        return
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if places == ["norms"]:
            module.requires_grad_("norm" in name)
        elif name.rpartition(".")[2] in places:
            for projection, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(module, projection, LoRA(linear))


def sizes_of(decoder: Decoder, setting: Setting, places: list[str]) -> dict[str, Any]:
    """Return the sizes that `plan` reads from the model with all its layers."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = simulate._untiled(decoder, setting)
        freeze(model, places)
        return asdict(decoder_of_model("plan", model))


def step(decoder: Decoder, setting: Setting, places: list[str]) -> dict[str, Any]:
    """Return the bytes that are held, and the sizes that `plan` reads from the model."""

    def frozen(model: Any) -> Any:
        freeze(model, places)
        return model

    changed: Any = simulate
    if setting.scope == "none":
        changed._tiled = lambda *given: frozen(TILED(*given))
    else:
        changed._tiled = TILED
        changed.tile_model = lambda model, **options: tile_model(frozen(model), **options)
    default = torch.get_default_dtype()
    if places == ["bfloat16"]:  # of the parameters on the simulated device
        torch.set_default_dtype(torch.bfloat16)
    found = simulated_step(decoder, setting, simulate.SIMULATOR)
    torch.set_default_dtype(default)
    return {"device": found.device, "host": found.host, "decoder": sizes_of(decoder, setting, places)}


def simulate_frozen() -> None:
    """Let a simulation run models of which not all is trained, from now on in this process."""
    changed: Any = torch.Tensor
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(changed, name, of_trained(getattr(changed, name)))
    accelerator: Any = torch.accelerator  # FSDP waits for the streams of units of which nothing is trained
    accelerator.current_stream = torch.get_device_module("cpu").current_stream


def main() -> None:
    """Print what is held in every case."""
    simulate_frozen()
    for decoder, setting, places in json.load(sys.stdin):
        print(json.dumps(step(Decoder(**decoder), Setting(**setting), places)), flush=True)


if __name__ == "__main__":
    main()
