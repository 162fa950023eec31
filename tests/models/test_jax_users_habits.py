"""What users do to a model in JAX gives with a tiled model what it gives with the untiled one, put through the same habit.

A habit is a few lines: it gets a fresh model, does something to it and returns what is compared: losses, gradients, parameters,
logits. The same function runs the untiled model with the same weights, and what it returns is the reference. The models are
`models.Llama` ("mlp" and "block" are its scopes), a small module with `TiledMLP` and `TiledLinearCrossEntropy` ("module"), the
same in linen ("linen"), and a Flax model of somebody else's under `tile_model` ("theirs"). Forms share what was compiled.
"""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.flatten_util import ravel_pytree

from shared_specs.config import LossOptions, Tiling
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tests.mlp.jax_untiled import cross_entropy, mlp
from tests.models.jax_other_models import Config, Decoder, GatedMLP
from tests.tiny_model import tiny_config
from tiled_jax import TiledLinearCrossEntropy, TiledMLP, linen, tile_model, tiling_paths
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

HABITS: list[Any] = []


def habit(*forms: str, deep: str = "") -> Callable[[Habit], Habit]:
    """Put a function on the list once for each form; `deep`: forms that are."""

    def put_down(do: Habit) -> Habit:
        for form in forms:
            marks = [pytest.mark.deep] if form in deep.split() else []
            HABITS.append(pytest.param(do, form, id=f"{do.__name__}-{form}", marks=marks))
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


@pytest.fixture(autouse=True)
def _promotion_as_users_have_it() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.filterwarnings("ignore:Llama. scope='block' tiles the MLP of a layer alone:UserWarning")
@pytest.mark.filterwarnings("ignore:.* its loss does not run through tiled_linear_cross_entropy:UserWarning")
@pytest.mark.deep_but(50)
@pytest.mark.parametrize(("do", "form"), HABITS)
def test_habit(do: Habit, form: str) -> None:
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


def test_the_models_are_tiled() -> None:
    """And the untiled ones are not."""
    paths = {
        "mlp": {"layers.mlp": "tiled_mlp"},
        "block": {"layers": "tiled_block"},
        "module": {"mlp": "tiled_mlp"},
        "theirs": {f"layers.{i}.mlp": "tiled_mlp" for i in range(LAYERS)},
    }
    for form, expected in paths.items():
        assert tiling_paths(MODELS[form](form)) == expected
        assert tiling_paths(MODELS[form]("plain")) == {}


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


# Optimizers.


@habit("mlp", "block", "module", "theirs", deep="mlp block theirs")
def trains_with_adamw_and_a_schedule(model: Any) -> Any:
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 1, 4)
    return trained(model, optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(schedule, weight_decay=0.1)))


@habit("mlp", "block", deep="block")
def trains_with_momentum(model: Any) -> Any:
    return trained(model, optax.sgd(0.1, momentum=0.9, nesterov=True))


@habit("block", "module", deep="block")
def trains_with_lion(model: Any) -> Any:
    return trained(model, optax.lion(1e-3))


@habit("module", deep="module")
def accumulates_with_multi_steps(model: Any) -> Any:
    return trained(model, optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2), batches=(IDS, OTHER_IDS, IDS, IDS))


@habit("block", "module", deep="block")
def masks_weight_decay_of_vectors(model: Any) -> Any:
    mask = lambda params: jax.tree.map(lambda a: a.ndim > 2, params)  # noqa: E731
    return trained(model, optax.adamw(1e-2, weight_decay=0.5, mask=mask))


@habit("mlp", "block", deep="block")
def gives_each_part_an_optimizer(model: Any) -> Any:
    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "mlp" if "mlp" in str(path) else "rest", params)

    return trained(model, optax.multi_transform({"mlp": optax.sgd(0.1), "rest": optax.adam(1e-2)}, labels))


@habit("mlp", "module")
def adds_gradients_of_micro_batches(model: Any) -> Any:
    found = [stepped(model, batch)[1] for batch in (IDS, OTHER_IDS)]
    total = jax.tree.map(lambda a, b: (a + b) / 2, *found)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    optimizer.update(model, total)
    return {"parameters": nnx.state(model), "gradients": nnx.state(total)}


