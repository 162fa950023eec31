"""torch.func's transforms around layers that are split over ranks, which refuse them, and around `TiledLinear`, which is made
of autograd's own operations and takes them. (`tiled_mlp` and the losses: tests/mlp/test_torch_autograd.py.)"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared_specs.config import LossOptions
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tiled_torch import TiledLinear, UnsupportedError
from tiled_torch.parallel import TensorParallelTiledMLP, tensor_parallel_mlp, vocab_parallel_linear_cross_entropy

# PyTorch's first forward-mode derivative scripts formulas of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

Transform = Callable[[Callable[[Tensor], Tensor], Tensor], Any]
TRANSFORMS: dict[str, Transform] = {
    "grad": lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
    "vjp": lambda fn, x: torch.func.vjp(fn, x),
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (x,)),
    "vmap": lambda fn, x: torch.func.vmap(fn)(x[None]),
}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def calls() -> dict[str, tuple[str, str, Callable[[Tensor], Any]]]:
    """(the function and what to do instead, as the message has them, and a call) by name; of one rank it is `tiled_mlp`."""
    weights = [torch.randn(shape, requires_grad=True) for shape in ((12, 8), (12, 8), (8, 12))]
    targets, module = torch.arange(5), TensorParallelTiledMLP(8, 12)
    each = LossOptions(reduction="none")
    mlp = "tiled_mlp", "the untiled MLP"
    loss = "vocab_parallel_linear_cross_entropy", "the untiled loss"
    return {
        "mlp": (*mlp, lambda x: tensor_parallel_mlp(x, *weights)),
        "sequence": (*mlp, lambda x: tensor_parallel_mlp(x, *weights, sequence_parallel=True)),
        "module": (*mlp, module),
        "loss": (*loss, lambda x: vocab_parallel_linear_cross_entropy(x, weights[0], targets)),
        "loss of each": (*loss, lambda x: vocab_parallel_linear_cross_entropy(x, weights[0], targets, loss=each)),
    }


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("name", ["mlp", "sequence", "module", "loss", "loss of each"])
def test_layers_of_ranks_refuse(name: str, transform: Transform, alone: None) -> None:
    function, untiled, call = calls()[name]
    call(torch.randn(5, 8))  # which is fine by itself
    with pytest.raises(UnsupportedError) as caught:
        transform(call, torch.randn(5, 8))
    assert str(caught.value) == (
        f"{function}: this call is inside torch.func. Differentiate {untiled} itself, or use tiled_jax."
    )


def scalar(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fn(x).sin().sum()


# Of a layer and x [3, T, in].
OF_LAYERS: dict[str, Transform] = {
    "grad": lambda fn, x: torch.func.grad(scalar(fn))(x),
    "grad of grad": lambda fn, x: torch.func.grad(lambda x: torch.func.grad(scalar(fn))(x).square().sum())(x),
    "vjp": lambda fn, x: torch.func.vjp(fn, x)[1](fn(x).cos())[0],
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (x.cos(),))[1],
    "vmap": lambda fn, x: torch.func.vmap(fn)(x),
    "vmap of grad": lambda fn, x: torch.func.vmap(torch.func.grad(scalar(fn)))(x),
    "jacrev": lambda fn, x: torch.func.jacrev(fn)(x[0, 0]),
    "jacfwd": lambda fn, x: torch.func.jacfwd(fn)(x[0, 0]),
    "hessian": lambda fn, x: torch.func.hessian(scalar(fn))(x[0, 0]),
}
SPLITS = {"in": (2, 1), "out": (1, 3), "both": (3, 2)}


@pytest.mark.parametrize("transform", OF_LAYERS.values(), ids=OF_LAYERS.keys())
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
def test_tiled_linear_is_the_plain_layer(splits: tuple[int, int], transform: Transform) -> None:
    torch.manual_seed(0)
    tiled = TiledLinear(7, 5, in_splits=splits[0], out_splits=splits[1], dtype=torch.float64)
    x = torch.randn(3, 4, 7, dtype=torch.float64)
    found, expected = (transform(layer, x).detach().numpy() for layer in (tiled, tiled.to_linear()))
    assert_within(found, expected, DISTRIBUTED_FLOAT64, "tiled")


def test_tiled_linear_of_other_parameters() -> None:
    """Per-example gradients of parameters that functional_call puts in place of the module's."""
    torch.manual_seed(0)
    tiled = TiledLinear(7, 5, in_splits=2, out_splits=2, dtype=torch.float64)
    params = {name: torch.randn_like(param) for name, param in tiled.named_parameters()}
    x = torch.randn(3, 4, 7, dtype=torch.float64)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(tiled, params, (x,)).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    for index in range(3):
        again = TiledLinear(7, 5, in_splits=2, out_splits=2, dtype=torch.float64)
        again.load_state_dict(params)
        plain: nn.Linear = again.to_linear()
        plain(x[index]).sin().sum().backward()
        for out_id, in_id, rows, columns in tiled.grid():
            name = f"linears.{out_id}.{in_id}"
            expected = {f"{name}.weight": plain.weight.grad[rows, columns]}
            if in_id == 1:
                expected[f"{name}.bias"] = plain.bias.grad[rows]
            for name, value in expected.items():
                assert_within(found[name][index].numpy(), value.numpy(), DISTRIBUTED_FLOAT64, name)


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap of grad"])
def test_tiled_linear_in_16_bits_gives_what_backward_gives(transform: str) -> None:
    """The sum over output splits is made in float32 by nodes of its own: under a transform too, to the last bit."""
    torch.manual_seed(0)
    tiled = TiledLinear(7, 6, in_splits=2, out_splits=3, dtype=torch.bfloat16)
    x = torch.randn(3, 4, 7, dtype=torch.bfloat16, requires_grad=True)
    tiled(x).sin().sum().backward()
    found = OF_LAYERS[transform](tiled, x.detach())
    assert x.grad is not None
    assert torch.equal(found, x.grad)
