"""`check`: whether a model trains tiled as it does untiled, and which tensor differs first."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_specs.check.checks import check_arguments
from shared_specs.check.compare import UNIT
from shared_specs.check.comparison import TwoWays, Way, running
from shared_specs.check.report import CheckReport
from shared_specs.check.trained import Trained
from shared_specs.errors import fail_type
from tiled_torch.check.train import Prepare, Training, TrainStep, cast, default_tile, disturb


def check(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    tile: Prepare | None = None,
    plain: Prepare | None = None,
    step: TrainStep | None = None,
    plain_step: TrainStep | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    steps: int = 2,
    seed: int = 0,
) -> CheckReport:
    """Train a model tiled and untiled, and return a report of the first difference, if there is one.

    Both trainings start with the same state and the same random numbers. A third training, untiled in float64 (else float32),
    measures the rounding error of the untiled one. The tiled one may have an error of the same size. `check` compares, in this
    order, the results of modules, the loss, gradients from the loss back, how often hooks ran, the changes of parameters, and
    buffers.

    To check a whole training setup (an engine, ranks, accumulation), put it into `tile` and `step`. Put the equivalent plain
    training into `plain` and `plain_step`.

    Args:
        model: the model, which is copied, or a function that makes it and is called for each training. It must be in the mode
            (train or eval) in which it is trained.
        batch: the arguments of the model: a mapping for keyword arguments, a tuple for positional ones.
        tile: a function of a copy of the model that returns what is trained; None: `tile_model` with four shards.
        plain: the same for the untiled model; None leaves it unchanged.
        step: a function of the result of `tile` and the batch that returns the loss. If it runs backward itself, it returns the
            loss detached. None: the loss that the model returns.
        plain_step: the same for the untiled model; None: `step`.
        optimizer: a function of the parameters that returns an optimizer; None: plain gradient descent.
        steps: the number of optimizer steps. seed: of the random numbers.
    Returns:
        shared_specs.check.report.CheckReport: `equal`, `first`, `results`, `paths`, `hooks`; as text, a summary.
    Numerics: limits are those of shared_specs.tolerances, relative to the errors of the untiled training.
    Memory: three copies of the model, one after the other, and its gradients three times a step in host memory.
    Raises:
        SpecError, TypeError: an argument is wrong; the model, `tile` or a step fails.
        UnsupportedError: nothing of the model can be tiled.
    Source: derived in shared_specs/README.md.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
        >>> ids = torch.arange(12).view(1, 12)
        >>> check(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}).equal
        True
    """
    check_arguments(steps, seed, tile=tile, plain=plain, step=step, plain_step=plain_step, optimizer=optimizer)
    if not callable(model):
        fail_type("check", "model", "a torch.nn.Module or a function that makes one", type(model).__name__)
    ways: dict[Way, Training] = {
        "untiled": Training(prepare=plain, step=plain_step or step, optimizer=optimizer, steps=steps),
        "tiled": Training(prepare=tile or default_tile, step=step, optimizer=optimizer, steps=steps),
    }
    with torch.random.fork_rng():
        trainer = TorchTrainings(model, batch, ways, seed)
        return TwoWays(trainer, seed, plain_step is None or plain_step is step).report()


class TorchTrainings:
    """See `shared_specs.check.comparison.TrainsBothWays`."""

    def __init__(self, model: Any, batch: Any, ways: dict[Way, Training], seed: int) -> None:
        self._model, self._batch, self._ways, self._seed = model, batch, ways, seed
        self._state: dict[str, Any] | None = None
        first = model
        if not isinstance(model, nn.Module):
            first = self._made()
            self._state = copy.deepcopy(first.state_dict())
        self._dtypes = {str(p.dtype).removeprefix("torch.") for p in first.parameters() if p.is_floating_point()}

    def wide(self) -> tuple[str, ...]:
        return ("float64", "float32") if self._dtypes <= {"bfloat16", "float16"} else ("float64",)

    def train(self, way: Way, *, seed: int, dtype: str = "", evaluates: bool = False, disturbed: str = "") -> Trained:
        model = self._copy(dtype, evaluates)
        if disturbed:
            disturb(model, UNIT[disturbed])
        batch = cast(self._batch, getattr(torch, dtype)) if dtype else self._batch
        return self._ways[way].train(model, batch, seed)

    def peak_bytes(self, way: Way, *, evaluates: bool = False) -> int:
        model = self._copy("", evaluates)
        torch.manual_seed(self._seed)
        return self._ways[way].peak_bytes(model, self._batch)

    def _copy(self, dtype: str, evaluates: bool) -> nn.Module:
        found = copy.deepcopy(self._model) if self._state is None else self._made()
        if self._state is not None:
            found.load_state_dict(self._state)
        found = found.to(getattr(torch, dtype)) if dtype else found
        return found.eval() if evaluates else found

    def _made(self) -> nn.Module:
        torch.manual_seed(self._seed)
        made = running("making the model", self._model)
        if not isinstance(made, nn.Module):
            fail_type("check", "model", "a function that makes a torch.nn.Module", type(made).__name__)
        return made