@habit("block", "theirs", deep="block theirs")
def keeps_a_moving_average(model: Any) -> Any:
    average, optimizer = copied(nnx.state(model, nnx.Param)), nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    for batch in (IDS, OTHER_IDS):
        optimizer.update(model, stepped(model, batch)[1])
        average = optax.incremental_update(nnx.state(model, nnx.Param), average, 0.1)
    nnx.update(model, average)
    return {"loss": stepped(model, IDS)[0], "average": average}


@habit("mlp", deep="mlp")
def trains_a_flat_vector(model: Any) -> Any:
    graph, state = nnx.split(model)
    flat, unravel = ravel_pytree(state)
    for batch in (IDS, OTHER_IDS):
        gradient, _ = ravel_pytree(nnx.state(stepped(nnx.merge(graph, unravel(flat)), batch)[1]))
        flat = flat - 0.1 * gradient
    return {"parameters": flat, "loss": stepped(nnx.merge(graph, unravel(flat)), IDS)[0]}


# Freezing.


@habit("mlp", "block", deep="block")
def trains_a_part_by_its_path(model: Any) -> Any:
    part = nnx.All(nnx.Param, nnx.PathContains("mlp"))
    return trained(model, optax.adam(1e-2), wrt=part)


@habit("theirs", deep="theirs")
def differentiates_a_part_by_its_path(model: Any) -> Any:
    part = nnx.All(nnx.Param, nnx.PathContains("mlp"))
    loss, gradients = nnx.jit(nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, part)))(model, IDS)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=part)
    optimizer.update(model, gradients)
    return {"loss": loss, "gradients": nnx.state(gradients), "parameters": nnx.state(model)}


@habit("mlp", deep="mlp")
def differentiates_the_norms_alone(model: Any) -> Any:
    part = nnx.DiffState(0, lambda path, _: "scale" in path)
    loss, gradients = nnx.jit(nnx.value_and_grad(loss_of, argnums=part))(model, IDS)
    return {"loss": loss, "gradients": nnx.state(gradients)}


class Frozen(nnx.Variable[Any]):
    """What no filter for nnx.Param finds."""


@habit("module", deep="module")
def freezes_by_type_of_variable(model: Any) -> Any:
    model.mlp.w_up = Frozen(model.mlp.w_up[...])
    model.norm.scale = Frozen(model.norm.scale[...])
    loss, gradients = stepped(model, IDS)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@habit("mlp", "block", deep="block")
def sets_gradients_of_a_part_to_zero(model: Any) -> Any:
    kept = optax.masked(
        optax.set_to_zero(), lambda p: jax.tree_util.tree_map_with_path(lambda k, _: "embed" in str(k), p)
    )
    return trained(model, optax.chain(kept, optax.sgd(0.3)))


# Adapters. The second factor of each is drawn: at zero it has no effect.


def stacked(make: Callable[[nnx.Rngs], Any]) -> Any:
    """A part of every layer of a Llama, with a leading dim of layers."""
    return noisy(nnx.split_rngs(splits=LAYERS)(nnx.vmap(make, in_axes=0, out_axes=0))(nnx.Rngs(1)))


def with_lora(plain: Any) -> Any:
    """The same stack of linear layers, each with an adapter."""
    sizes = plain.in_features, plain.out_features
    made = stacked(lambda rngs: nnx.LoRALinear(*sizes, lora_rank=2, use_bias=False, rngs=rngs))
    made.kernel = plain.kernel
    return made


def of_adapters(model: Any) -> dict[str, Any]:
    """Loss and gradients, of all and of the adapters alone."""
    part = nnx.DiffState(0, nnx.LoRAParam)
    loss, gradients = nnx.jit(nnx.value_and_grad(loss_of, argnums=part))(model, IDS)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    optimizer.update(model, gradients)
    return {"loss": loss, "gradients": nnx.state(gradients), "parameters": nnx.state(model)}


@habit("block", deep="block")
def adapts_projections_of_attention(model: Any) -> Any:
    attention = model.layers.attention
    attention.q, attention.v = with_lora(attention.q), with_lora(attention.v)
    return of_adapters(model)


