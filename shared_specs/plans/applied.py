"""What `parallelize` did to a model, in one line for each thing, for the log of either half."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from shared_specs.config import ParallelConfig


def applied_lines(config: ParallelConfig, axes: Mapping[str, int], tiled: Mapping[str, int]) -> list[str]:
    """Return the lines, in the order of the steps; nothing of what was left out, and no option that one half alone has and that
    stands at its default.

    Args:
        axes: of the mesh, name -> ranks.
        tiled: how modules are tiled -> how many are.
    Example:
        >>> applied_lines(ParallelConfig(float8=True), {}, {"tiled_mlp": 3})
        ['tiling: 3 x tiled_mlp', 'float8: products of the layers']
    """
    return [f"{name}: {', '.join(words)}" for name, words in _steps(config, axes, tiled) if words]


def _steps(
    config: ParallelConfig, axes: Mapping[str, int], tiled: Mapping[str, int]
) -> Iterator[tuple[str, list[str]]]:
    many_first = sorted(tiled.items(), key=lambda each: (-each[1], each[0]))
    yield "tiling", [f"{count} x {path}" for path, count in many_first]
    yield "float8", ["products of the layers"] * config.float8
    tensor, data, checkpointing = config.tensor, config.data, config.checkpointing
    if tensor is not None:
        yield (
            "tensor parallelism",
            [_axis(tensor.axis, axes), *_options(tensor, "sequence_parallel", "loss_parallel", asynchronous=False)],
        )
    if data is not None and any(axes[axis] > 1 for axis in data.context_axes):
        kind = [] if data.context == "ulysses" else [data.context]
        yield "context parallelism", [" x ".join(_axis(axis, axes) for axis in data.context_axes), *kind]
    if checkpointing is not None:
        yield "checkpointing", _options(checkpointing, "mode", every=None, offload=False)
    if config.compile is not None:
        yield "compile", ["each block", *_options(config.compile, ends=False, compiled_autograd=False)]
    if data is not None:
        over = [] if data.replicate_axis is None else [_axis(data.replicate_axis, axes)]
        over += [_axis(data.shard_axis, axes)]
        over += [_axis(axis, axes) for axis in data.context_axes]
        sharded = ("param_dtype", "reduce_dtype", "reshard") if data.engine == "fsdp" else ("reduce_dtype",)
        yield (
            "data parallelism",
            [
                f"{data.engine} over {' x '.join(over)}",
                *_options(data, *sharded, cpu_offload=False, pipeline=False, loss_mean=None),
            ],
        )
    if config.micro_batches > 1:
        yield "gradient accumulation", [f"{config.micro_batches} micro-batches"]


def _axis(name: str, axes: Mapping[str, int]) -> str:
    return f"{name}={axes[name]}"


def _options(part: Any, *always: str, **defaults: Any) -> list[str]:
    """name=value of the fields named, and of those that differ from their defaults."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    shown = [*always, *(name for name, default in defaults.items() if values[name] != default)]
    return [f"{name}={values[name]}" for name in shown]
