"""The ranks of `--cp`: how `--context 2d` makes rings of groups of them, once the model's heads are known."""

from math import gcd
from typing import Any

from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.layers.ring import ring_multiple


def context_axes(options: FinetuneOptions, heads: int) -> dict[str, int]:
    """Return the axes of the mesh that cut sequences, name to size: none, one, or that of the rings and the one inside.

    With `--context 2d` as many ranks as can exchange tokens for heads: the most that divide `--cp` as well as the heads that
    every rank of `--tp` has. They come side by side, so that rings go from one group of them to the next.

    Args:
        heads: query heads of the model.
    """
    if options.cp == 1:
        return {}
    if options.context != "2d":
        return {"cp": options.cp}
    inside = gcd(options.cp, heads // options.tp)
    return {"ring": options.cp // inside, "cp": inside}


def context_of(axes: dict[str, int], options: FinetuneOptions) -> dict[str, Any]:
    """Return the fields of `DataParallel` that say how the ranks of `axes` attend."""
    if not axes:
        return {}
    first, *others = axes
    return {"context_axis": (first, *others) if others else first, "context": options.context}


def check_context(config: dict[str, Any], options: FinetuneOptions) -> None:
    """Refuse a `--context 2d` that would be nothing but one of the others, and tokens that its ranks cannot share.

    Args:
        config: complete, as `model_config.complete_config` makes it.

    Raises:
        InputError: with the name of the other, or what the tokens must be a multiple of.
    """
    heads = config["num_attention_heads"]
    if options.context != "2d" or heads % options.tp:  # of which `parallelize` says what is wrong
        return
    axes = context_axes(options, heads)
    ranks = f"The {options.cp} ranks of --cp"
    left = (
        f"the {heads} heads of the model" if options.tp == 1 else f"the {heads // options.tp} heads of a rank of --tp"
    )
    if axes["ring"] == 1:
        raise _other("ulysses", f"{ranks} divide {left}, and can exchange tokens for all of them.")
    if axes["cp"] == 1:
        raise _other("ring", f"{ranks} and {left} have no divisor in common.")
    parts = ring_multiple(axes["ring"], axes["cp"])
    if options.tokens % parts:
        shape = f"{axes['ring']} places of a ring take two runs of as many tokens, which {axes['cp']} ranks share."
        raise InputError(f"finetune: --tokens must be a multiple of {parts}, got {options.tokens}. The {shape}")


def _other(name: str, why: str) -> InputError:
    return InputError(f"finetune: --context must be {name} with this model and these ranks, got 2d. {why}")