@habit("mlp", deep="mlp")
def wraps_the_output_of_attention(model: Any) -> Any:
    kernel = model.layers.attention.o.kernel

    def make(rngs: nnx.Rngs) -> Any:
        return nnx.LoRA(H, 2, H, base_module=nnx.Linear(H, H, use_bias=False, rngs=rngs), rngs=rngs)

    model.layers.attention.o = stacked(make)
    model.layers.attention.o.base_module.kernel = kernel
    return of_adapters(model)


class LayersMLP(nnx.Module):
    """An MLP of three layers that are called."""

    def __init__(self, gate: Any, up: Any, down: Any) -> None:
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


@habit("block", deep="block")
def adapts_projections_of_the_mlp(model: Any) -> Any:
    def layers(rngs: nnx.Rngs) -> Any:
        linear = partial(nnx.LoRALinear, lora_rank=2, use_bias=False, rngs=rngs)
        made = linear(H, I), linear(H, I), linear(I, H)
        return LayersMLP(*made) if plain else TiledMLP.from_linears(*made, num_shards=SHARDS)

    holder = model.layers if isinstance(model, Llama) else model
    plain = isinstance(holder.mlp, PlainMLP)
    holder.mlp = stacked(layers) if isinstance(model, Llama) else noisy(layers(nnx.Rngs(1)))
    return of_adapters(model)


@habit("theirs", deep="theirs")
def adapts_a_projection_of_their_mlp(model: Any) -> Any:
    for i, name in enumerate(("gate_proj", "down_proj")):
        plain = getattr(model.layers[i].mlp, name)
        sizes = plain.in_features, 2, plain.out_features
        setattr(model.layers[i].mlp, name, noisy(nnx.LoRA(*sizes, base_module=plain, rngs=nnx.Rngs(3))))
    return of_adapters(model)


@habit("mlp", deep="mlp")
def adapts_the_head(model: Any) -> Any:
    plain = model.head
    model.head = noisy(nnx.LoRALinear(H, VOCAB, lora_rank=2, use_bias=False, rngs=nnx.Rngs(1)))
    model.head.kernel = plain.kernel
    return of_adapters(model)


@habit("mlp", deep="mlp")
def wraps_the_head(model: Any) -> Any:
    model.head = noisy(nnx.LoRA(H, 2, VOCAB, base_module=model.head, rngs=nnx.Rngs(1)))
    return of_adapters(model)


@habit("mlp", deep="mlp")
def gives_the_head_a_bias(model: Any) -> Any:
    kernel = model.head.kernel
    model.head = noisy(nnx.Linear(H, VOCAB, rngs=nnx.Rngs(0)))
    model.head.kernel = kernel
    return {"loss": evaluated(model, IDS)}


@habit("mlp", "block", deep="block")
def merges_an_adapter(model: Any) -> Any:
    a, b = (jnp.asarray(RANDOM_OF[name]) for name in ("a", "b"))
    model.layers.mlp.w_up[...] += a @ b
    return of_step(model)


RANDOM_OF = {
    "a": np.full((LAYERS, H, 2), 0.1, np.float32),
    "b": np.linspace(-1, 1, 2 * I, dtype=np.float32).reshape(2, I),
}


# Copies and state.


@habit("mlp", "block", "module", "theirs", deep="block theirs")
def splits_and_merges(model: Any) -> Any:
    return of_step(nnx.merge(*nnx.split(model)))


@habit("mlp", "block", "module", "theirs", deep="block theirs")
def clones_and_copies(model: Any) -> Any:
    twins = [nnx.clone(model), copy.deepcopy(model)]
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))  # each has weights of its own
    return [of_step(twin) for twin in twins]


@habit("mlp", "block", deep="block")
def pickles(model: Any) -> Any:
    return of_step(pickle.loads(pickle.dumps(model)))


@habit("module")
def pickles_state(model: Any) -> Any:
    graph, state = nnx.split(model)
    return of_step(nnx.merge(graph, pickle.loads(pickle.dumps(jax.device_get(state)))))


