"""The model of the time: its products are those of `costs.py`, its figures those worked out by hand."""

import pytest

from shared_specs.errors import SpecError
from shared_specs.kernels import roofline
from shared_specs.kernels.blocks import Paths
from shared_specs.kernels.roofline import GPUS, Work
from shared_specs.loss import costs as loss_costs
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan

LLAMA = mlp_costs.MLPShape(tokens=131072, hidden=4096, intermediate=14336, itemsize=2, weight_itemsize=2)
PLAN = ShardPlan(131072, 8192)
ODD = mlp_costs.MLPShape(tokens=1000, hidden=24, intermediate=56, out=24, itemsize=2, weight_itemsize=2)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
def test_products_are_those_that_the_costs_count(gated: bool, keep: float) -> None:
    shape = mlp_costs.MLPShape(tokens=1000, hidden=24, intermediate=56, gated=gated)
    plan = ShardPlan(1000, 96)
    for variant in ("tiled", "products"):
        work = roofline.mlp_work(shape, plan, variant=variant, keep=keep)
        assert work.flop == mlp_costs.mlp_flop(shape, plan, keep=keep)
    assert roofline.mlp_work(shape, plan, variant="plain").flop == mlp_costs.plain_flop(shape)
    for variant, kind in (("checkpoint", "non-reentrant"), ("checkpoint-reentrant", "reentrant")):
        assert roofline.mlp_work(shape, plan, variant=variant).flop == mlp_costs.plain_flop(shape, checkpointing=kind)


def test_products_of_a_tiling_that_recomputes_everything() -> None:
    thi = mlp_costs.thi(LLAMA)
    assert roofline.mlp_work(LLAMA, PLAN, variant="whole").flop == 12 * thi
    assert roofline.mlp_work(LLAMA, PLAN, variant="whole-in-checkpoint").flop == 15 * thi


def test_products_of_the_loss_are_those_that_the_costs_count() -> None:
    shape = loss_costs.LossShape(tokens=1000, hidden=24, vocab=333, itemsize=2, weight_itemsize=2)
    for variant in ("plain", "tiled"):
        work = roofline.loss_work(shape, ShardPlan(1000, 96), variant=variant)
        assert work.flop == loss_costs.loss_flop(shape, gradients_in_forward=True)


def test_bytes_of_one_shard_by_hand() -> None:
    t, h, i = 1000, 24, 56
    work = roofline.mlp_work(ODD, ShardPlan(t, t))
    # h from gate and up; dgate, dup and h from dh, gate and up; the second product of dx reads and writes it
    assert work.bytes == (3 * t * i + 6 * t * i + 2 * t * h) * 2
    assert work.launches == 4 + 9
    fused = roofline.mlp_work(ODD, ShardPlan(t, t), paths=Paths(up="dual", down="dgated"))
    assert fused.bytes == 2 * t * h * 2
    assert fused.products == work.products


def test_sums_over_shards_are_read_and_written_again() -> None:
    shape = mlp_costs.MLPShape(tokens=1000, hidden=24, intermediate=56, itemsize=2, weight_itemsize=2)
    one, four = (roofline.mlp_work(shape, ShardPlan(1000, t)).bytes for t in (1000, 250))
    weights = 3 * 24 * 56
    assert four - one == weights * 8 * 3 + weights * (4 + 2)


def test_a_product_takes_the_longer_of_arithmetic_and_operands() -> None:
    gpu = GPUS["h200"]
    large, thin = (Work(((m, 4096, 4096),)).seconds(gpu, 2).products for m in (8192, 1))
    assert large == 2 * 8192 * 4096 * 4096 / (989e12 * 0.80)
    assert thin == (4096 + 4096 * 4096 + 4096) * 2 / (4.8e12 * 0.90)


