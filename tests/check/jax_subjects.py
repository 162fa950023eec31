"""What `python -m tiled_jax check` is given in tests."""

from typing import Any

from tests.check.jax_faults import FAULTS
from tests.check.jax_models import TinyLM, tokens


def right() -> dict[str, Any]:
    return dict(model=TinyLM, batch=tokens(), steps=1)


def wrong() -> dict[str, Any]:
    return FAULTS["wrong_activation"].make()


def without_batch() -> dict[str, Any]:
    return dict(model=TinyLM())


def unknown() -> dict[str, Any]:
    return right() | {"tiles": 3}


def lossless() -> dict[str, Any]:
    return right() | {"step": lambda model, batch: None}


def failing() -> dict[str, Any]:
    raise ValueError("no batch today")


def broken() -> dict[str, Any]:
    return dict(model=TinyLM(), batch={"ids": None, "labels": None})


def nothing() -> None: ...


NUMBER = 3
