"""qwix (LoRA and quantisation, as tunix does them) around tiled modules: as untiled, or refused by name.

qwix exchanges products while a model runs. Quantised or adapted first and tiled then, a module computes and trains as untiled;
a `TiledMLP` whose products it would exchange is refused, and what it quantised leaves nothing behind for other models.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tiled_jax import TiledMLP, tile

qwix = pytest.importorskip("qwix")
# What qwix 0.1.8 calls in Flax is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HIDDEN, INNER = 16, 24
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, HIDDEN)), jnp.float32)
ALL, FIRST = ".*", ".*first.*"


@pytest.fixture(autouse=True)
def promotion_of_users() -> Any:
    """qwix mixes int8 and float32."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class PlainMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate, self.up = (nnx.Linear(HIDDEN, INNER, use_bias=False, rngs=rngs) for _ in "12")
        self.down = nnx.Linear(INNER, HIDDEN, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Model(nnx.Module):
    def __init__(self, mlp: type) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.mlp = TiledMLP(HIDDEN, INNER, num_shards=2, rngs=rngs) if mlp is TiledMLP else PlainMLP(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mlp(self.first(x))


def changed(model: Any, how: str, where: str) -> Any:
    """The model as qwix makes it."""
    if how == "lora":
        return qwix.apply_lora_to_model(
            model, qwix.LoraProvider(module_path=where, rank=4, alpha=8.0), X, rngs=nnx.Rngs(1)
        )
    if how == "ptq":
        return qwix.quantize_model(
            model, qwix.PtqProvider([qwix.QuantizationRule(module_path=where, weight_qtype="int8")]), X
        )
    rule = qwix.QtRule(module_path=where, weight_qtype="int8", act_qtype="int8")
    return qwix.quantize_model(model, qwix.QtProvider([rule]), X)


def found_of(model: Any, how: str) -> list[Any]:
    """Result, and the gradients of what is trained."""
    if how == "ptq":
        return [model(X)]
    wrt = nnx.DiffState(0, nnx.LoRAParam if how == "lora" else nnx.Param)
    return [model(X), *jax.tree.leaves(nnx.grad(lambda model: jnp.sum(model(X) ** 2), argnums=wrt)(model))]


def near(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert_within(np.asarray(ours), np.asarray(theirs), between("float32"), "the values")


@pytest.mark.parametrize("how", ["lora", "ptq", "qt"])
def test_tiled_after_qwix_it_computes_as_untiled(how: str) -> None:
    model = changed(Model(PlainMLP), how, ALL)
    expected = found_of(model, how)
    model.mlp = tile(model.mlp, num_shards=2)
    near(found_of(model, how), expected)
    if how != "ptq":
        assert all(np.abs(np.asarray(gradient)).max() > 0 for gradient in expected[1:] if how == "qt")


def test_layers_with_adapters_may_be_those_of_a_tiled_mlp() -> None:
    model = changed(Model(PlainMLP), "lora", ALL)
    expected = found_of(model, "lora")
    model.mlp = TiledMLP.from_linears(model.mlp.gate, model.mlp.up, model.mlp.down, num_shards=2)
    near(found_of(model, "lora"), expected)


@pytest.mark.parametrize("how", ["lora", "ptq", "qt"])
def test_a_tiled_mlp_whose_products_would_be_exchanged_is_refused(how: str) -> None:
    model = Model(TiledMLP)
    before = found_of(model, "qt")
    with pytest.raises(UnsupportedError, match="tiled_mlp: the product with w_gate is exchanged while the model runs"):
        changed(model, how, ALL)(X)
    after = found_of(model, "qt")
    for ours, theirs in zip(after, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("how", ["lora", "ptq", "qt"])
def test_rules_for_other_modules_leave_it_tiled(how: str) -> None:
    tiled, plain = (found_of(changed(Model(mlp), how, FIRST), how) for mlp in (TiledMLP, PlainMLP))
    near([tiled[0], *sorted(tiled[1:], key=np.sum)], [plain[0], *sorted(plain[1:], key=np.sum)])