@habit("mlp", "block", "theirs", deep="block theirs")
def saves_a_pure_dictionary(model: Any) -> Any:
    state = nnx.state(model)
    pure = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    nnx.update(model, jax.tree.map(jnp.zeros_like, state))
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(model, state)
    return {"keys": {str(path): 1 for path in nnx.traversals.flatten_mapping(pure)}} | of_step(model)


@habit("block", deep="block")
def saves_arrays_by_path(model: Any) -> Any:
    file = io.BytesIO()
    arrays: Any = {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model))}
    np.savez(file, **arrays)
    file.seek(0)
    read = np.load(file)
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
    flat = [(p, v.replace(jnp.asarray(read["/".join(map(str, p))]))) for p, v in nnx.to_flat_state(nnx.state(model))]
    nnx.update(model, nnx.from_flat_state(flat))
    return {"names": sorted(read).index("head/kernel"), **of_step(model)}


@habit("mlp", "module", "theirs", deep="theirs")
def goes_on_from_a_saved_optimizer(model: Any) -> Any:
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.update(model, stepped(model, IDS)[1])
    saved = jax.device_get((nnx.state(model), nnx.state(optimizer)))
    again = nnx.clone(model)
    twin = nnx.Optimizer(again, optax.adam(1e-2), wrt=nnx.Param)
    nnx.update(again, jax.tree.map(jnp.asarray, saved[0]))
    nnx.update(twin, jax.tree.map(jnp.asarray, saved[1]))
    twin.update(again, stepped(again, OTHER_IDS)[1])
    return {"parameters": nnx.state(again), "optimizer": nnx.state(twin)}


@habit("mlp", "block", "theirs", deep="block theirs")
def loads_what_the_untiled_model_saved(model: Any) -> Any:
    kind = MODELS["theirs" if isinstance(model, Decoder) else "mlp"]
    other = kind("plain")
    nnx.update(model, jax.tree.map(lambda a: 1.5 * a, nnx.state(other)))
    return of_step(model)


@habit("mlp", "block", deep="block")
def scales_all_of_a_state(model: Any) -> Any:
    graph, state = nnx.split(model)
    return of_step(nnx.merge(graph, jax.tree.map(lambda a: 0.5 * a, state)))


@habit("mlp", "module", "theirs", deep="theirs mlp")
def asks_for_shapes_first(model: Any) -> Any:
    shapes = nnx.eval_shape(lambda: nnx.clone(model))
    graph, state = nnx.split(shapes)
    values = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), state)
    return of_step(nnx.merge(graph, values)) | {"shapes": [list(a.shape) for a in jax.tree.leaves(state)]}


@habit("module", deep="module")
def asks_for_a_table(model: Any) -> Any:
    return {"rows": "mlp" in nnx.tabulate(model, X, console_kwargs={"width": 300}), **of_step(model)}


@habit("mlp", "block")
def counts_parameters(model: Any) -> Any:
    state = nnx.state(model)
    return {
        "parameters": sum(a.size for a in jax.tree.leaves(state)),
        "bytes": sum(a.nbytes for a in jax.tree.leaves(state)),
    }


# Changes of weights and parts.


@habit("mlp", "block", deep="block")
def changes_weights_in_place(model: Any) -> Any:
    first = of_step(model)
    model.layers.mlp.w_down[...] *= 0.5
    model.layers.attention.q.kernel[...] += 0.1
    model.head.kernel[...] = model.head.kernel[...].at[0].set(0.3)
    return [first, of_step(model)]


@habit("mlp", "block", deep="block")
def assigns_a_new_parameter(model: Any) -> Any:
    first = of_step(model)
    model.layers.mlp.w_gate = nnx.Param(jnp.flip(model.layers.mlp.w_gate[...], -1))
    model.layers.mlp_norm.scale = nnx.Param(2 * model.layers.mlp_norm.scale[...])
    model.norm.scale = nnx.Param(2 * model.norm.scale[...])
    return [first, of_step(model)]


@habit("module", deep="module")
def shares_one_parameter_of_two_names(model: Any) -> Any:
    model.mlp.w_gate = model.mlp.w_up
    return of_step(model)


