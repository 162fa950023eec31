"""Gloo ranks for all tests of the session: processes that have imported torch once serve every file that asks for them."""

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    """Two and four ranks, by their number; started by the first call."""
    with Ranks(world=2) as two, Ranks(world=4) as four:
        yield {2: two, 4: four}
