"""The loss compiled ahead of time for an H200: what its kernel needs, and the temporary bytes of the whole."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from shared_specs.config import LossOptions, Tiling
from shared_specs.kernels.blocks import CANDIDATES, Blocks
from shared_specs.loss import costs as loss_costs
from shared_specs.shards import ShardPlan
from tests.aot import h200, ptx
from tests.aot.conftest import DUMP
from tiled_jax import tiled_linear_cross_entropy
from tiled_jax.loss.kernels import cross_entropy
from tiled_jax.loss.kernels.cross_entropy import Columns, RowCoefficients

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
T, SHARD, H, V = 16384, 2048, 4096, 128256  # Llama-3-8B
known: set[str] = set()
# For the versions of requirements/aot.txt.
TABLE = json.loads(Path(__file__).with_name("h200_loss_kernels.json").read_text())

PLAIN = LossOptions()
EVERYTHING = LossOptions(label_smoothing=0.1, logit_softcap=30.0, logit_scale=0.5, outputs=("entropy",))
numbers, indices = h200.shape(F32, SHARD), h200.shape(jnp.int32, SHARD)
plain = Columns(indices), RowCoefficients(numbers, numbers)
full = Columns(indices, indices, h200.shape(F32, V)), RowCoefficients(*[numbers] * 6)


def logits(dtype: Any) -> jax.ShapeDtypeStruct:
    return h200.shape(dtype, SHARD, V)


KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{
        f"{dtype.__name__} both": (
            partial(cross_entropy.statistics_and_gradient, options=PLAIN),
            (logits(dtype), *plain),
        )
        for dtype in (BF16, F16, F32)
    },
    "statistics": (partial(cross_entropy.statistics, options=PLAIN), (logits(BF16), plain[0])),
    "gradient": (partial(cross_entropy.gradient, options=PLAIN), (logits(BF16), *plain, numbers, numbers)),
    "everything, both": (
        partial(cross_entropy.statistics_and_gradient, options=EVERYTHING),
        (logits(BF16), full[0], full[1]._replace(d=None, entropy=None)),
    ),
    "everything, statistics": (partial(cross_entropy.statistics, options=EVERYTHING), (logits(BF16), full[0])),
    "everything, gradient": (
        partial(cross_entropy.gradient, options=EVERYTHING),
        (logits(BF16), full[0], full[1]._replace(of_lse=None), numbers, numbers),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_kernel_needs_is_in_the_table(name: str) -> None:
    """No spill in a loop over the vocabulary."""
    list(h200.kernels(DUMP, known))
    fn, shapes = KERNELS[name]
    donated = () if "statistics" in name else (0,)
    program = jax.jit(fn, donate_argnums=donated).lower(*shapes).compile({"xla_gpu_autotune_level": 0})
    (kernel,) = h200.kernels(DUMP, known)
    print(name, kernel)
    assert kernel == TABLE[name]
    assert (kernel["target"], kernel["spilled_bytes"]) == (90, 0)
    assert program.memory_analysis().temp_size_in_bytes <= 2**20, "the gradient is not written over the logits"


WIDE = {"bfloat16 both", "float32 both", "gradient", "everything, both", "everything, gradient"}
TRIED = [(name, blocks) for name in sorted(WIDE) for blocks in CANDIDATES["pallas"]["cross_entropy"][1:]]


@pytest.mark.parametrize(("name", "blocks"), TRIED, ids=str)
def test_what_tune_may_choose_spills_nothing(name: str, blocks: Blocks) -> None:
    list(h200.kernels(DUMP, known))
    fn, shapes = KERNELS[name]
    jax.jit(partial(fn, blocks=blocks), donate_argnums=0).lower(*shapes).compile({"xla_gpu_autotune_level": 0})
    (kernel,) = h200.kernels(DUMP, known)
    print(name, blocks, kernel)
    assert (kernel["target"], kernel["spilled_bytes"]) == (90, 0)


@pytest.mark.parametrize("vocab", [V, 50304])
def test_whole_blocks_of_logits_move_16_bytes_a_thread(vocab: int) -> None:
    """Also of a vocabulary of 50257, whose columns are padded: what is narrower is the end of a row and its numbers."""
    before = set(DUMP.glob("*.ptx"))
    launch = partial(cross_entropy.statistics_and_gradient, options=PLAIN)
    h200.compiled(launch, h200.shape(BF16, SHARD, vocab), *plain)
    (found,) = set(DUMP.glob("*.ptx")) - before
    sizes = ptx.counts(found.read_text())
    tail = [size for size in (vocab % 4096 & bit for bit in (2048, 1024, 512, 256, 128)) if size]
    narrow = sum(size < 1024 for size in tail)  # loaded twice and stored once each, beside eight numbers of a row
    assert sizes[16] >= 3 * 4096 * 2 // (128 * 16)
    assert sum(count for size, count in sizes.items() if size < 16) <= 3 * narrow + 8


@pytest.fixture
def kernels_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend as on the machine that is compiled for."""
    monkeypatch.setattr("tiled_jax.backends._no_hopper", lambda: None)


