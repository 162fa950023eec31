"""`--memory-budget` against the model's sizes: whether the smallest shard fits, asked before anything is written."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

from shared_specs.app.models.decoders import DECODERS
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.config import HF_ACTIVATIONS
from shared_specs.loss import costs as loss_costs
from shared_specs.loss import sequence_costs as loss_sequence_costs
from shared_specs.mlp import costs as mlp_costs
from shared_specs.mlp import sequence_costs as mlp_sequence_costs
from shared_specs.shards import ShardPlan


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """How a half computes one shard: with the sizes of the model this decides its bytes.

    Attributes:
        device: "cpu" or "gpu". compiled: whether XLA makes the loop. kernels: whether Triton's kernels make the steps.
        multiple_of: tokens that every shard of an MLP is a multiple of.
        logit_columns: entries of the vocabulary -> columns that a shard of logits has for them.
    """

    device: str = "cpu"
    compiled: bool = False
    kernels: bool = False
    multiple_of: int = 1
    logit_columns: Callable[[int], int] = int


def check_budget(config: dict[str, Any], options: FinetuneOptions, buffers: Buffers) -> None:
    """Refuse a `--memory-budget` in which one of the tiled layers, the MLP or the loss, has no shard that fits.

    Args:
        config: complete, as `model_config.complete_config` makes it. options: `memory_budget` is given.

    Raises:
        InputError: with the least budget that is enough for both.
    """
    assert options.memory_budget is not None
    needed = max(_mlp_bytes(config, options, buffers), _loss_bytes(config, options, buffers))
    if options.memory_budget < needed:
        raise InputError(
            f"finetune: --memory-budget must be >= {needed} bytes, what the shortest shard of a tiled layer takes, "
            f"got {options.memory_budget}. Without it the plan chooses."
        )


def _mlp_bytes(config: dict[str, Any], options: FinetuneOptions, buffers: Buffers) -> int:
    """Return the bytes of the shortest shard of an MLP, or of the rows of one expert, which no kernel computes."""
    experts = DECODERS[config["model_type"]].experts
    if experts is not None:
        buffers = replace(buffers, kernels=False, multiple_of=1)
    intermediate = config["intermediate_size" if experts is None else experts.intermediate]
    shape = mlp_costs.MLPShape(
        tokens=_rows(options),
        hidden=config["hidden_size"],
        intermediate=-(-intermediate // options.tp),
        activation=HF_ACTIVATIONS.get(config["hidden_act"], "silu"),  # an unknown one is refused by the half itself
        itemsize=_itemsize(options),
    )
    if buffers.compiled:
        whole = partial(mlp_costs.compiled_peak_bytes, shape, device=buffers.device)
        split = partial(mlp_sequence_costs.compiled_sequence_peak_bytes, shape, device=buffers.device)
    else:
        whole = partial(mlp_costs.peak_bytes, shape, device=buffers.device, kernels=buffers.kernels)
        split = partial(mlp_sequence_costs.sequence_peak_bytes, shape, device=buffers.device, kernels=buffers.kernels)
    return _shortest(options, whole, split, buffers.multiple_of)


def _loss_bytes(config: dict[str, Any], options: FinetuneOptions, buffers: Buffers) -> int:
    entries = -(-config["vocab_size"] // options.tp)
    shape = loss_costs.LossShape(
        tokens=_rows(options),
        hidden=config["hidden_size"],
        vocab=buffers.logit_columns(entries),
        itemsize=_itemsize(options),
        copied=options.tp > 1,
    )
    needed = _of_loss(shape, options, buffers)
    if shape.vocab > entries and not shape.cast_bytes:
        needed += shape.hidden * shape.vocab * shape.itemsize  # the head with its padding, unless it is cast anyway
    return needed


def _of_loss(shape: loss_costs.LossShape, options: FinetuneOptions, buffers: Buffers) -> int:
    if buffers.compiled:
        whole = partial(loss_costs.compiled_loss_peak_bytes, shape, device=buffers.device)
        split = partial(loss_sequence_costs.compiled_sequence_loss_peak_bytes, shape, device=buffers.device)
    else:
        whole = partial(loss_costs.loss_peak_bytes, shape, device=buffers.device, kernels=buffers.kernels)
        split = partial(
            loss_sequence_costs.sequence_loss_peak_bytes, shape, device=buffers.device, kernels=buffers.kernels
        )
    return _shortest(options, whole, split)


def _shortest(
    options: FinetuneOptions,
    whole: Callable[[ShardPlan], int],
    split: Callable[[SequencePlan], int],
    multiple_of: int = 1,
) -> int:
    """Return the peak of the shortest shard, whose tokens come from every rank of `--tp` where these divide them."""
    rows, ranks = _rows(options), options.tp
    if ranks > 1 and rows % ranks == 0:
        return split(SequencePlan((rows // ranks,) * ranks, multiple_of // gcd(multiple_of, ranks)))
    return whole(ShardPlan(rows, multiple_of))


def _rows(options: FinetuneOptions) -> int:
    """Return tokens of a step that one rank has, or share the ranks of `--tp`."""
    return options.batch // (options.dp * options.fsdp) * (options.tokens // options.cp)


def _itemsize(options: FinetuneOptions) -> int:
    return 2 if options.dtype == "bfloat16" else 4