@habit("mlp", deep="mlp")
def ties_the_head_to_the_embedding(model: Any) -> Any:
    model.head = None
    return of_step(model)


@habit("theirs", deep="theirs")
def shares_one_mlp_between_layers(model: Any) -> Any:
    model.layers[1].mlp = model.layers[0].mlp
    return {"loss": evaluated(model, IDS)}


@habit("mlp", deep="mlp")
def makes_the_vocabulary_larger(model: Any) -> Any:
    more = jnp.full((8, H), 0.1)
    model.embed.embedding = nnx.Param(jnp.concatenate([model.embed.embedding[...], more]))
    model.head.kernel = nnx.Param(jnp.concatenate([model.head.kernel[...], more.T], axis=1))
    return {"loss": evaluated(model, IDS.at[0, 0].set(VOCAB + 2))}


class Doubled(nnx.Linear):
    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        return 2.0 * super().__call__(*args, **options)


@habit("mlp", "block", deep="mlp block")
def replaces_linear_layers_by_a_subclass(model: Any) -> Any:
    model.layers.attention.k.__class__ = Doubled
    return {"loss": evaluated(model, IDS)}


@habit("mlp", deep="mlp")
def replaces_the_head_by_a_subclass(model: Any) -> Any:
    model.head.__class__ = Doubled
    return {"loss": evaluated(model, IDS)}


@habit("theirs", deep="theirs")
def replaces_a_projection_of_their_mlp_by_a_subclass(model: Any) -> Any:
    model.layers[0].mlp.up_proj.__class__ = Doubled
    return {"loss": evaluated(model, IDS)}


@habit("theirs", deep="theirs")
def changes_their_activation(model: Any) -> Any:
    first = evaluated(model, IDS)
    model.layers[1].mlp.activation = nnx.relu
    return [first, evaluated(model, IDS)]


@habit("mlp", deep="mlp")
def takes_layers_out(model: Any) -> Any:
    graph, state = nnx.split(model.layers)
    model.layers = nnx.merge(graph, jax.tree.map(lambda a: a[:1], state))
    return {"loss": evaluated(model, IDS)}


@habit("mlp", deep="mlp")
def ties_the_head_by_a_module(model: Any) -> Any:
    class Tied(nnx.Module):
        def __init__(self, embed: Any) -> None:
            self.embed = embed

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.embed.attend(x)

    model.head = Tied(model.embed)
    return {"loss": evaluated(model, IDS)}


class Tempered(Llama):
    def logits(self, hidden: jax.Array) -> jax.Array:
        return 0.5 * super().logits(hidden)


@habit("mlp", deep="mlp")
def overrides_logits(model: Any) -> Any:
    object.__setattr__(model, "__class__", Tempered)
    return {"loss": evaluated(model, IDS)}


@habit("mlp", deep="mlp")
def keeps_the_head_in_bfloat16(model: Any) -> Any:
    model.head.kernel = nnx.Param(model.head.kernel[...].astype(jnp.bfloat16))
    return {"loss": evaluated(model, IDS)}


@habit("theirs", deep="theirs")
def makes_their_mlp_wider(model: Any) -> Any:
    part = model.layers[0].mlp
    for layer in (part.gate_proj, part.up_proj):
        layer.kernel = nnx.Param(jnp.concatenate([layer.kernel[...], 0.1 + layer.kernel[...]], axis=1))
    part.down_proj.kernel = nnx.Param(jnp.concatenate([part.down_proj.kernel[...]] * 2, axis=0))
    return {"loss": evaluated(model, IDS)}


@habit("theirs", deep="theirs")
def swaps_their_projections(model: Any) -> Any:
    part = model.layers[0].mlp
    part.gate_proj, part.up_proj = part.up_proj, part.gate_proj
    return of_step(model)


# Batches.


@habit("mlp", deep="mlp")
def gives_labels_without_a_sign(model: Any) -> Any:
    return {"loss": evaluated(model, {"input_ids": IDS, "labels": IDS.astype(jnp.uint16)})}


@habit("mlp", deep="mlp")
def ignores_all_of_a_row(model: Any) -> Any:
    return of_step(model, {"input_ids": IDS, "labels": LABELS.at[1].set(-100)})


