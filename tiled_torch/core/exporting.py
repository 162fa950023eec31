"""Plans of a number of tokens that torch.export may leave open: the arithmetic of `shared_specs.shards` without a comparison.

A comparison of a symbol becomes a condition on it, and export refuses a program that holds for some lengths only. The plans
are those of the eager call but in two cases, in which shards are shorter than they need to be: an automatic plan is not given
up where no tiling would cost less, and the shards that a memory budget allows are those of very many tokens.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared_specs.config import Tiling
from shared_specs.core.budget import shard_tokens_within
from shared_specs.errors import UnsupportedError, error_text
from shared_specs.shards import TARGET_TOKENS, ShardPlan

_MANY = 2**31


def symbolic_plan(
    function: str,
    tokens: int,
    tiling: Tiling,
    *,
    device: str,
    peak: Callable[[ShardPlan], int],
    multiple_of: int = 1,
) -> ShardPlan:
    """peak: bytes of a plan, for a memory budget."""
    length: Any  # a number, or a symbol for one
    if tiling.shard_tokens is not None:
        length = tiling.shard_tokens
    elif tiling.memory_budget is not None:
        length = shard_tokens_within(function, tiling.memory_budget, _MANY, peak, multiple_of)
    else:
        most = tiling.num_shards
        if most is None:
            most = torch.sym_max(1, -(-tokens // TARGET_TOKENS[device]))
        length = torch.sym_max(1, -(-tokens // most))
    return ShardPlan(tokens, -(-length // multiple_of) * multiple_of)


def refuse_open_tokens(function: str, plan: ShardPlan, keep: float) -> None:
    """Raise UnsupportedError where how much is kept would be no number."""
    if isinstance(plan.tokens, torch.SymInt):
        rule = "0 in an export with a dynamic number of tokens"
        raise UnsupportedError(error_text(function, "keep", rule, keep, advice="Export with keep=0, or fixed shapes."))
