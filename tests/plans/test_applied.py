"""The lines that `parallelize` logs in both halves."""

from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig, TensorParallel
from shared_specs.plans.applied import applied_lines


def test_one_line_for_each_step() -> None:
    config = ParallelConfig(
        tensor=TensorParallel(sequence_parallel=False),
        checkpointing=Checkpointing(mode="layers", every=2),
        compile=Compile(ends=True),
        data=DataParallel(replicate_axis="dp_replicate", context_axis="cp", param_dtype="bfloat16", cpu_offload=True),
        float8=True,
    )
    axes = {"dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 8}
    assert applied_lines(config, axes, {"tiled_mlp": 32, "tiled_linear_cross_entropy": 1}) == [
        "tiling: 32 x tiled_mlp, 1 x tiled_linear_cross_entropy",
        "float8: products of the layers",
        "tensor parallelism: tp=8, sequence_parallel=False, loss_parallel=True",
        "context parallelism: cp=2",
        "checkpointing: mode=layers, every=2",
        "compile: each block, ends=True",
        "data parallelism: fsdp over dp_replicate=2 x dp_shard=4 x cp=2, param_dtype=bfloat16, reduce_dtype=float32, "
        "reshard=default, cpu_offload=True",
    ]


def test_nothing_of_what_is_left_out() -> None:
    assert applied_lines(ParallelConfig(), {}, {}) == []
    ddp = ParallelConfig(data=DataParallel(engine="ddp", reduce_dtype=None))
    assert applied_lines(ddp, {"dp_shard": 2}, {}) == ["data parallelism: ddp over dp_shard=2, reduce_dtype=None"]
    alone = ParallelConfig(data=DataParallel(context_axis="cp"), checkpointing=Checkpointing(mode="op"))
    assert applied_lines(alone, {"dp_shard": 2, "cp": 1}, {})[0] == "checkpointing: mode=op"
