"""What `python -m tiled_torch check` is given in tests."""

from typing import Any

from tests.check.torch_faults import FAULTS
from tests.check.torch_models import tiny, tokens
from tiled_torch import tile_model


def right() -> dict[str, Any]:
    return dict(model=tiny(), batch=tokens(), steps=3)


def wrong() -> dict[str, Any]:
    return FAULTS["wrong_activation"].make()


def strict() -> dict[str, Any]:
    return right() | {"tile": lambda model: tile_model(model, strict=True, num_shards=3)}


def without_batch() -> dict[str, Any]:
    return dict(model=tiny())


def unknown() -> dict[str, Any]:
    return right() | {"tiles": 3}


def lossless() -> dict[str, Any]:
    return right() | {"step": lambda model, batch: None}


def failing() -> dict[str, Any]:
    raise ValueError("no batch today")


def broken() -> dict[str, Any]:
    return dict(model=tiny(), batch={"ids": None, "labels": None})


def nothing() -> None: ...


NUMBER = 3
