"""Cases on a GPU: the Triton kernels, the JAX half, and arrays that cross between the two on the device.

`make gpu PART=parity` runs them with the interpreter at hand; the default suite leaves them out.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared_specs.config import LossOptions, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.distillation.cases import DISTILLATION_CASES, DistillationCase
from shared_specs.kernels.blocks import DETERMINISTIC, UNMEASURED, Paths
from shared_specs.loss.cases import LOSS_CASES, LossCase
from shared_specs.mlp.cases import MLP_CASES, MLPCase
from shared_specs.moe.cases import MOE_CASES, MoECase
from shared_specs.tolerances import limit
from tests.adapters import ADAPTERS, JaxAdapter, Results, TorchAdapter
from tests.asserting import assert_case
from tests.distillation import test_both_distillation as distillation

pytestmark = pytest.mark.gpu


def one_of_each(cases, *fields, **numbers):
    """The first cases of every combination of these fields, as many of a dtype as `numbers` says."""
    found = []
    for dtype, number in numbers.items():
        kinds = {}
        for case in cases:
            if case.dtype == dtype:
                kinds.setdefault(tuple(getattr(case, field) for field in fields), case)
        found += list(kinds.values())[:number]
    return tuple(found)


MLPS = one_of_each(MLP_CASES, "activation", "gated", bfloat16=6, float16=3, float32=3)
LOSSES = one_of_each(LOSS_CASES, "reduction", "outputs", bfloat16=4, float16=2, float32=2)
MOES = one_of_each(MOE_CASES, "routing", bfloat16=1, float16=1, float32=1)
# Experts of sizes that the grouped kernel takes, most with few rows; one has none, or the rows of several shards.
GROUPED_MOES = tuple(
    MoECase(
        dims=(2, 96),
        hidden=64,
        intermediate=96,
        experts=16,
        top_k=4,
        routing=routing,
        dtype="bfloat16",
        reason="grouped",
    )
    for routing in ("spread", "hot", "empty")
)
DISTILLATIONS = one_of_each(DISTILLATION_CASES, "kind", bfloat16=3, float16=1, float32=2)
# Sizes that every kernel takes, Pallas too; the last shard is short.
_TAKEN = {"dims": (2, 160), "hidden": 192, "intermediate": 256, "num_shards": 2, "reason": "sizes of every kernel"}
KERNEL_MLPS = (
    MLPCase(dtype="bfloat16", **_TAKEN),
    MLPCase(dtype="bfloat16", activation="gelu", biases=("gate", "up", "down"), keep=0.5, **_TAKEN),
    MLPCase(dtype="bfloat16", activation="relu", fused=True, **_TAKEN),
    MLPCase(dtype="float16", activation="gelu_tanh", **_TAKEN),
    # Shards in a loop, of which what was kept is a slice of a larger array.
    MLPCase(dtype="bfloat16", keep=1.0, **(_TAKEN | {"dims": (4, 256), "num_shards": 4})),
)
PATHS = {
    "vendor": UNMEASURED,
    "auxiliary": Paths(up="auxiliary"),
    "dual": Paths(up="dual"),
    "every product": DETERMINISTIC,
}


@pytest.fixture(scope="module")
def torch_adapter() -> TorchAdapter:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")
    torch.backends.cuda.matmul.allow_tf32 = False
    return TorchAdapter("cuda")


@pytest.fixture(scope="module")
def jax_adapter() -> JaxAdapter:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.fail("this test needs a GPU that JAX sees; set JAX_PLATFORMS=cuda,cpu")
    return JaxAdapter()


@pytest.mark.parametrize("case", [*MLPS, *KERNEL_MLPS], ids=lambda case: case.id)
def test_torch_mlp(torch_adapter: TorchAdapter, case: MLPCase) -> None:
    from tiled_torch.backends import last_run

    results = torch_adapter.run(case, "auto")
    assert last_run("tiled_mlp") == "triton"
    assert_case(case, results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("paths", PATHS)
def test_every_way_to_make_an_mlp(torch_adapter: TorchAdapter, paths, dtype, monkeypatch) -> None:
    from tiled_torch.mlp import steps_kernels

    monkeypatch.setattr(steps_kernels, "paths_for", lambda *args: PATHS[paths])
    case = replace(KERNEL_MLPS[1], dtype=dtype)
    assert_case(case, torch_adapter.run(case, "triton"))


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
def test_torch_loss(torch_adapter: TorchAdapter, case: LossCase) -> None:
    from tiled_torch.backends import last_run

    results = torch_adapter.run_loss(case, "auto")
    assert last_run("tiled_linear_cross_entropy") == "triton"
    assert_case(case, results)


@pytest.mark.parametrize("case", MOES, ids=lambda case: case.id)
def test_torch_moe(torch_adapter: TorchAdapter, case: MoECase) -> None:
    assert_case(case, torch_adapter.run_moe(case, "auto"))


@pytest.mark.parametrize("case", GROUPED_MOES, ids=lambda case: case.id)
def test_torch_moe_of_grouped_products(torch_adapter: TorchAdapter, case: MoECase) -> None:
    """Where the GPU has their kernel."""
    import torch

    from tests.core.torch_counting import GemmFlop

    names = []

    class Names(GemmFlop):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__.split(".")[0])
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Names():
        assert_case(case, torch_adapter.run_moe(case, "auto"))
    assert ("_grouped_mm" in names) == (torch.cuda.get_device_capability()[0] in (9, 10))


@pytest.mark.parametrize("case", MOES, ids=lambda case: case.id)
def test_jax_moe(jax_adapter: JaxAdapter, case: MoECase) -> None:
    assert_case(case, jax_adapter.run_moe(case, "auto"))


@pytest.mark.parametrize("case", DISTILLATIONS, ids=lambda case: case.id)
def test_torch_distillation(torch_adapter: TorchAdapter, case: DistillationCase, monkeypatch) -> None:
    monkeypatch.setitem(ADAPTERS, "torch", torch_adapter)
    distillation.test_case(case, "torch")


@pytest.mark.parametrize("case", DISTILLATIONS, ids=lambda case: case.id)
def test_jax_distillation(jax_adapter: JaxAdapter, case: DistillationCase) -> None:
    distillation.test_case(case, "jax")


@pytest.mark.parametrize("case", MLPS, ids=lambda case: case.id)
def test_jax_mlp(jax_adapter: JaxAdapter, case: MLPCase) -> None:
    assert_case(case, jax_adapter.run(case, "auto"))


def run_on_kernels(function: str, run: Callable[[], Results]) -> Results:
    """The results of a call that must have run by Pallas on a Hopper GPU, by XLA on any other."""
    import jax

    from tiled_jax import backends

    jax.clear_caches()  # what is found compiled says nothing of its backend
    backends.record_run(function, "nothing")
    results = run()
    hopper = str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9.")
    assert backends.last_run(function) == ("pallas" if hopper else "xla")
    return results


@pytest.mark.parametrize("case", KERNEL_MLPS, ids=lambda case: case.id)
def test_jax_mlp_by_kernels(jax_adapter: JaxAdapter, case: MLPCase) -> None:
    assert_case(case, run_on_kernels("tiled_mlp", lambda: jax_adapter.run(case, "auto")))


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
def test_jax_loss(jax_adapter: JaxAdapter, case: LossCase) -> None:
    assert_case(case, run_on_kernels("tiled_linear_cross_entropy", lambda: jax_adapter.run_loss(case, "auto")))


RANKED = LossOptions(outputs=("prediction", "top_logprobs"), top_k=7)


def whole_numbers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [300, 192], weight [3000, 192], and logits that bfloat16 has exactly, many of them equal."""
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-1, 2, (n, 192)).astype(np.float32) for n in (300, 3000))
    return x, weight, x @ weight.T


