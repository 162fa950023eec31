"""What `bench` times beside the implementations: the products alone."""

import pytest
import torch

from tests.on_torch.counting import GemmFlop
from tiled_torch.commands.peers import PlainMLP, products_alone


@pytest.mark.parametrize(
    ("tokens", "shard_tokens", "recomputed", "units"),
    [(10, 4, 0.0, 18), (10, 4, 1.0, 22), (10, 16, 0.0, 18), (10, 16, 1.0, 22), (16, 4, 0.5, 20)],
)
def test_products_alone(tokens: int, shard_tokens: int, recomputed: float, units: int) -> None:
    """As many as the plain MLP's, or as those of one that recomputes gate and up; shards may be uneven."""
    mlp, x, dy = PlainMLP(6, 12, torch.float32), torch.randn(tokens, 6), torch.randn(tokens, 6)
    run = products_alone(mlp, x, dy, shard_tokens, recomputed=recomputed)
    with GemmFlop() as counted:
        run()
    assert counted.flop == units * tokens * 6 * 12
