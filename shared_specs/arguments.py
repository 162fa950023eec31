"""One argument of a public function or class, and those that many of them share: what `signatures.py` is written in."""

from dataclasses import dataclass
from typing import Any

from shared_specs.config import HALVES, Half


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()
VARIADIC: Any = "*"  # the "default" of `*args`
KEYWORDS: Any = "**"  # that of `**kwargs`


@dataclass(frozen=True)
class Argument:
    """One argument; `halves` names where it exists (a framework's own, like rngs or device, exists in one)."""

    name: str
    default: Any = REQUIRED
    keyword_only: bool = False
    halves: tuple[Half, ...] = HALVES


def keyword(name: str, default: Any = REQUIRED, halves: tuple[Half, ...] = HALVES) -> Argument:
    return Argument(name, default, keyword_only=True, halves=halves)


ONLY_TORCH: tuple[Half, ...] = ("torch",)
ONLY_JAX: tuple[Half, ...] = ("jax",)
TILING = (keyword("num_shards", None), keyword("keep", 0.0), keyword("tiling", None), keyword("backend", "auto"))