def assert_ranked(prediction: Any, values: Any, indices: Any, z: np.ndarray, *, ordered: bool) -> None:
    """ordered: of equal logits those of the first entries."""
    order = np.argsort(-z, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(prediction, order[:, 0])
    np.testing.assert_array_equal(np.take_along_axis(z, indices, 1), np.take_along_axis(z, order, 1))
    assert all(len({*row}) == 7 for row in indices)
    if ordered:
        np.testing.assert_array_equal(indices, order)
    log_p = (
        z
        - np.log(np.exp((z - z.max(1, keepdims=True)).astype(np.float64)).sum(1, keepdims=True))
        - z.max(1, keepdims=True)
    )
    assert relative_error(values, np.take_along_axis(log_p, order, 1)) <= limit(0.0, "float32")


@pytest.mark.parametrize("parts", [1, 2])
def test_torch_rankings(torch_adapter: TorchAdapter, parts: int) -> None:
    import torch

    from tiled_torch import tiled_linear_cross_entropy

    x, weight, z = whole_numbers()
    given = [torch.tensor(a, device="cuda", dtype=torch.bfloat16, requires_grad=True) for a in (x, weight)]
    found: Any = tiled_linear_cross_entropy(
        *given,
        torch.zeros(300, dtype=torch.long, device="cuda"),
        loss=RANKED,
        tiling=Tiling(num_shards=2, vocab_shards=parts),
        backend="triton",
    )
    assert_ranked(*(a.cpu().numpy() for a in (found.prediction, *found.top_logprobs)), z, ordered=False)


@pytest.mark.parametrize("parts", [1, 2])
def test_jax_rankings(jax_adapter: JaxAdapter, parts: int) -> None:
    import jax
    import jax.numpy as jnp

    from tiled_jax import tiled_linear_cross_entropy

    x, weight, z = whole_numbers()

    def run(x: Any, weight: Any) -> Any:
        tiling = Tiling(num_shards=2, vocab_shards=parts)
        found = tiled_linear_cross_entropy(x, weight, jnp.zeros(300, jnp.int32), loss=RANKED, tiling=tiling)
        return found.loss, found

    given = [jnp.asarray(a, jnp.bfloat16) for a in (x, weight.T)]
    found = jax.jit(jax.grad(run, (0, 1), has_aux=True))(*given)[1]
    assert_ranked(*(np.asarray(a) for a in (found.prediction, *found.top_logprobs)), z, ordered=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_arrays_cross_on_the_device_without_a_copy(torch_adapter: TorchAdapter, jax_adapter: JaxAdapter, dtype) -> None:
    import torch

    from tiled_torch.bridge import to_jax, to_torch

    tensor = torch.arange(24, device="cuda").reshape(4, 6).to(getattr(torch, dtype))
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)