def temp_bytes(backend: str, dtype: Any = BF16, vocab: int = V, weight_dtype: Any = None, **options: Any) -> int:
    loss = LossOptions(**options)
    tiled = partial(tiled_linear_cross_entropy, tiling=Tiling(shard_tokens=SHARD), backend=backend, loss=loss)

    def total(*arguments: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(tiled(*arguments)))

    weight = h200.shape(weight_dtype or dtype, H, vocab)
    shapes = h200.shape(dtype, T, H), weight, h200.shape(jnp.int32, T)
    return h200.compiled(jax.value_and_grad(total, argnums=(0, 1)), *shapes).memory_analysis().temp_size_in_bytes


def bound(dtype: Any = BF16, vocab: int = V, weight_dtype: Any = None) -> int:
    itemsize, weight_itemsize = (jnp.dtype(d).itemsize for d in (dtype, weight_dtype or dtype))
    shape = loss_costs.LossShape(tokens=T, hidden=H, vocab=vocab, itemsize=itemsize, weight_itemsize=weight_itemsize)
    return loss_costs.compiled_loss_peak_bytes(shape, ShardPlan(T, SHARD), device="gpu")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_temporary_bytes(dtype: Any, reduction: Any, kernels_without_a_device: None) -> None:
    """Within the formula by either way, and with the kernel one shard of logits, over which their gradient is written."""
    found = {backend: temp_bytes(backend, dtype, reduction=reduction) for backend in ("xla", "pallas")}
    print(dtype.__name__, reduction, {name: value / 2**20 for name, value in found.items()}, bound(dtype) / 2**20)
    assert max(found.values()) <= bound(dtype)
    assert found["pallas"] <= found["xla"] + 1024  # XLA places a few numbers of the loop otherwise


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_temporary_bytes_inside_shard_map(dtype: Any, kernels_without_a_device: None) -> None:
    """One more shard of logits: no kernel may write over them there. The formula counts it for 16 bits alone."""

    def on_device(x: jax.Array, weight: jax.Array, targets: jax.Array) -> Any:
        options: dict[str, Any] = {"tiling": Tiling(shard_tokens=SHARD), "backend": "pallas"}
        loss = partial(tiled_linear_cross_entropy, loss=LossOptions(reduction="sum"), **options)
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, weight, targets)
        return jax.lax.psum(value, "x"), gradients

    tokens = PartitionSpec("x")
    specs = tokens, PartitionSpec(), tokens
    fn = jax.shard_map(on_device, mesh=h200.MESH, in_specs=specs, out_specs=(PartitionSpec(), specs[:2]))
    shapes = h200.shape(dtype, T, H), h200.shape(dtype, H, V), h200.shape(jnp.int32, T)
    found = h200.compiled(fn, *shapes).memory_analysis().temp_size_in_bytes
    logits, outside = SHARD * V * jnp.dtype(dtype).itemsize, temp_bytes("pallas", dtype, reduction="sum")
    print(dtype.__name__, found / 2**20, outside / 2**20, bound(dtype) / 2**20)
    assert outside < found <= outside + logits
    assert found <= bound(dtype) + (logits if dtype == F32 else 0)


def test_temporary_bytes_of_master_weights(kernels_without_a_device: None) -> None:
    found = temp_bytes("pallas", weight_dtype=F32)
    print(found / 2**20, bound(weight_dtype=F32) / 2**20)
    assert found <= bound(weight_dtype=F32)


def test_temporary_bytes_of_a_vocabulary_that_is_padded(kernels_without_a_device: None) -> None:
    """By one copy of the weight."""
    vocab = 50257
    found = temp_bytes("pallas", vocab=vocab)
    print(found / 2**20, bound(vocab=50304) / 2**20, H * 50304 * 2 / 2**20)
    assert found <= bound(vocab=50304) + H * 50304 * 2
