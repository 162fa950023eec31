"""What `parallelize` requires of a configuration, a mesh and a model, before it touches either: names and integers only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Never, get_args, get_type_hints

from shared_specs.config import (
    CONTEXT_KINDS,
    HALVES,
    Checkpointing,
    CheckpointingMode,
    Compile,
    DataParallel,
    Half,
    LossMean,
    ParallelConfig,
    Reshard,
    TensorParallel,
)
from shared_specs.core.checks import FLOAT_DTYPES, check_count
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.layers.ring import ring_multiple

# Fields that one half has and the other refuses unless left at their defaults.
ONE_HALF: dict[str, Half] = {
    "tensor.asynchronous": "torch",
    "compile": "torch",
    "float8": "torch",
    "donate": "jax",
    "data.pipeline": "torch",
    "micro_batches": "jax",
}


def check_parallel_config(
    function: str,
    config: object,
    axes: Mapping[str, int],
    half: Half,
    unsupported: Mapping[str, str | None] | None = None,
) -> ParallelConfig:
    """Return the configuration, once it can work on a mesh of these axes (name -> ranks).

    Args:
        unsupported: option, named as in ONE_HALF ("float8", "tensor.asynchronous", ...) -> why this machine cannot do it,
            or None where it can; such an option raises UnsupportedError when it is asked for.
    """
    if not isinstance(config, ParallelConfig):
        fail_type(function, "config", "a ParallelConfig", type(config).__name__)
    _check_kinds(function, config)
    for path, owner in ONE_HALF.items():
        _check_half(function, config, path, owner, half)
    _check_tensor(function, config, axes)
    _check_checkpointing(function, config.checkpointing)
    _check_data(function, config, axes)
    _check_compile(function, config)
    _check_mesh(function, config, axes)
    check_count(function, "config.micro_batches", config.micro_batches)
    _check_loss_mean(function, config.data, half)
    for path, reason in (unsupported or {}).items():
        value, default = _value(config, path)
        if reason is not None and value != default:
            text = error_text(function, f"config.{path}", f"{default} here", value)
            raise UnsupportedError(f"{text} {reason}")
    return config


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """The sizes of a model that tensor parallelism divides: name, as the model's configuration has it -> value.

    Args:
        even: sizes that have to be multiples of the ranks (heads, kv heads, intermediate size).
        vocab: entries of a vocabulary that is split, unevenly where it has to be; one a rank at least.
    """

    even: Mapping[str, int] = field(default_factory=dict[str, int])
    vocab: int | None = None


def check_divides(function: str, sizes: TensorSizes, axis: str, ranks: int) -> None:
    """Check that every size of a model that tensor parallelism divides is a multiple of the ranks.

    Raises:
        SpecError: one is not, or there are fewer vocabulary entries than ranks.
    """
    for name, size in sizes.even.items():
        if size % ranks:
            advice = f"Take a mesh whose axis '{axis}' divides it."
            fail(function, name, f"a multiple of the {ranks} ranks of the mesh axis '{axis}'", size, advice=advice)
    if sizes.vocab is not None and sizes.vocab < ranks:
        fail(function, "vocab_size", f">= the {ranks} ranks of the mesh axis '{axis}'", sizes.vocab)


def check_context_heads(function: str, heads: int, ranks: Mapping[str, int]) -> None:
    """Check that tensor and context parallelism together divide the query heads; key heads are repeated where needed.

    Args:
        ranks: by name of the mesh axes that divide the heads, their ranks; a ring, which does not, counts as one.

    Raises:
        SpecError: they do not.
    """
    together = prod(ranks.values())
    if heads % together:
        advice = "Each attends with heads of its own. Take a mesh that divides them."
        axes = ", ".join(axis for axis, size in ranks.items() if size > 1)
        rule = f"a multiple of the {together} ranks of the mesh axes {axes}"
        fail(function, "num_attention_heads", rule, heads, advice=advice)


def check_context_tokens(
    function: str,
    argument: str,
    tokens: int,
    ranks: int,
    shape: tuple[int, ...],
    *,
    order: str = "tokens",
    inside: int = 1,
) -> None:
    """Check that every rank of a context-parallel group gets the same number of tokens of a sequence.

    Args:
        ranks: in all. order: in which tokens are dealt out. inside: with "zigzag" how many ranks share a place in the ring.

    Raises:
        SpecError: `tokens` is no multiple of the ranks, or, dealt "zigzag", of the parts that are dealt out.
    """
    parts = ranks if order == "tokens" else ring_multiple(ranks // inside, inside)
    if tokens % parts:
        held = "the ranks that each hold a run" if order == "tokens" else f"{ranks} ranks that hold two runs in a ring"
        rule = f"of a multiple of {parts} tokens, for {held} of them"
        advice = "Pad the sequences, with labels that are ignored."
        fail(function, argument, rule, tokens, shapes=f"{argument} is {show_shape(shape)}", advice=advice)


def check_ring(function: str, dropout: float) -> None:
    """Check that nothing is drawn at random of the scores that travel round a ring.

    Args:
        dropout: of attention's weights.

    Raises:
        UnsupportedError: something is.
    """
    if dropout:
        advice = 'Set it to 0, or take context="ulysses".'
        raise UnsupportedError(error_text(function, "attention_dropout", "0 with rings", dropout, advice=advice))


def refuse_context(function: str, computes: str, axis: str | tuple[str, ...]) -> Never:
    """Refuse context parallelism for a model that does not say how its tokens are split.

    `computes`: the part of the model that needs whole sequences, as the message names it.

    Raises:
        UnsupportedError: always.
    """
    rule = "None for a model that does not say how its tokens are split"
    advice = f"{computes} computes with whole sequences."
    raise UnsupportedError(error_text(function, "config.data.context_axis", rule, repr(axis), advice=advice))


def refuse_fused(function: str, model: str, projections: str) -> Never:
    """Refuse tensor parallelism for a model whose projections are fused, as its parameters' names say.

    Raises:
        UnsupportedError: always.
    """
    got = f"TensorParallel for {model}"
    advice = f"Its {projections} are fused: a rank's part would be of other heads. Shard it with config.data."
    raise UnsupportedError(
        error_text(function, "config.tensor", "None where projections are fused", got, advice=advice)
    )


def refuse_context_kind(function: str, computes: str, kind: str, kinds: Iterable[str]) -> Never:
    """Refuse a kind of context parallelism that a model has no way for.

    Raises:
        UnsupportedError: always.
    """
    rule = f"one of {', '.join(kinds)} for {computes}"
    raise UnsupportedError(error_text(function, "config.data.context", rule, repr(kind)))


def mesh_axes(config: ParallelConfig) -> dict[str, str]:
    """Field that names an axis -> the axis, of everything the configuration asks for."""
    found = {} if config.tensor is None else {"config.tensor.axis": config.tensor.axis}
    if config.data is not None:
        for name in ("replicate_axis", "shard_axis"):
            axis = getattr(config.data, name)
            if axis is not None:
                found[f"config.data.{name}"] = axis
        several = len(config.data.context_axes) > 1
        for place, axis in enumerate(config.data.context_axes):
            found["config.data.context_axis" + f"[{place}]" * several] = axis
    return found


def check_axis_order(function: str, data: DataParallel | None, axes: Iterable[str]) -> None:
    """Check that a mesh has the axes over which weights are replicated and sharded in this order, replicas first.

    Raises:
        SpecError: it has them in another order.
    """
    given = () if data is None else (data.replicate_axis, data.shard_axis, *data.context_axes)
    wanted = [axis for axis in given if axis is not None]
    found = [axis for axis in axes if axis in wanted]
    if found != wanted:
        advice = "Replicas are outermost, parts of the tokens innermost."
        fail(function, "mesh", f"with its axes in the order {', '.join(wanted)}", ", ".join(found), advice=advice)


_PARTS = {"tensor": TensorParallel, "checkpointing": Checkpointing, "compile": Compile, "data": DataParallel}


def _check_kinds(function: str, config: ParallelConfig) -> None:
    for name, kind in _PARTS.items():
        part = getattr(config, name)
        if part is None:
            continue
        if not isinstance(part, kind):
            fail_type(function, f"config.{name}", f"a {kind.__name__} or None", type(part).__name__)
        _check_fields(function, f"config.{name}", part, kind)
    _check_fields(function, "config", config, ParallelConfig)


def _check_fields(function: str, path: str, part: object, kind: type) -> None:
    for name, declared in get_type_hints(kind).items():
        value = getattr(part, name)
        if declared is bool and not isinstance(value, bool):
            fail_type(function, f"{path}.{name}", "True or False", type(value).__name__)
        if declared in (str, str | None) and not isinstance(value, declared):
            words = "a string" if declared is str else "a string or None"
            fail_type(function, f"{path}.{name}", words, type(value).__name__)


def _value(config: ParallelConfig, path: str) -> tuple[Any, Any]:
    """Return the value at `path` and its default; the default twice where the part that holds it is left out."""
    *outer, name = path.split(".")
    part: Any = getattr(config, outer[0]) if outer else config
    default = getattr(_PARTS[outer[0]]() if outer else ParallelConfig(), name)
    return (default if part is None else getattr(part, name)), default


def _check_half(function: str, config: ParallelConfig, path: str, owner: Half, half: Half) -> None:
    value, default = _value(config, path)
    if half != owner and value != default:
        assert owner in HALVES
        advice = f"Only tiled_{owner} has it."
        fail(function, f"config.{path}", f"left at {default} in tiled_{half}", value, advice=advice)


def _check_tensor(function: str, config: ParallelConfig, axes: Mapping[str, int]) -> None:
    tensor = config.tensor
    if tensor is None:
        return
    _check_axis(function, "config.tensor.axis", tensor.axis, axes)
    if tensor.asynchronous and config.compile is None:
        advice = "Products are overlapped with their communication by the compiler: pass compile=Compile()."
        fail(function, "config.tensor.asynchronous", "False without config.compile", True, advice=advice)


def _check_checkpointing(function: str, checkpointing: Checkpointing | None) -> None:
    if checkpointing is None:
        return
    _check_one_of(function, "config.checkpointing.mode", checkpointing.mode, get_args(CheckpointingMode))
    check_count(function, "config.checkpointing.every", checkpointing.every)
    by_layers = checkpointing.mode == "layers"
    if by_layers and checkpointing.every is None:
        fail(
            function, "config.checkpointing.every", 'given with mode="layers"', None, advice="2 is every second layer."
        )
    if not by_layers and checkpointing.every is not None:
        rule = f'left out with mode="{checkpointing.mode}"'
        fail(function, "config.checkpointing.every", rule, checkpointing.every, advice='It belongs to mode="layers".')


def _check_data(function: str, config: ParallelConfig, axes: Mapping[str, int]) -> None:
    data = config.data
    if data is None:
        return
    _check_one_of(function, "config.data.engine", data.engine, ("fsdp", "ddp"))
    _check_one_of(function, "config.data.reshard", data.reshard, get_args(Reshard))
    for name in ("param_dtype", "reduce_dtype"):
        if getattr(data, name) is not None:
            _check_one_of(function, f"config.data.{name}", getattr(data, name), FLOAT_DTYPES)
    if data.engine == "ddp":
        _check_ddp(function, data, axes)
    _check_context(function, data)
    if data.context_axis is not None and data.pipeline:
        advice = "A stage of a pipeline is not given the tokens that are to be split."
        fail(function, "config.data.pipeline", "False with config.data.context_axis", True, advice=advice)
    taken: dict[str, str] = {}
    for name, axis in mesh_axes(config).items():
        _check_axis(function, name, axis, axes)
        if axis in taken:
            fail(function, name, f"another axis than {taken[axis]}", repr(axis))
        taken[axis] = name


def _check_loss_mean(function: str, data: DataParallel | None, half: Half) -> None:
    if data is None or data.loss_mean is None:
        return
    _check_one_of(function, "config.data.loss_mean", data.loss_mean, get_args(LossMean))
    if half == "jax" and data.loss_mean == "ranks":
        advice = "The loss of a step is one sum over one count, of all devices."
        fail(function, "config.data.loss_mean", "None or 'tokens' in tiled_jax", repr(data.loss_mean), advice=advice)
    if data.loss_mean == "tokens" and data.pipeline:
        advice = "A stage of a pipeline is not given the labels."
        fail(function, "config.data.pipeline", "False with config.data.loss_mean='tokens'", True, advice=advice)


def _check_context(function: str, data: DataParallel) -> None:
    _check_one_of(function, "config.data.context", data.context, CONTEXT_KINDS)
    axis: object = data.context_axis
    name = "config.data.context_axis"
    several: tuple[Any, ...] = axis if isinstance(axis, tuple) else ()
    pair = len(several) == 2 and all(isinstance(each, str) for each in several)
    if not (axis is None or isinstance(axis, str) or pair):
        fail_type(function, name, "a string, a pair of strings or None", repr(axis))
    if axis is None and data.context != "ulysses":
        advice = "Name the axis whose ranks share a sequence."
        fail(function, name, f'given with config.data.context="{data.context}"', None, advice=advice)
    if axis is not None and pair != (data.context == "2d"):
        rule = "a pair of axes, that of the rings first," if data.context == "2d" else "one axis"
        fail(function, name, f'{rule} with config.data.context="{data.context}"', repr(axis))


def _check_ddp(function: str, data: DataParallel, axes: Mapping[str, int]) -> None:
    """DDP replicates the weights over one axis; what belongs to sharded weights has no meaning there."""
    for name in ("replicate_axis", "context_axis", "context", "param_dtype", "cpu_offload", "reshard", "pipeline"):
        value, default = getattr(data, name), getattr(DataParallel(), name)
        if value != default:
            fail(function, f"config.data.{name}", f'left at {default!r} with engine="ddp"', repr(value))
    if len(axes) > 1:
        advice = 'Use engine="fsdp": its replicate_axis makes replicas beside other axes.'
        fail(function, "mesh", 'of one axis with engine="ddp"', ", ".join(axes), advice=advice)


def _check_compile(function: str, config: ParallelConfig) -> None:
    if config.compile is not None and config.compile.compiled_autograd:
        engine = None if config.data is None else config.data.engine
        if engine != "ddp":
            rule = 'False without data=DataParallel(engine="ddp")'
            fail(function, "config.compile.compiled_autograd", rule, True, advice="It compiles DDP's reductions.")


def _check_mesh(function: str, config: ParallelConfig, axes: Mapping[str, int]) -> None:
    """An axis that nothing uses would leave its ranks with weights that drift apart."""
    named = mesh_axes(config).values()
    unused = [axis for axis in axes if axis not in named]
    if unused:
        rule = "of axes that config names" + (f" ({', '.join(named)})" if named else "")
        advice = "Leave the other axes out of the mesh, or name them in config.data."
        fail(function, "mesh", rule, ", ".join(axes), advice=advice)


def _check_axis(function: str, name: str, axis: str, axes: Mapping[str, int]) -> None:
    if not axes:
        fail(function, "mesh", f"one with the axis {axis!r} of {name}", "no axes")
    if axis not in axes:
        fail(function, name, "an axis of the mesh, one of " + ", ".join(axes), repr(axis))


def _check_one_of(function: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        fail(function, name, "one of " + ", ".join(allowed), repr(value))
