"""Which parallel configurations are refused, with one text for both halves."""

import pytest

from shared_specs import SpecError, UnsupportedError
from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig, TensorParallel
from shared_specs.plans.checks import TensorSizes, check_divides, check_parallel_config, mesh_axes

TENSOR, DDP = TensorParallel(), DataParallel(engine="ddp")
BOTH = {"dp_shard": 2, "tp": 2}
REFUSED = [
    (ParallelConfig(), {"tp": 2}, "mesh must be of axes that config names, got tp"),
    (ParallelConfig(tensor=TENSOR), {"x": 2}, "config.tensor.axis must be an axis of the mesh, one of x, got 'tp'"),
    (ParallelConfig(tensor=TENSOR), {}, "mesh must be one with the axis 'tp' of config.tensor.axis, got no axes"),
    (ParallelConfig(tensor=TENSOR), BOTH, "mesh must be of axes that config names (tp), got dp_shard, tp"),
    (ParallelConfig(data=DDP, tensor=TENSOR), BOTH, 'mesh must be of one axis with engine="ddp", got dp_shard, tp'),
    (
        ParallelConfig(data=DataParallel(replicate_axis="dp_shard")),
        {"dp_shard": 2},
        "config.data.shard_axis must be another axis than config.data.replicate_axis, got 'dp_shard'",
    ),
    (
        ParallelConfig(data=DataParallel(engine="ddp", cpu_offload=True)),
        {"dp_shard": 2},
        'config.data.cpu_offload must be left at False with engine="ddp", got True',
    ),
    (
        ParallelConfig(data=DataParallel(engine="zero")),  # type: ignore[arg-type]
        {"dp_shard": 2},
        "config.data.engine must be one of fsdp, ddp, got 'zero'",
    ),
    (
        ParallelConfig(data=DataParallel(param_dtype="int8")),
        {"dp_shard": 2},
        "config.data.param_dtype must be one of float32, bfloat16, float16, float64, got 'int8'",
    ),
    (
        ParallelConfig(checkpointing=Checkpointing(mode="layers")),
        {},
        'config.checkpointing.every must be given with mode="layers", got None',
    ),
    (
        ParallelConfig(checkpointing=Checkpointing(every=2)),
        {},
        'config.checkpointing.every must be left out with mode="full", got 2',
    ),
    (
        ParallelConfig(checkpointing=Checkpointing(mode="layers", every=0)),
        {},
        "config.checkpointing.every must be >= 1, got 0",
    ),
]


def refused(config, axes, half, unsupported=None):
    with pytest.raises((SpecError, TypeError, UnsupportedError)) as caught:
        check_parallel_config("parallelize", config, axes, half, unsupported)
    return str(caught.value)


@pytest.mark.parametrize("half", ["torch", "jax"])
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused_with_the_same_words(number, half):
    config, axes, words = REFUSED[number]
    assert refused(config, axes, half).startswith(f"parallelize: {words}")


def test_fields_of_the_other_half():
    overlapped = ParallelConfig(tensor=TensorParallel(asynchronous=True))
    assert "config.tensor.asynchronous must be left at False in tiled_jax, got True" in refused(overlapped, BOTH, "jax")
    assert "config.tensor.asynchronous must be False without config.compile" in refused(overlapped, {"tp": 2}, "torch")
    assert "config.compile must be left at None in tiled_jax" in refused(ParallelConfig(compile=Compile()), {}, "jax")
    offloaded = ParallelConfig(checkpointing=Checkpointing(offload=True))
    for half in ("torch", "jax"):
        assert check_parallel_config("parallelize", offloaded, {}, half) is offloaded
    assert "config.donate must be left at True in tiled_torch" in refused(ParallelConfig(donate=False), {}, "torch")


def test_what_a_loss_is_the_mean_of_and_micro_batches():
    axes, tokens = {"dp_shard": 2}, ParallelConfig(data=DataParallel(loss_mean="tokens"))
    for half in ("torch", "jax"):
        assert check_parallel_config("parallelize", tokens, axes, half) is tokens
    other = ParallelConfig(data=DataParallel(loss_mean="ranks"))
    assert check_parallel_config("parallelize", other, axes, "torch") is other
    assert "config.data.loss_mean must be None or 'tokens' in tiled_jax, got 'ranks'" in refused(other, axes, "jax")
    wrong = ParallelConfig(data=DataParallel(loss_mean="sequences"))  # type: ignore[arg-type]
    assert "config.data.loss_mean must be one of ranks, tokens, got 'sequences'" in refused(wrong, axes, "torch")
    staged = ParallelConfig(data=DataParallel(loss_mean="tokens", pipeline=True))
    assert "config.data.pipeline must be False with config.data.loss_mean='tokens'" in refused(staged, axes, "torch")
    parts = ParallelConfig(micro_batches=2)
    assert check_parallel_config("parallelize", parts, {}, "jax") is parts
    assert "config.micro_batches must be left at 1 in tiled_torch, got 2" in refused(parts, {}, "torch")
    assert "config.micro_batches must be >= 1, got 0" in refused(ParallelConfig(micro_batches=0), {}, "jax")


def test_kinds():
    assert refused(3, {}, "torch") == "parallelize: config must be a ParallelConfig, got int."
    wrong = ParallelConfig(tensor=3)  # type: ignore[arg-type]
    assert refused(wrong, {}, "jax") == "parallelize: config.tensor must be a TensorParallel or None, got int."
    wrong = ParallelConfig(tensor=TensorParallel(sequence_parallel="no"))  # type: ignore[arg-type]
    assert "config.tensor.sequence_parallel must be True or False, got str" in refused(wrong, {"tp": 2}, "torch")


def test_what_the_machine_cannot_do_is_asked_for_last():
    """A configuration that could work nowhere is said to be that, before this machine's own limits."""
    config, reasons = ParallelConfig(float8=True), {"float8": "The package torchao is not installed."}
    assert refused(config, {}, "torch", reasons).endswith("got True. The package torchao is not installed.")
    assert "mesh must be" in refused(config, {"tp": 2}, "torch", reasons)
    assert check_parallel_config("parallelize", config, {}, "torch", {"float8": None}) is config
    assert check_parallel_config("parallelize", ParallelConfig(), {}, "torch", reasons)


def test_accepted():
    config = ParallelConfig(
        tensor=TENSOR,
        data=DataParallel(replicate_axis="r", context_axis="cp"),
        checkpointing=Checkpointing(mode="products"),
    )
    axes = {"r": 2, "dp_shard": 2, "cp": 2, "tp": 2}
    assert check_parallel_config("parallelize", config, axes, "torch") is config
    assert set(mesh_axes(config).values()) == set(axes)


def test_sizes():
    check_divides("parallelize", TensorSizes(even={"heads": 4}, vocab=5), "tp", 4)
    with pytest.raises(SpecError, match="heads must be a multiple of the 4 ranks of the mesh axis 'tp', got 6"):
        check_divides("parallelize", TensorSizes(even={"heads": 6}), "tp", 4)
    with pytest.raises(SpecError, match="vocab_size must be >= the 4 ranks of the mesh axis 'tp', got 3"):
        check_divides("parallelize", TensorSizes(vocab=3), "tp", 4)
