"""The loss with its Pallas kernel lowered for CUDA at the sizes of Llama 3 8B: alone, mapped, differentiated, sharded."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, LossResult, Tiling
from shared_specs.kernels.blocks import CANDIDATES, Blocks
from tests.kernels.jax_interpreted import FINDS_RACES
from tiled_jax import tiled_linear_cross_entropy
from tiled_jax.loss.kernels import cross_entropy as kernel
from tiled_jax.parallel import vocab_parallel_linear_cross_entropy

T, H, V = 2048, 4096, 128256
PLAIN = LossOptions()
EVERYTHING = LossOptions(label_smoothing=0.1, logit_softcap=30.0, logit_scale=-0.5, outputs=("entropy",))


@pytest.fixture
def kernels_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend as on a Hopper."""
    monkeypatch.setattr("tiled_jax.backends._no_hopper", lambda: None)


def lowered(fn: Any, *shapes: Any) -> str:
    return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [(PLAIN, jnp.bfloat16), (EVERYTHING, jnp.float16), (EVERYTHING, jnp.float32)],
    ids=["plain", "everything", "everything in float32"],
)
def test_every_launch_in_place(options: LossOptions, dtype: Any) -> None:
    rows = 64
    number, index = (jax.ShapeDtypeStruct((rows,), kind) for kind in (jnp.float32, jnp.int32))
    everything = options is EVERYTHING
    weight = jax.ShapeDtypeStruct((V,), jnp.float32)
    columns = kernel.Columns(index, index, weight) if everything else kernel.Columns(index)
    k = kernel.RowCoefficients(*[number] * (6 if everything else 2))
    logits = jax.ShapeDtypeStruct((rows, V), dtype)
    launches: dict[Any, tuple[Any, ...]] = {
        kernel.statistics: (columns,),
        kernel.gradient: (columns, k, number, number),
        kernel.statistics_and_gradient: (columns, k),
    }
    for launch, operands in launches.items():
        text = lowered(partial(launch, options=options), logits, *operands)
        assert text.count("mosaic_gpu_v2") == 1
        assert ("output_operand_alias" in text) == (launch is not kernel.statistics)


@pytest.mark.parametrize("blocks", CANDIDATES["pallas"]["cross_entropy"][1:], ids=str)
def test_what_tune_may_choose_lowers_for_cuda(blocks: Blocks) -> None:
    number, index = (jax.ShapeDtypeStruct((64,), kind) for kind in (jnp.float32, jnp.int32))
    launch = partial(kernel.statistics_and_gradient, options=PLAIN, blocks=blocks)
    operands = (
        jax.ShapeDtypeStruct((64, V), jnp.bfloat16),
        kernel.Columns(index),
        kernel.RowCoefficients(number, number),
    )
    assert lowered(launch, *operands).count("mosaic_gpu_v2") == 1


def operands(*lead: int) -> list[jax.ShapeDtypeStruct]:
    shapes = ((*lead, T, H), jnp.bfloat16), ((H, V), jnp.bfloat16), ((*lead, T), jnp.int32)
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def step(**options: Any) -> Any:
    loss = partial(tiled_linear_cross_entropy, tiling=Tiling(shard_tokens=512), **options)
    return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(loss(*a))), argnums=(0, 1))


@pytest.mark.parametrize(("reduction", "launches"), [("mean", 1), ("none", 2)])
def test_value_and_gradients(reduction: Any, launches: int, kernels_without_a_device: None) -> None:
    """One pass in forward, or statistics there and the gradient in backward; "auto" takes the kernel."""
    assert lowered(step(loss=LossOptions(reduction=reduction)), *operands()).count("mosaic_gpu_v2") == launches


def test_vmap(kernels_without_a_device: None) -> None:
    assert lowered(jax.vmap(step(), (0, None, 0)), *operands(3)).count("mosaic_gpu_v2") == 1


def test_second_order(kernels_without_a_device: None) -> None:
    def slope(*arguments: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in step()(*arguments)[1])

    assert "stablehlo.dot_general" in lowered(jax.grad(slope, argnums=(0, 1)), *operands())


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("check_vma", "sequence", "kind", "loss"),
    [
        (True, False, AxisType.Auto, LossOptions(z_loss=1e-3)),
        (False, True, AxisType.Explicit, LossOptions(z_loss=1e-3)),
        (True, True, AxisType.Explicit, LossOptions(reduction="none", outputs=("entropy",))),
        (False, False, AxisType.Auto, LossOptions(reduction="none", outputs=("entropy",))),
    ],
    ids=["mean", "mean-sequence", "none-sequence", "none"],
)
def test_the_vocabulary_over_devices(
    check_vma: bool, sequence: bool, kind: AxisType, loss: LossOptions, kernels_without_a_device: None
) -> None:
    """Statistics, what the devices exchange of them, and the gradient: V / 4 = 32064 is padded to 32128."""
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(kind,) * 2)
    tokens = P(("data", "tp")) if sequence else P("data")
    each = loss.reduction == "none"

    def on_device(*arguments: jax.Array) -> Any:
        options: dict[str, Any] = {"sequence_parallel": sequence, "tiling": Tiling(shard_tokens=256)}
        result = vocab_parallel_linear_cross_entropy(*arguments, loss=loss, axis_name="tp", **options)
        return result if each else lax.psum(result, "data")

    specs = P(*tokens, None), P(None, "tp"), tokens
    out: Any = LossResult(tokens, entropy=tokens) if each else P()
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)

    def run(x: jax.Array, weight: jax.Array, targets: jax.Array) -> Any:
        result, pull = jax.vjp(lambda x, weight: mapped(x, weight, targets), x, weight)
        return result, pull(jax.tree.map(jnp.ones_like, result))

    with jax.set_mesh(mesh):
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
            for a, spec in zip(operands(), specs, strict=True)
        ]
        text = lowered(run, *shapes)
    assert text.count("mosaic_gpu_v2") == 2
    # From jax 0.11 on not in place of logits whose type says that devices differ: `_plan` counts it.
    assert ("output_operand_alias" in text) == (not (check_vma and FINDS_RACES))