def test_figures_of_an_h200_at_the_widths_of_llama() -> None:
    """Whole milliseconds, worked out by hand from 791 TFLOP/s and 4.32 TB/s."""
    expected = {"plain": 188, "checkpoint": 231, "checkpoint-reentrant": 251, "tiled": 228, "whole-in-checkpoint": 311}
    for variant, milliseconds in expected.items():
        seconds = roofline.mlp_seconds(LLAMA, PLAN, GPUS["h200"], variant=variant).total
        assert round(seconds * 1e3) == milliseconds, variant
    loss = loss_costs.LossShape(tokens=32768, hidden=4096, vocab=128256, itemsize=2, weight_itemsize=2)
    seconds = roofline.loss_seconds(loss, ShardPlan(32768, 8192), GPUS["h200"], sweeps=2).total
    assert round(seconds * 1e3) == 138


def test_rows_of_the_kernels() -> None:
    shape = mlp_costs.MLPShape(tokens=512, hidden=24, intermediate=56, itemsize=2, weight_itemsize=2)
    thi = mlp_costs.thi(shape)
    flop = {"up": 2, "glu": 0, "glu_backward": 0, "down": 1, "linear": 1, "dx": 2, "weight_gradient": 1}
    for question, units in flop.items():
        assert roofline.shard_work(question, shape, fused=False).flop == units * thi
    assert roofline.shard_work("glu_backward", shape, fused=False).bytes == 6 * 512 * 56 * 2
    assert roofline.shard_work("down", shape, fused=True).bytes == 0
    with pytest.raises(SpecError, match="question must be among up, glu"):
        roofline.shard_work("sideways", shape, fused=False)


@pytest.mark.parametrize(
    ("device", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GeForce RTX 2080", None),
    ],
)
def test_a_gpu_is_known_by_the_name_of_its_device(device: str, key: str | None) -> None:
    assert roofline.gpu_named(device) == (GPUS[key] if key else None)


@pytest.mark.parametrize("said", ["rtx4090", "RTX 4090", "rtx-4090", "Rtx_4090"])
def test_a_gpu_is_known_by_what_users_call_it(said: str) -> None:
    assert roofline.gpu_of_users(said) == GPUS["rtx4090"]
    assert roofline.gpu_of_users("RTX A6000") == roofline.gpu_of_users("a6000") == GPUS["a6000"]
    assert roofline.gpu_of_users("4090GB") is roofline.gpu_of_users("h300") is None


def test_rates_of_gpus_are_in_proportion() -> None:
    """Products in 16 bits are several times those in float32, which are of GeForce and RTX cards 64 times those in float64."""
    for name, gpu in GPUS.items():
        assert 1.9 <= gpu.flops_16 / gpu.flops_32 <= 31, name
        if name.startswith(("rtx", "l40", "a6")):
            assert round(gpu.flops_32 / gpu.flops_64) in (63, 64, 65), name
        assert 40 <= gpu.flops_16 / gpu.bytes_per_second <= 450, name


def test_what_a_variant_does_not_have_is_refused() -> None:
    with pytest.raises(SpecError, match="keep and paths must be left out"):
        roofline.mlp_work(ODD, ShardPlan(1000, 100), variant="plain", keep=0.5)
    with pytest.raises(SpecError, match=r"variant must be among plain, .*, got fast"):
        roofline.mlp_work(ODD, ShardPlan(1000, 100), variant="fast")  # type: ignore[arg-type]


def test_the_last_norm_of_all_rows_costs_little_beside_the_loss_of_a_tenth_of_them():
    """What docs/how_it_works.md says, of Qwen3-8B at 65536 tokens."""
    tokens, hidden, vocab, inner, layers, heads = 65536, 4096, 151936, 12288, 36, (4096 + 2 * 1024 + 4096)
    norm = roofline.passing(2 * (2 + 3) * tokens * hidden).seconds(GPUS["h200"], 2).total  # x, y; x, dy, dx
    logits = roofline.product(tokens // 10, vocab, hidden).seconds(GPUS["h200"], 2).products
    forward = roofline.product(tokens, layers * (3 * inner + heads), hidden).seconds(GPUS["h200"], 2).products
    assert round(norm / (3 * logits), 2) == 0.02
    assert 5000 * norm < 3 * forward + 3 * logits
