"""What users do to a model in JAX gives with a tiled model what it gives with the untiled one, put through the same habit.

A habit is a few lines: it gets a fresh model, does something to it and returns what is compared: losses, gradients, parameters,
logits. The same function runs the untiled model with the same weights, and what it returns is the reference. The models are
`models.Llama` ("mlp" and "block" are its scopes), a small module with `TiledMLP` and `TiledLinearCrossEntropy` ("module"), the
same in linen ("linen"), and a Flax model of somebody else's under `tile_model` ("theirs"). Forms share what was compiled.
"""

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from shared_specs.config import LossOptions, Tiling
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tests.mlp.jax_untiled import cross_entropy, mlp
from tests.models.jax_other_models import Config, Decoder, GatedMLP
from tests.tiny_model import tiny_config
from tiled_jax import TiledLinearCrossEntropy, TiledMLP, linen, tile_model
from tiled_jax.models import Llama, LlamaConfig, next_token_loss
from tiled_jax.models.mlp import PlainMLP

Habit = Callable[[Any], Any]
VOCAB, H, I, LAYERS, SHARDS = 40, 16, 24, 2, 4  # noqa: E741
RANDOM = np.random.default_rng(0)
IDS = jnp.asarray(RANDOM.integers(0, VOCAB, (2, 9)), jnp.int32)
OTHER_IDS = jnp.asarray(RANDOM.integers(0, VOCAB, (2, 9)), jnp.int32)
X = jnp.asarray(RANDOM.standard_normal((2, 9, H)), jnp.float32)
LABELS = IDS.at[0, 3].set(-100)
CONFIG = LlamaConfig.from_hf(
    tiny_config(
        vocab_size=VOCAB,
        hidden_size=H,
        intermediate_size=I,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
)


# The models.


@cache
def llama_parts(form: str, config: LlamaConfig = CONFIG, dtype: str = "float32") -> Any:
    """Graph and state of a Llama in a form, no parameter at the value that it begins with."""
    tiling = Tiling(num_shards=SHARDS)
    options: dict[str, Any] = {"plain": True} if form == "plain" else {"scope": form, "tiling": tiling}
    return nnx.split(noisy(Llama(config, dtype=dtype, **options, rngs=nnx.Rngs(0))))


def noisy(model: Any) -> Any:
    """The model, with something added to every parameter: zeros and ones hide mistakes."""
    random = np.random.default_rng(7)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda a: a + jnp.asarray(0.1 * random.standard_normal(a.shape), a.dtype), state))
    return model


def llama(form: str, config: LlamaConfig = CONFIG, dtype: str = "float32") -> Any:
    return nnx.merge(*copied(llama_parts(form, config, dtype)))


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


class PlainHead(nnx.Module):
    """The parameters of `TiledLinearCrossEntropy`, and the loss with all logits at once."""

    def __init__(self, hidden: int, vocab: int, loss: LossOptions = LossOptions(), *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (hidden, vocab), jnp.float32))
        self.loss = loss

    def __call__(self, x: jax.Array, targets: jax.Array) -> Any:
        return cross_entropy(x, self.weight[...].astype(x.dtype), targets, loss=self.loss)


class Net(nnx.Module):
    """loss(x + mlp(norm(x))), the smallest module with all that is tiled."""

    def __init__(self, form: str, loss: LossOptions = LossOptions()) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.RMSNorm(H, rngs=rngs)
        if form == "plain":
            self.mlp: Any = PlainMLP(H, I, bias=True, rngs=rngs)
            self.head: Any = PlainHead(H, VOCAB, loss, rngs=rngs)
        else:
            self.mlp = TiledMLP(H, I, bias=True, num_shards=SHARDS, rngs=rngs)
            self.head = TiledLinearCrossEntropy(H, VOCAB, loss=loss, num_shards=SHARDS, rngs=rngs)

    def __call__(self, x: jax.Array, targets: jax.Array = LABELS) -> jax.Array:
        return self.head(x + self.mlp(self.norm(x)), targets)


