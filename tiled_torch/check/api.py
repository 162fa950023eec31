"""`check`: whether a model trains tiled as it does untiled, and which tensor differs first."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_specs.check.checks import DRAWS, check_arguments, fail_running
from shared_specs.check.judge import judged
from shared_specs.check.report import CheckReport
from shared_specs.check.trained import Trained
from shared_specs.errors import SpecError, UnsupportedError, fail_type
from tiled_torch.check.train import Prepare, Step, Training, cast, copied, default_tile


def check(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    tile: Prepare | None = None,
    plain: Prepare | None = None,
    step: Step | None = None,
    plain_step: Step | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    steps: int = 2,
    seed: int = 0,
) -> CheckReport:
    """Return where training a model tiled differs from training it untiled, or that it does not.

    Both begin with the same state and the same random numbers. A third training, untiled in float64 (else float32), says how
    far rounding alone takes the untiled one, and the tiled one may go as far. Compared are, in this order, the results of
    modules, the loss, gradients from the loss back, how often hooks ran, the changes of parameters, and buffers.

    Where a whole way of training is to be proven (an engine, ranks, accumulation), `tile` and `step` are that way, and `plain`
    and `plain_step` the plain one that it stands for.

    Args:
        model: copied, or a function that makes it, called for each training; in the mode in which it is trained.
        batch: what the model is called with: a mapping by name, a tuple one by one.
        tile: is given a copy of the model and returns what is trained; None: `tile_model` with four shards.
        plain: the same of the untiled model; None leaves it as it is.
        step: is given what `tile` returned and the batch, and returns the loss; one that runs backward by itself returns it
            detached. None: the loss that the model returns.
        plain_step: the same for the untiled model; None: `step`.
        optimizer: is given the parameters and returns an optimizer; None: plain gradient descent.
        steps: of the optimizer. seed: of what is drawn.
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
    same_steps = plain_step is None or plain_step is step
    ways = {
        "untiled": Training(prepare=plain, step=plain_step or step, optimizer=optimizer, steps=steps, seed=seed),
        "tiled": Training(prepare=tile or default_tile, step=step, optimizer=optimizer, steps=steps, seed=seed),
    }
    with torch.random.fork_rng():
        found = _Comparison(model, batch, ways, seed)
        report = found.report(same_steps)
        first = report.first
        if first is not None and first.kind in ("forward", "loss") and found.draws():
            found.evaluate()
            report = found.report(same_steps)
            report.notes.append(DRAWS)
    return report


class _Comparison:
    """Two ways of training one model, and the third that says what rounding does."""

    def __init__(self, model: Any, batch: Any, ways: dict[str, Training], seed: int) -> None:
        self._make, self._batch, self._ways, self._seed = model, batch, ways, seed
        self._evaluates = False
        self._state: dict[str, Any] | None = None
        if not isinstance(model, nn.Module):
            self._state = copy.deepcopy(self._model().state_dict())

    def report(self, same_steps: bool) -> CheckReport:
        plain, tiled = self._trained("untiled"), self._trained("tiled")
        reference, truth, note = self._truth()
        return CheckReport(
            results=judged(plain, tiled, truth, same_steps=same_steps),
            paths=tiled.paths,
            hooks=dict(tiled.steps[-1].hooks),
            reference=reference,
            plain_bytes=self._peak("untiled"),
            tiled_bytes=self._peak("tiled"),
            notes=[note] if note else [],
        )

    def draws(self) -> bool:
        """Return whether the untiled model computes something else with other random numbers."""
        before, self._seed = self._seed, self._seed + 1
        way = self._ways["untiled"]
        losses = []
        for seed in (before, self._seed):
            other = Training(prepare=way.prepare, step=way.step, optimizer=way.optimizer, steps=1, seed=seed)
            losses.append(other.train(self._copy(before), self._batch).steps[0].loss.array)
        self._seed = before
        return bool((losses[0] != losses[1]).any())

    def evaluate(self) -> None:
        """Compare in evaluation from now on."""
        self._evaluates = True

    def _trained(self, way: str) -> Trained:
        return _running(f"training, {way},", lambda: self._ways[way].train(self._copy(), self._batch))

    def _peak(self, way: str) -> int:
        return self._ways[way].peak_bytes(self._copy(), self._batch)

    def _truth(self) -> tuple[str, Trained | None, str]:
        """Return the dtype of the training that says what rounding does, what it left behind, and why there is none."""
        reason = ""
        for dtype in (torch.float64, torch.float32):
            try:
                model = self._copy(dtype=dtype)
                trained = self._ways["untiled"].train(model, cast(self._batch, dtype))
            except Exception as error:  # a kernel, an optimizer or a dtype of the model's own
                reason = reason or " ".join(f"{type(error).__name__}: {error}".split())
            else:
                return str(dtype).removeprefix("torch."), trained, ""
        return "", None, f"The untiled model does not train in higher precision ({reason}): limits are the usual ones."

    def _copy(self, seed: int | None = None, dtype: torch.dtype | None = None) -> nn.Module:
        found = self._model() if self._state is not None else _running("copying the model", lambda: copied(self._make))
        if self._state is not None:
            found.load_state_dict(self._state)
        found = found if dtype is None else found.to(dtype)
        return found.eval() if self._evaluates else found

    def _model(self) -> nn.Module:
        torch.manual_seed(self._seed)
        made = _running("model", self._make)
        if not isinstance(made, nn.Module):
            fail_type("check", "model", "a function that makes a torch.nn.Module", type(made).__name__)
        return made


def _running(what: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except (SpecError, UnsupportedError, TypeError) as error:
        if isinstance(error, TypeError) and not str(error).startswith("check: "):
            fail_running(what, error)
        raise
    except Exception as error:
        fail_running(what, error)
