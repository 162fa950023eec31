"""One way of training a model for a few steps, and everything that it leaves behind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shared_specs.check.checks import LEARNING_RATE, NUM_SHARDS, called, loss_of
from shared_specs.check.trained import Trained, TrainedStep, Value, coarsest
from shared_specs.errors import fail, fail_type
from tiled_torch.check.live_bytes import peak_bytes
from tiled_torch.check.watch import Observer, as_value, count_hooks, plain_name
from tiled_torch.models import tile_model, tiling_paths

Prepare = Callable[[Any], Any]
TrainStep = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained. prepare: changes it beforehand, or returns another one. step, optimizer: None for the default."""

    prepare: Prepare | None
    step: TrainStep | None
    optimizer: Callable[[Any], Any] | None
    steps: int

    def train(self, model: nn.Module, batch: Any, seed: int) -> Trained:
        """Return what training leaves behind. model: changed. seed: of what is drawn."""
        counts: dict[str, int] = {}
        count_hooks(model, counts)
        model = self._prepared(model)
        watch = Observer(model, tiling_paths(model), counts)
        parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        start = {name: as_value(parameter) for name, parameter in parameters.items() if parameter.requires_grad}
        optimizer = self._optimizer(model)
        found = Trained(steps=[])
        for number in range(self.steps):
            torch.manual_seed(seed + number)
            before_step = torch.get_rng_state()
            with watch:
                loss = self.run_step(model, batch)
            drawn = not torch.equal(before_step, torch.get_rng_state()) or loss.device.type != "cpu"
            gradients = _gradients(parameters, watch.order)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step = TrainedStep(
                loss=as_value(loss),
                forward=dict(watch.forward),
                given=dict(watch.given),
                gradients=gradients,
                hooks=dict(watch.hooks),
                updates={name: _change(parameters[name], before) for name, before in start.items()},
                buffers={plain_name(name): as_value(buffer) for name, buffer in model.named_buffers()},
            )
            found.steps.append(step)
            found.draws |= drawn
        kept = [value for step in found.steps for value in (*step.forward.values(), *step.updates.values())]
        found.computes = coarsest(value.dtype for value in kept)
        found.paths = {plain_name(name): path for name, path in tiling_paths(model).items()}
        return found

    def peak_bytes(self, model: nn.Module, batch: Any) -> int:
        """Return the peak of one step without the optimizer's. model: changed."""
        model = self._prepared(model)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return peak_bytes(lambda: self.run_step(model, batch), device)

    def run_step(self, model: nn.Module, batch: Any) -> Tensor:
        """Run forward and backward of a step and return its loss."""
        loss = loss_of(called(model, batch), _is_scalar) if self.step is None else self.step(model, batch)
        if not _is_scalar(loss):
            fail_type("check", "step", "a function that returns the loss, a tensor of one number", type(loss).__name__)
        if loss.requires_grad:
            if self.step is not None and any(parameter.grad is not None for parameter in model.parameters()):
                advice = "Return loss.detach()."
                fail(
                    "check",
                    "step",
                    "free of a graph where it runs backward itself",
                    "a loss that has one",
                    advice=advice,
                )
            loss.backward()
        return loss.detach()

    def _prepared(self, model: nn.Module) -> nn.Module:
        found = model if self.prepare is None else self.prepare(model)
        return model if found is None else found

    def _optimizer(self, model: nn.Module) -> Any:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, LEARNING_RATE) if self.optimizer is None else self.optimizer(trained)


def default_tile(model: nn.Module) -> nn.Module:
    """Tile a model in shards that are small enough to be several."""
    return tile_model(model, num_shards=NUM_SHARDS)


def disturb(model: nn.Module, unit: float) -> None:
    """Change every parameter by this part of itself, by chance up or down."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                up = torch.randint(2, parameter.shape, generator=random).to(parameter.device)
                parameter.mul_(1 + (2 * up - 1) * unit)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch whose floating-point tensors have this dtype."""
    return tree_map(lambda a: a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a, batch)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _gradients(parameters: Mapping[str, Tensor], order: Mapping[str, None]) -> dict[str, Value | None]:
    """Return every gradient, those first that came first."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    names = dict.fromkeys((*order, *reversed(trained)))
    return {name: None if trained[name].grad is None else as_value(trained[name].grad) for name in names}


def _change(parameter: Tensor, before: Value) -> Value:
    now = as_value(parameter)
    return Value(now.array.astype("float64") - before.array, now.dtype)
