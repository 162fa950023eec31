"""What users hand to the MLP and the loss besides plain tensors and plain modes: taken as it should be, or refused in words."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from shared_specs import SpecError, UnsupportedError
from shared_specs.config import ACTIVATIONS
from tiled_torch import TiledLinearCrossEntropy, TiledMLP, backends, tiled_linear_cross_entropy, tiled_mlp
from tiled_torch.parallel import TensorParallelTiledMLP, vocab_parallel_linear_cross_entropy

TILE = "Convert it to a plain tensor, or use tile(), which calls the layers as they are."
GATHER = "Call the module that owns it, whose engine gathers it, or call inside deepspeed.zero.GatheredParameters."


def weights(*, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    gate, up, down = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((12, 8), (12, 8), (8, 12)))
    return gate, up, down


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down"])
def test_a_dtensor_is_refused(name: str, mesh: Any) -> None:
    operands = dict(zip(("x", "w_gate", "w_up", "w_down"), (torch.randn(5, 8), *weights()), strict=True))
    operands[name] = distribute_tensor(operands[name].detach(), mesh, [Replicate()])
    with pytest.raises(UnsupportedError) as caught:
        tiled_mlp(**operands)
    assert str(caught.value) == (
        f"tiled_mlp: {name} must be a plain tensor, got a DTensor. Use tensor_parallel_mlp for weights that are split over "
        "ranks, or convert it with to_local()."
    )


def test_tensors_of_other_classes_are_refused() -> None:
    """As torchao's are, whose products are their own."""
    gate, up, down = weights()
    other = TwoTensor(up.detach(), up.detach())
    for call, text in (
        (lambda: tiled_mlp(torch.randn(5, 8), gate, other, down), "tiled_mlp: w_up"),
        (lambda: tiled_mlp(torch.randn(5, 8), gate, up, down, biases={"up": other[:, 0]}), "tiled_mlp: biases['up']"),
        (
            lambda: tiled_linear_cross_entropy(torch.randn(5, 8), other, torch.arange(5)),
            "tiled_linear_cross_entropy: weight",
        ),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert str(caught.value) == f"{text} must be a plain tensor, got a TwoTensor. {TILE}"


def test_a_partitioned_zero_3_parameter_is_named_as_what_it_is() -> None:
    """It was "a matrix, got [0]"."""
    gate, _, down = weights()
    partitioned: Any = nn.Parameter(torch.empty(0))
    partitioned.ds_id = 7
    for call, text in (
        (lambda: tiled_mlp(torch.randn(5, 8), gate, partitioned, down), "tiled_mlp: w_up"),
        (
            lambda: tiled_linear_cross_entropy(torch.randn(5, 8), partitioned, torch.arange(5)),
            "tiled_linear_cross_entropy: weight",
        ),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert str(caught.value) == f"{text} must be gathered, got a ZeRO-3 parameter that is partitioned. {GATHER}"


@pytest.mark.parametrize("x", [torch.zeros(3, 8), torch.zeros(3, 5, 8)], ids=["one token each", "five tokens each"])
def test_a_vmapped_call_is_refused(x: Tensor) -> None:
    with pytest.raises(UnsupportedError, match=r"^tiled_mlp: this call is inside torch\.func\."):
        torch.vmap(TiledMLP(8, 12))(x)


def test_one_token_without_a_dim_of_tokens() -> None:
    """As nn.Linear takes it."""
    operands, x = weights(dtype=torch.float64), torch.randn(8, dtype=torch.float64, requires_grad=True)
    one, many = tiled_mlp(x, *operands, num_shards=3), tiled_mlp(x[None], *operands, num_shards=3)
    assert torch.equal(one, many[0])
    grads, expected = (torch.autograd.grad(y.square().sum(), [x, *operands]) for y in (one, many))
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saved_tensors_may_be_changed_where_pytorch_allows_it(activation: Any, dtype: torch.dtype) -> None:
    """`KeyError: 'out'`: PyTorch's mode knows no other name of what an operator writes into."""
    module = TiledMLP(8, 12, num_shards=3, activation=activation, dtype=dtype)
    x = torch.randn(7, 8, dtype=dtype)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    with allow_mutation_on_saved_tensors():
        y = module(x)
        with torch.no_grad():
            module.w_up.mul_(2)
        found = torch.autograd.grad(y.square().sum(), list(module.parameters()))
    assert all(map(torch.equal, found, expected))


def halves(frozen: str, kind: str) -> dict[str, Any]:
    """from_weights' arguments, whose gate or up (weight or bias), or both, are frozen parameters."""
    torch.manual_seed(0)
    given = {"w_gate": (12, 8), "w_up": (12, 8), "w_down": (8, 12), "b_gate": (12,), "b_up": (12,)}
    made = {name: nn.Parameter(torch.randn(shape)) for name, shape in given.items()}
    for which in ("gate", "up"):
        made[f"{kind}_{which}"].requires_grad_(which not in frozen)
    biases = {name: made.pop(f"b_{name}") for name in ("gate", "up")}
    return {**made, "biases": biases, "fused_gate_up": True}


@pytest.mark.parametrize("kind", ["w", "b"])
def test_frozen_weights_stay_frozen_when_they_are_fused(kind: str) -> None:
    """They were thawed."""
    module = TiledMLP.from_weights(**halves("gate and up", kind))
    assert [name for name, p in module.named_parameters() if not p.requires_grad] == [f"{kind}_gate_up"]
    assert all(p.requires_grad for p in TiledMLP.from_weights(**halves("", kind)).parameters())


@pytest.mark.parametrize("kind", ["w", "b"])
@pytest.mark.parametrize("which", ["gate", "up"])
def test_one_frozen_half_cannot_be_fused(which: str, kind: str) -> None:
    with pytest.raises(SpecError) as caught:
        TiledMLP.from_weights(**halves(which, kind))
    assert str(caught.value) == (
        f"TiledMLP.from_weights: fused_gate_up must be False where {kind}_{which} alone is frozen, got True. One parameter "
        "trains as a whole: freeze both or neither."
    )


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_fake_tensors_take_the_hand_written_path(checkpointed: bool) -> None:
    """Targets were read: "aten._local_scalar_dense"."""
    for function in ("tiled_mlp", "tiled_linear_cross_entropy"):
        backends.record_run(function, "nothing")
    with FakeTensorMode():
        mlp, head = TiledMLP(64, 256, num_shards=4), TiledLinearCrossEntropy(64, 1000, num_shards=4)
        x, targets = torch.randn(2, 512, 64, requires_grad=True), torch.zeros(2, 512, dtype=torch.long)

        def loss(x: Tensor) -> Any:
            return head(mlp(x), targets)

        (checkpoint(loss, x, use_reentrant=False) if checkpointed else loss(x)).backward()
    assert {backends.last_run(f) for f in ("tiled_mlp", "tiled_linear_cross_entropy")} == {"eager"}
    for leaf in (x, *mlp.parameters(), *head.parameters()):
        assert isinstance(leaf.grad, FakeTensor)
        assert leaf.grad.shape == leaf.shape


@pytest.fixture
def eight_fake_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of fully_shard on fake tensors
def test_fake_tensors_with_fake_ranks(eight_fake_ranks: None) -> None:
    """Fully sharded, and split over eight ranks whose answers nobody can compare."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (8,))
    with FakeTensorMode():
        body, head = nn.Sequential(nn.Linear(64, 64), TiledMLP(64, 256)), TiledLinearCrossEntropy(64, 1000)
        for module in (body[1], body, head):
            fully_shard(module, mesh=mesh)
        targets = torch.zeros(512, dtype=torch.long)
        head(body(torch.randn(512, 64)), targets).backward()
        split, x = TensorParallelTiledMLP(64, 256, sequence_parallel=True), torch.randn(512, 64, requires_grad=True)
        part = torch.randn(125, 64, requires_grad=True)
        vocab_parallel_linear_cross_entropy(split(x), part, targets, vocab_size=1000).backward()
    assert all(p.grad is not None for p in (*body.parameters(), *head.parameters(), *split.parameters(), x, part))
