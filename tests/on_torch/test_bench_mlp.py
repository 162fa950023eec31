"""What `bench` times beside the implementations: the products alone."""

import pytest
import torch

from tests.on_torch.counting import GemmFlop
from tiled_torch.commands.peers import PlainMLP, products_alone


@pytest.mark.parametrize(("recomputed", "units"), [(False, 18), (True, 22)])
@pytest.mark.parametrize("shard_tokens", [4, 16])
def test_products_alone(shard_tokens: int, recomputed: bool, units: int) -> None:
    """As many as the plain MLP's, or as those of one that recomputes gate and up; shards may be uneven."""
    mlp, x, dy = PlainMLP(6, 12, torch.float32), torch.randn(10, 6), torch.randn(10, 6)
    run = products_alone(mlp, x, dy, shard_tokens, recomputed=recomputed)
    with GemmFlop() as counted:
        run()
    assert counted.flop == units * 10 * 6 * 12
