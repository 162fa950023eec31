"""Every kernel at the sizes that are measured, and past 2^31 elements, against the vendor's library.

`make gpu PART=parity` runs this file alone, after the others: it needs the memory of the device for itself (up to 60 GB).
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared_specs.tolerances import between, between_rows

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, INTERMEDIATE, ROWS, VOCAB = 8192, 4096, 14336, 4096, 128256
# Of one array of gate, up or h: more than 2^31 elements.
LONG, WIDE = 131072 + 256, 16384
QUESTIONS = ("up", "down", "glu", "glu_backward", "linear", "dx", "weight_gradient", "cross_entropy")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def torch_device() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")
    # Memory is filled by the comparison where it matters: at these sizes the library's buffers would be filled as well.
    torch.use_deterministic_algorithms(False)
    from tiled_torch.commands.gpu.device import TorchDevice

    return TorchDevice(torch.device("cuda"))


def check(device: Any, variants: Any) -> None:
    """Every variant against the library's results; what is compared is named where it differs."""
    library = next(name for name, variant in variants.items() if variant.library)
    expected = variants[library].results()
    compared = 0
    for name, variant in variants.items():
        if name == library or variant.results is None:
            continue
        with device.poisoned():
            found = variant.results()
        for key, (whole, row) in device.distances(found, expected).items():
            assert whole <= between("bfloat16"), f"{name}, {key}: {whole}, worst row {row}"
            assert row <= between_rows("bfloat16"), f"{name}, {key}: {whole}, worst row {row}"
            compared += 1
        del found
    assert compared


@pytest.mark.parametrize("question", QUESTIONS)
def test_torch_at_the_sizes_that_are_measured(question: str) -> None:
    device = torch_device()
    import torch

    from tiled_torch.commands.gpu.kernels import kernel_questions

    sizes = (TOKENS, HIDDEN, INTERMEDIATE, ROWS, VOCAB)
    check(device, kernel_questions(*sizes, torch.bfloat16, device.device)[question]())


# Little to sum, so that little is computed: what is tried are addresses.
@pytest.mark.parametrize("question", ["up", "down", "glu", "glu_backward", "linear", "dx", "weight_gradient"])
def test_torch_past_two_billion_elements(question: str) -> None:
    device = torch_device()
    import torch

    from tiled_torch.commands.gpu.kernels import kernel_questions

    assert LONG * WIDE > 2**31
    check(device, kernel_questions(LONG, 128, WIDE, 8, 128, torch.bfloat16, device.device)[question]())


def test_torch_logits_past_two_billion_elements() -> None:
    device = torch_device()
    import torch

    from tiled_torch.commands.gpu.kernels import cross_entropy

    rows = 2**31 // VOCAB + 256
    check(device, cross_entropy(rows, VOCAB, torch.bfloat16, device.device))


def jax_question(name: str, *sizes: int) -> Callable[[], Any]:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.fail("this test needs a GPU that JAX sees; set JAX_PLATFORMS=cuda,cpu")
    if not str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9."):
        pytest.skip("the Pallas kernels need a Hopper GPU")
    import jax.numpy as jnp

    from tiled_jax.commands.gpu.kernels import kernel_questions

    return kernel_questions(*sizes, jnp.bfloat16)[name]


def check_jax(question: Callable[[], Any]) -> None:
    from tiled_jax.commands.gpu.device import JaxDevice

    check(JaxDevice(), question())


@pytest.mark.parametrize("question", QUESTIONS)
def test_jax_at_the_sizes_that_are_measured(question: str) -> None:
    check_jax(jax_question(question, TOKENS, HIDDEN, INTERMEDIATE, ROWS, VOCAB))


@pytest.mark.parametrize("question", ["up", "down", "glu", "glu_backward", "linear", "dx"])
def test_jax_past_two_billion_elements(question: str) -> None:
    check_jax(jax_question(question, LONG, 128, WIDE, 8, 128))


def test_jax_logits_past_two_billion_elements() -> None:
    check_jax(jax_question("cross_entropy", 8, 128, 128, 2**31 // VOCAB + 256, VOCAB))
