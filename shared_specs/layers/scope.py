"""How much of a decoder layer runs a shard of tokens at a time, and the options that have no meaning for all of it."""

from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError, error_text, fail

SCOPES = ("mlp", "block")


def check_scope(function: str, scope: object) -> None:
    """Check that it is "mlp" (the MLP and the loss) or "block" (also everything else in a layer but attention).

    Raises:
        SpecError: it is not.
    """
    if scope not in SCOPES:
        fail(function, "scope", "'mlp' or 'block'", repr(scope))


def check_block_tiling(function: str, tiling: Tiling, backend: str = "auto") -> None:
    """Check options for scope="block": a layer that is one function keeps its input alone, and is cut by tokens.

    Raises:
        UnsupportedError: one has no meaning there.
    """
    options = {
        "keep": (tiling.keep, 0.0),
        "memory_budget": (tiling.memory_budget, None),
        "deterministic": (tiling.deterministic, False),
        "token_axes": (tiling.token_axes, None),
        "backend": (backend, "auto"),
    }
    for name, (value, default) in options.items():
        if value != default:
            advice = "Pass num_shards or shard_tokens alone, or scope='mlp'."
            raise UnsupportedError(error_text(function, name, f"{default} with scope='block'", value, advice=advice))


def check_block_ranks(function: str, *, split_by_compiler: bool) -> None:
    """Check that no compiler has to split the layers: each is one function, which splits itself.

    Args:
        split_by_compiler: whether tensor parallelism is left to it, with a loss that is written for one device.
    Raises:
        UnsupportedError: it is.
    """
    if split_by_compiler:
        rule, got = "'mlp' with tensor parallelism and loss_fn", "'block'"
        advice = "Leave loss_fn out: the model's own loss splits such layers itself."
        raise UnsupportedError(error_text(function, "the model's scope", rule, got, advice=advice))