class PlainLinenMLP(nn.Module):
    """The parameters of `linen.TiledMLP`, and three products."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        sizes = {"w_gate": (H, I), "w_up": (H, I), "w_down": (I, H)}
        w_gate, w_up, w_down = (self.param(name, init, shape) for name, shape in sizes.items())
        return mlp(x, w_gate, w_up, w_down)


class PlainLinenHead(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(x, self.param("weight", nn.initializers.lecun_normal(), (H, VOCAB)), targets)


class LinenNet(nn.Module):
    """`Net` in linen."""

    form: str

    def setup(self) -> None:
        plain = self.form == "plain"
        self.norm = nn.RMSNorm()
        self.mlp = PlainLinenMLP() if plain else linen.TiledMLP(H, I, num_shards=SHARDS)
        self.head = PlainLinenHead() if plain else linen.TiledLinearCrossEntropy(H, VOCAB, num_shards=SHARDS)

    def __call__(self, x: jax.Array, targets: jax.Array = LABELS) -> jax.Array:
        return self.head(x + self.mlp(self.norm(x)), targets)


def theirs(form: str) -> Any:
    config = Config()
    model = Decoder(*(GatedMLP(config, nnx.Rngs(i)) for i in range(LAYERS)), rngs=nnx.Rngs(5))
    return model if form == "plain" else tile_model(model, num_shards=SHARDS, strict=True)


def module(form: str) -> Any:
    model = Net(form)
    nnx.update(model, nnx.state(noisy(Net("plain"))))
    return model


MODELS: dict[str, Callable[[str], Any]] = {
    "mlp": llama,
    "block": llama,
    "module": module,
    "linen": LinenNet,
    "theirs": theirs,
}


# How habits are put down and compared.

HABITS: dict[str, list[Any]] = {}  # of each file


def habit(*forms: str, deep: str = "") -> Callable[[Habit], Habit]:
    """Put a function on the list once for each form; `deep`: forms that are."""

    def put_down(do: Habit) -> Habit:
        for form in forms:
            marks = [pytest.mark.deep] if form in deep.split() else []
            HABITS.setdefault(do.__module__, []).append(pytest.param(do, form, id=f"{do.__name__}-{form}", marks=marks))
        return do

    return put_down


@cache
def reference(do: Habit, kind: Callable[[str], Any]) -> Any:
    return outcome(do, kind("plain"))


def outcome(do: Habit, model: Any) -> Any:
    """What a habit returns, as arrays by their path, or the error that it raised."""
    try:
        found = do(model)
    except Exception as error:
        return error
    leaves, _ = jax.tree_util.tree_flatten_with_path(plainly(found))
    return {jax.tree_util.keystr(path): np.asarray(jax.device_get(leaf)) for path, leaf in leaves}


def plainly(found: Any) -> Any:
    """States as dictionaries of arrays by path."""
    if isinstance(found, nnx.State):
        flat = nnx.to_flat_state(found)
        return {".".join(map(str, path)): v[...] if isinstance(v, nnx.Variable) else v for path, v in flat}
    if isinstance(found, dict):
        return {name: plainly(value) for name, value in found.items()}
    return found


def every_habit(module: str) -> Callable[[Any], Any]:
    """Mark a test as that of every habit that is put down in a file."""
    marks = (
        pytest.mark.filterwarnings("ignore:Llama. scope='block' tiles the MLP of a layer alone:UserWarning"),
        pytest.mark.filterwarnings("ignore:.* runs through tile, which recomputes all of it:UserWarning"),
        pytest.mark.filterwarnings("ignore:.* its loss does not run through tiled_linear_cross_entropy:UserWarning"),
        pytest.mark.parametrize(("do", "form"), HABITS[module]),
    )
    return lambda test: reduce(lambda marked, mark: mark(marked), marks, test)


def check_habit(do: Habit, form: str) -> None:
    """Fail where a tiled model gives something else than the untiled one."""
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        expected, found = reference(do, MODELS[form]), outcome(do, MODELS[form](form))
    for each in (expected, found):
        if isinstance(each, Exception):
            raise each
    assert found.keys() == expected.keys()
    assert any(np.any(a) for a in expected.values()), "nothing is compared"
    for name, a in expected.items():
        assert found[name].dtype == a.dtype, name
        if "gradient" in name:
            assert np.any(a), f"{name} is zero"
        if np.issubdtype(a.dtype, np.floating) or a.dtype == jnp.bfloat16:
            assert_within(found[name], a, between(a.dtype.name), name)
        else:
            np.testing.assert_array_equal(found[name], a, name)


# What habits have in common.


def loss_of(model: Any, batch: Any = IDS) -> jax.Array:
    """The loss of any of the models."""
    if isinstance(model, Llama):
        return model(batch, labels=batch) if isinstance(batch, jax.Array) else next_token_loss(model, batch)
    if isinstance(model, Net):
        return model(X, batch)
    logits = model(batch % 16)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:] % 16).mean()


@nnx.jit
def stepped(model: Any, batch: Any) -> Any:
    """Loss and gradients, compiled once for all models of one form."""
    return nnx.value_and_grad(loss_of)(model, batch)


@nnx.jit
def logits_of(model: Any, tokens: Any) -> jax.Array:
    return model(tokens)


def trained(model: Any, transform: Any, *, wrt: Any = nnx.Param, batches: Any = (IDS, OTHER_IDS)) -> dict[str, Any]:
    """The losses and parameters of steps of an optimizer, which have moved."""
    optimizer, losses, before = nnx.Optimizer(model, transform, wrt=wrt), [], nnx.state(model, nnx.Param)
    before = copied(before)
    for batch in batches:
        loss, gradients = stepped(model, batch)
        optimizer.update(model, nnx.state(gradients, wrt) if wrt is not nnx.Param else gradients)
        losses.append(loss)
    after = nnx.state(model, nnx.Param)
    moved = [bool(np.any(np.asarray(a != b))) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
    assert any(moved)
    return {"losses": losses, "parameters": after, "moved": moved}


def of_step(model: Any, batch: Any = IDS) -> dict[str, Any]:
    loss, gradients = stepped(model, batch)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@nnx.jit
def evaluated(model: Any, batch: Any) -> jax.Array:
    return loss_of(model, batch)


def stacked(make: Callable[[nnx.Rngs], Any]) -> Any:
    """A part of every layer of a Llama, with a leading dim of layers."""
    return noisy(nnx.split_rngs(splits=LAYERS)(nnx.vmap(make, in_axes=0, out_axes=0))(nnx.Rngs(1)))
