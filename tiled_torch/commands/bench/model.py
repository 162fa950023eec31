"""`bench --op model` in PyTorch: a Hugging Face model in 32 and 16 bits, plain and tiled, against itself in float64."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared_specs.app.bench.model_errors import Array, Found, measure_model, tokens_of
from shared_specs.app.bench.workloads import ModelWorkload
from shared_specs.app.models.weights import read_model
from tiled_torch.commands.finetune.trainer import build_model
from tiled_torch.models import tile_model

PACKAGES = ("torch", "transformers", "numpy")
NOTE = (
    "plain is transformers' own model and loss; float64 is the same model with its norms and its cross entropy in float64 too, "
    "and with the angles of positions that transformers makes in float32 whatever the dtype"
)


def facts() -> dict[str, Any]:
    return {"model": NOTE, "threads": torch.get_num_threads()}


def measure(workload: ModelWorkload, repeats: int = 1, source: str | None = None) -> list[dict[str, Any]]:
    """Return one result a variant. source: a model on disk; None is SmolLM2-135M."""
    files = read_model(source)
    ids = torch.from_numpy(tokens_of(workload, files))
    model = build_model(files.config, files.weights, torch.device("cpu")).to(getattr(torch, workload.dtype))
    return measure_model(workload, truth_of(model, ids), variants(model, ids))


def variants(model: PreTrainedModel, ids: Tensor) -> dict[str, Callable[[], Found]]:
    """Name -> how to compute the loss and every gradient."""

    def run(prepare: Callable[[nn.Module], Any]) -> Found:
        changed = copy.deepcopy(model)
        prepare(changed)
        return results_of(changed, changed(input_ids=ids, labels=ids).loss)

    return {
        "plain": partial(run, lambda model: None),
        "tiled": partial(run, partial(tile_model, num_shards=4)),
        "tiled, scope block": partial(run, partial(tile_model, scope="block", num_shards=4)),
    }


def truth_of(model: PreTrainedModel, ids: Tensor) -> Found:
    """Return the loss of the next token and every gradient in float64; transformers' norms and loss go through float32."""
    exact: Any = copy.deepcopy(model).double()
    for name, module in list(exact.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            exact.set_submodule(name, norm)
    logits = exact(input_ids=ids).logits
    return results_of(exact, F.cross_entropy(logits[0, :-1], ids[0, 1:]))


def results_of(model: nn.Module, loss: Tensor) -> Found:
    loss.backward()
    return loss.item(), {name: _gradient(p) for name, p in model.named_parameters()}


def _gradient(parameter: nn.Parameter) -> Array:
    """NumPy has no bfloat16."""
    assert parameter.grad is not None
    return (parameter.grad.float() if parameter.dtype == torch.bfloat16 else parameter.grad).numpy()