@habit("mlp", deep="mlp")
def pads_on_the_left(model: Any) -> Any:
    mask = jnp.ones((2, 9), jnp.int32).at[1, :3].set(0)
    labels = jnp.where(mask == 0, -100, IDS)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    return of_step(model, {"input_ids": IDS, "labels": labels, "attention_mask": mask, "position_ids": positions})


@habit("mlp", deep="mlp")
def packs_documents_by_position(model: Any) -> Any:
    positions = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 0]])
    return of_step(model, {"input_ids": IDS, "labels": IDS, "position_ids": positions})


@habit("mlp", deep="mlp")
def has_a_last_small_batch(model: Any) -> Any:
    return [evaluated(model, IDS), evaluated(model, IDS[:1, :5])]


@habit("mlp", deep="mlp")
def gives_numpy_arrays(model: Any) -> Any:
    ids = np.asarray(IDS, np.int64)
    return {"logits": logits_of(model, ids), "loss": stepped(model, jnp.asarray(ids))[0]}


@habit("mlp", "block", deep="mlp block")
def computes_its_loss_from_logits(model: Any) -> Any:
    logits = logits_of(model, IDS % 16)
    return {"logits": logits, "best": logits.argmax(-1), "loss": optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], IDS[:, 1:] % 16).mean()}  # fmt: skip


# Transformations.


@habit("module", deep="module")
def runs_without_jit(model: Any) -> Any:
    loss, gradients = nnx.value_and_grad(loss_of)(model, IDS)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@habit("module", deep="module")
def trains_in_one_program_that_donates(model: Any) -> Any:
    graph, params = nnx.split(model)
    transform = optax.sgd(0.3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, ids: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: loss_of(nnx.merge(graph, p), ids))(params)
        updates, state = transform.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    params, state = copied(params), transform.init(params)
    losses = []
    for ids in (IDS, OTHER_IDS):
        params, state, loss = step(params, state, ids)
        losses.append(loss)
    return {"parameters": params, "losses": losses}


@habit("module", deep="module")
def trains_in_a_scan_over_batches(model: Any) -> Any:
    graph, params = nnx.split(model)

    @jax.jit
    def run(params: Any, batches: jax.Array) -> Any:
        def step(params: Any, ids: jax.Array) -> Any:
            loss, gradients = jax.value_and_grad(lambda p: loss_of(nnx.merge(graph, p), ids))(params)
            return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients), loss

        return jax.lax.scan(step, params, batches)

    params, losses = run(params, jnp.stack([IDS, OTHER_IDS]))
    return {"parameters": params, "losses": losses}


@habit("module", deep="module")
def trains_as_nnx_objects_in_one_program(model: Any) -> Any:
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, ids: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, ids)
        optimizer.update(model, gradients)
        return loss

    cached = nnx.cached_partial(step, model, optimizer)
    losses = [cached(ids) for ids in (IDS, OTHER_IDS)]
    return {"losses": losses, "parameters": nnx.state(model)}


@habit("module", deep="module")
def recomputes_the_whole_model(model: Any) -> Any:
    @nnx.jit
    def run(model: Any) -> Any:
        return nnx.value_and_grad(nnx.remat(lambda model: loss_of(model, IDS)))(model)

    loss, gradients = run(model)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@habit("module", deep="module")
def checkpoints_with_a_policy(model: Any) -> Any:
    graph, params = nnx.split(model)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    run = jax.checkpoint(lambda params: loss_of(nnx.merge(graph, params), IDS), policy=policy)
    loss, gradients = jax.jit(jax.value_and_grad(run))(params)
    return {"loss": loss, "gradients": gradients}


@habit("module", deep="module")
def runs_modules_of_several_seeds_at_once(model: Any) -> Any:
    graph, params = nnx.split(model)
    several = jax.tree.map(lambda a: jnp.stack([a, 1.5 * a, 0.5 * a]), params)
    losses, gradients = jax.jit(jax.vmap(jax.value_and_grad(lambda p: nnx.merge(graph, p)(X))))(several)
    return {"losses": losses, "gradients": gradients}


