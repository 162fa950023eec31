"""Runs of the command in these tests draw a small empty picture: drawing is most of the time of a run of a tiny model."""

from collections.abc import Iterator

import pytest

from shared_specs.app.finetune import loop
from tests.fake_trainer import empty_picture

DRAWN = ("test_plots", "test_demo")  # what looks at pictures


@pytest.fixture(scope="module", autouse=True)
def _empty_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        if request.path.stem not in DRAWN:
            patched.setattr(loop, "plot_runs", empty_picture)
        yield
