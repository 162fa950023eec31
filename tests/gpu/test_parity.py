"""At most 60 cases on a GPU: the Triton kernels, the JAX half, and arrays that cross between the two on the device.

`make gpu PART=parity` runs them with the interpreter at hand; the default suite leaves them out.
"""

import pytest

from shared_specs.cases import LOSS_CASES, MLP_CASES, LossCase, MLPCase
from tests.adapters import JaxAdapter, TorchAdapter
from tests.asserting import assert_case

pytestmark = pytest.mark.gpu


def one_of_each(cases, *fields):
    """The first case of every combination of these fields, in the dtypes that GPUs train in."""
    found = {}
    for case in cases:
        if case.dtype != "float64":
            found.setdefault(tuple(getattr(case, field) for field in fields), case)
    return tuple(found.values())


MLPS = one_of_each(MLP_CASES, "dtype", "activation", "gated")[:18]
LOSSES = one_of_each(LOSS_CASES, "dtype", "reduction", "outputs")[:12]


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


@pytest.mark.parametrize("case", MLPS, ids=lambda case: case.id)
def test_torch_mlp(torch_adapter: TorchAdapter, case: MLPCase) -> None:
    from tiled_torch.backends import last_run

    results = torch_adapter.run(case, "auto")
    assert last_run("tiled_mlp") == "triton"
    assert_case(case, results)


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
def test_torch_loss(torch_adapter: TorchAdapter, case: LossCase) -> None:
    from tiled_torch.backends import last_run

    results = torch_adapter.run_loss(case, "auto")
    assert last_run("tiled_linear_cross_entropy") == "triton"
    assert_case(case, results)


@pytest.mark.parametrize("case", MLPS, ids=lambda case: case.id)
def test_jax_mlp(jax_adapter: JaxAdapter, case: MLPCase) -> None:
    assert_case(case, jax_adapter.run(case, "auto"))


@pytest.mark.parametrize("case", LOSSES[:8], ids=lambda case: case.id)
def test_jax_loss(jax_adapter: JaxAdapter, case: LossCase) -> None:
    import jax

    from tiled_jax import backends

    jax.clear_caches()  # what is found compiled says nothing of its backend
    backends.record_run("tiled_linear_cross_entropy", "nothing")
    results = jax_adapter.run_loss(case, "auto")
    hopper = str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9.")
    assert backends.last_run("tiled_linear_cross_entropy") == ("pallas" if hopper else "xla")
    assert_case(case, results)


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