@habit("module", deep="module")
def maps_over_the_batch(model: Any) -> Any:
    axes = nnx.StateAxes({...: None})
    return {"losses": nnx.jit(nnx.vmap(lambda m, x, t: m(x, t), in_axes=(axes, 0, 0)))(model, X, LABELS)}


@habit("module", deep="module")
def scans_over_stacked_modules(model: Any) -> Any:
    kind = PlainMLP if isinstance(model.mlp, PlainMLP) else partial(TiledMLP, num_shards=SHARDS)
    layers = stacked(lambda rngs: kind(H, I, rngs=rngs))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through(x: jax.Array, layer: Any) -> jax.Array:
        return x + layer(x)

    loss, gradients = nnx.jit(nnx.value_and_grad(lambda layers, x: model(through(x, layers))))(layers, X)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@habit("module", deep="module")
def takes_gradients_of_inputs(model: Any) -> Any:
    graph, params = nnx.split(model)
    of = jax.jit(jax.grad(lambda p, x: nnx.merge(graph, p)(x), argnums=(0, 1)))(params, X)
    return {"gradients": of[0], "gradient_of_x": of[1]}


@habit("module", deep="module")
def multiplies_by_the_hessian(model: Any) -> Any:
    graph, params = nnx.split(model)
    loss = lambda p: loss_of(nnx.merge(graph, p), LABELS)  # noqa: E731
    direction = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), params)
    gradients, product = jax.jit(lambda p, v: jax.jvp(jax.grad(loss), (p,), (v,)))(params, direction)
    return {"gradients": gradients, "product": product}


@habit("module", deep="module")
def differentiates_forward(model: Any) -> Any:
    graph, params = nnx.split(model)
    direction = jax.tree.map(lambda a: jnp.ones_like(a), params)
    value, slope = jax.jit(lambda p, v: jax.jvp(lambda p: loss_of(nnx.merge(graph, p), IDS), (p,), (v,)))(
        params, direction
    )
    return {"loss": value, "slope": slope}


@habit("module", deep="module")
def compiles_ahead_of_time(model: Any) -> Any:
    graph, params = nnx.split(model)
    step = jax.jit(jax.value_and_grad(lambda p, ids: loss_of(nnx.merge(graph, p), ids)))
    compiled = step.lower(params, jax.ShapeDtypeStruct(IDS.shape, IDS.dtype)).compile()
    loss, gradients = compiled(params, IDS)
    return {"loss": loss, "gradients": gradients}


@habit("module")
def exports(model: Any) -> Any:
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    run = jax.jit(lambda *leaves: loss_of(nnx.merge(graph, jax.tree.unflatten(tree, leaves)), IDS))
    return {"loss": jax.export.export(run)(*leaves).call(*leaves)}


@habit("mlp", "block", deep="block mlp")
def evaluates_between_steps(model: Any) -> Any:
    optimizer, found = nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.Param), []
    for batch in (IDS, OTHER_IDS):
        model.train()
        optimizer.update(model, stepped(model, batch)[1])
        model.eval()
        found.append(logits_of(model, IDS))
    return found


@habit("mlp", "block", "theirs", deep="block theirs")
def goes_on_after_an_error(model: Any) -> Any:
    for wrong in (IDS.astype(jnp.float32), IDS[0, 0]):
        with contextlib.suppress(Exception):
            stepped(model, wrong)
            raise AssertionError
    return of_step(model)


# Precision.


@habit("mlp", "block", deep="mlp block")
def casts_parameters_to_bfloat16(model: Any) -> Any:
    """Weights that bfloat16 holds, and computes in float32 with them."""
    graph, params = nnx.split(model)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    return {"loss": jax.jit(lambda p: loss_of(nnx.merge(graph, p), IDS))(half)}


@habit("module", deep="module")
def rounds_weights_inside_the_loss(model: Any) -> Any:
    """As in training for fewer bits: rounded forward, straight through backward."""
    graph, params = nnx.split(model)

    def rounded(a: jax.Array) -> jax.Array:
        return a + jax.lax.stop_gradient(a.astype(jnp.bfloat16).astype(a.dtype) - a)

    def loss(params: Any) -> jax.Array:
        return loss_of(nnx.merge(graph, jax.tree.map(rounded, params)), IDS)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return {"loss": value, "gradients": gradients}


