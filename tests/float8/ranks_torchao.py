"""What the ranks run for float8 products by torchao, emulated: whole models against one process. See tests/ranks.py."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from shared_specs.config import DataParallel, ParallelConfig, TensorParallel
from tests.models.torch_decoders import batch, decoder, loss_of
from tests.plans.ranks_torch_plans import error_between, full
from tiled_torch.models import tile_model
from tiled_torch.parallel import parallelize
from tiled_torch.plans import api as plans_api

SIZES: dict[str, Any] = {"intermediate_size": 32, "num_hidden_layers": 2}
LAYERS = 14  # of the two blocks

CONFIGS = {
    "fsdp": (("dp_shard",), ParallelConfig(float8=True, data=DataParallel(reduce_dtype=None))),
    "tp": (("tp",), ParallelConfig(float8=True, tensor=TensorParallel(sequence_parallel=False))),
    "sp": (("tp",), ParallelConfig(float8=True, tensor=TensorParallel())),
}


@contextmanager
def emulated() -> Iterator[Any]:
    """torchao's conversion, its products made in float32 of operands rounded to float8; parallelize may use it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes in its docstrings, which Python finds when it compiles them
        import torchao.float8 as torchao  # type: ignore[import-not-found]
    convert, reason = torchao.convert_to_float8_training, plans_api.reason_no_float8
    torchao.convert_to_float8_training = partial(convert, config=torchao.Float8LinearConfig(emulate=True))
    plans_api.reason_no_float8 = lambda: None
    try:
        yield torchao.convert_to_float8_training
    finally:
        torchao.convert_to_float8_training, plans_api.reason_no_float8 = convert, reason


def model_of(tiled: bool = False) -> Any:
    model = decoder(**SIZES).float()
    return tile_model(model, num_shards=3) if tiled else model


def gradients(model: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of the whole batch."""
    loss = loss_of(model, *batch(), inside=True, cache=False)
    loss.backward()
    return loss.item(), {name: full(p.grad) for name, p in model.named_parameters()}


def whole_model(rank: int, world: int, name: str, tiled: bool = False) -> dict[str, Any]:
    """Every rank with the same batch: loss and gradients against torchao's of one process, and both against float32."""
    axes, config = CONFIGS[name]
    with emulated() as convert:
        theirs = model_of()
        convert(theirs.model.layers)
        expected_loss, expected = gradients(theirs)
        model = parallelize(model_of(tiled), init_device_mesh("cpu", (world,), mesh_dim_names=axes), config)
        loss, found = gradients(model)
        _, exact = gradients(model_of())
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    return {
        "loss": abs(loss - expected_loss) / expected_loss,
        "between": error_between(found, expected),
        "ours": error_between(found, exact),
        "theirs": error_between(expected, exact),
        "layers": sum(type(module).__name__ == "Float8Linear" for module in model.modules()),
    }
