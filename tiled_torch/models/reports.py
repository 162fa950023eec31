"""What ran, for `tiling_paths`, and a warning, once for a model and a reason, where a loss, an MLP or a layer runs otherwise.

Code that torch.compile traces reports nothing.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tiled_torch.models.family import home_of, is_of
from tiled_torch.tile.probe import Watch

WRITES = "it writes to its state"
ALONE = "its layers were called past its forward, by a trainer with a head of its own, say"


class _Here(threading.local):
    depth = 0


_here = _Here()


@contextmanager
def inside_forward() -> Iterator[None]:
    """Mark that a tiled causal language model runs its own forward, inside this context."""
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def report(module: Any, path: str) -> None:
    """Keep the path by which the module's last call ran."""
    if not torch.compiler.is_compiling():
        module._ran = path


def note_layers(mlp: Any) -> None:
    """Of one MLP of every causal language model: whether its forward was called past the model's own, where the loss is."""
    if (
        torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1
    ):  # a checkpoint's replay is in no forward
        return
    mlp._alone = _here.depth == 0
    if mlp._alone and mlp.training:
        tell(mlp, ALONE, "Call the model itself with labels for its tiled loss.")


def tell(module: Any, reason: str, advice: str) -> None:
    """Warn once that the loss of a module's model is not the tiled one."""
    if not torch.compiler.is_compiling() and reason not in module._told:
        module._told = (*module._told, reason)
        warn_untiled(module._model_name, reason, advice)


def state_seen(module: Any, *, attributes: bool = False) -> Callable[[Watch], bool] | None:
    """Return what tells `Tiled` whether a module may run by shards: it leaves nothing behind by which the next one's tokens
    would be computed. One that does runs with all tokens, which is reported.

    attributes: tensors that it keeps as such count too; the last shard's would be all that is left. None: no gradient is
    wanted, and all inside is code of torch and transformers, whose MLPs and routers write nothing: a run on the first tokens
    would be for this alone.
    """
    if not torch.is_grad_enabled() and all(map(_is_known, module.modules())):
        return None

    def allows(watch: Watch) -> bool:
        if not (watch.written or (attributes and watch.binds_tensors)):
            return True
        report(module, f"untiled: {WRITES}")
        tell_of_part(module, "runs whole", WRITES)
        return False

    return allows


def _is_known(module: Any) -> bool:
    home = home_of(module)
    return "forward" not in vars(module) and (is_of("torch", home) or is_of("transformers", home))


def tell_of_part(module: Any, what: str, reason: str) -> None:
    """Warn once for a model and a reason that a part of it, in training, does not run as `tile_model` made it."""
    told = vars(module).get("_heard")
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and module.training) or told is None:
        return
    text = f"tile_model: {module._untiled.__name__} {what}: {reason}."
    if text not in told:
        told.add(text)
        warnings.warn(f"{text} tiling_paths(model) says which ones.", UserWarning, stacklevel=3)


def warn_untiled(model: str, reason: str, advice: str) -> None:
    text = f"tile_model: the loss of {model} does not run through tiled_linear_cross_entropy: {reason}. {advice}"
    warnings.warn(text, UserWarning, stacklevel=3)
