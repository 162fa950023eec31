"""`check` of the decoder of `tiled_jax.models`, whose layers are stacked and scanned: it watches and changes no path."""

import jax
import pytest
from flax import nnx

from tests.tiny_model import tiny_config
from tiled_jax import Tiling, check
from tiled_jax.models import Llama, LlamaConfig, next_token_loss

CONFIG = LlamaConfig.from_hf(tiny_config())


@pytest.mark.deep
@pytest.mark.parametrize(
    ("scope", "paths"), [("mlp", {"layers.mlp": "tiled_mlp"}), ("block", {"layers": "tiled_block"})]
)
def test_a_right_training_is_equal(scope, paths):
    def tile(model):
        shapes = nnx.eval_shape(lambda: Llama(CONFIG, rngs=nnx.Rngs(0), tiling=Tiling(num_shards=3), scope=scope))
        return nnx.merge(nnx.split(shapes)[0], nnx.state(model))

    ids = jax.random.randint(jax.random.key(0), (2, 16), 0, 200)
    plain = Llama(CONFIG, rngs=nnx.Rngs(0), plain=True)
    report = check(plain, ids, tile=tile, step=next_token_loss)
    assert report.equal, str(report)
    assert report.paths == paths
    wrong = check(
        plain, ids, tile=tile, step=next_token_loss, plain_step=lambda model, ids: 1.01 * next_token_loss(model, ids)
    )
    assert (wrong.first.kind, wrong.first.name) == ("loss", "loss")