@habit("theirs", deep="theirs")
def gives_inputs_in_bfloat16(model: Any) -> Any:
    return {"y": model.layers[0].mlp(X[..., :8].astype(jnp.bfloat16))}


@habit("module", deep="module")
def computes_in_float64(model: Any) -> Any:
    with jax.enable_x64(True):
        graph, params = nnx.split(model)
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), params)
        run = lambda p: nnx.merge(graph, p)(X.astype(jnp.float64))  # noqa: E731
        loss, gradients = jax.jit(jax.value_and_grad(run))(wide)
        return {"loss": loss, "gradients": gradients}


# linen.


@cache
def initialised(model: Any) -> Any:
    return jax.jit(model.init)(jax.random.key(0), X)


@habit("linen", deep="linen")
def trains_with_a_train_state(model: Any) -> Any:
    state = TrainState.create(apply_fn=model.apply, params=initialised(model)["params"], tx=optax.adam(1e-2))

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: state.apply_fn({"params": p}, x))(state.params)
        return state.apply_gradients(grads=gradients), loss

    losses = []
    for x in (X, 2 * X):
        state, loss = step(state, x)
        losses.append(loss)
    return {"losses": losses, "parameters": state.params}


@habit("linen")
def saves_bytes(model: Any) -> Any:
    variables = initialised(model)
    read = serialization.from_bytes(jax.tree.map(jnp.zeros_like, variables), serialization.to_bytes(variables))
    return {"loss": model.apply(read, X), "variables": read}


@habit("linen")
def binds(model: Any) -> Any:
    bound = model.bind(initialised(model))
    module, variables = bound.mlp.unbind()
    return {"y": bound.mlp(X), "again": module.apply(variables, X), "loss": bound(X)}


@habit("linen")
def captures_intermediates(model: Any) -> Any:
    loss, kept = model.apply(initialised(model), X, capture_intermediates=True)
    return {"loss": loss, "kept": kept}


@habit("linen", deep="linen")
def freezes_with_labels(model: Any) -> Any:
    params = initialised(model)["params"]
    labels = {
        name: jax.tree.map(lambda _, n=name: "on" if n == "mlp" else "off", tree) for name, tree in params.items()
    }
    transform = optax.multi_transform({"on": optax.adam(1e-2), "off": optax.set_to_zero()}, labels)
    gradients = jax.jit(jax.grad(lambda p: model.apply({"params": p}, X)))(params)
    updates, _ = transform.update(gradients, transform.init(params), params)
    return {"gradients": gradients, "parameters": optax.apply_updates(params, updates)}


@habit("linen", deep="linen")
def becomes_an_nnx_module(model: Any) -> Any:
    made = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(X)
    loss, gradients = nnx.jit(nnx.value_and_grad(lambda made: made(X)))(made)
    return {"loss": loss, "gradients": nnx.state(gradients, nnx.Param)}


@habit("linen")
def normalizes_weights(model: Any) -> Any:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            named: dict[str, Any] = {"name": "inner"}
            plain = model.form == "plain"
            inner = PlainLinenMLP(**named) if plain else linen.TiledMLP(H, I, num_shards=SHARDS, **named)
            return nn.WeightNorm(inner)(x)

    made = Normed()
    variables = made.init(jax.random.key(0), X)
    gradients = jax.grad(lambda v: jnp.sum(jnp.square(jnp.asarray(made.apply(v, X)))))(variables)
    return {"y": made.apply(variables, X), "gradients": gradients}


# Random numbers.


def with_dropout(model: Any) -> Any:
    """A dropout layer behind each MLP: one stream, drawn once a call."""
    for i, layer in enumerate(model.layers):
        layer.mlp = nnx.Sequential(layer.mlp, nnx.Dropout(0.5, rngs=nnx.Rngs(i)))
    return model


@habit("theirs", deep="theirs")
def drops_behind_the_mlp(model: Any) -> Any:
    with_dropout(model)
    found = [of_step(model), of_step(model)]
    model.eval()
    return [*found, loss_of(model)]
