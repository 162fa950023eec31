"""`tiled_model_loss`: the loss of a model's logits is that of the untiled ones, with every gradient, and no logits are made."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.tolerances import FLOOR, MODEL_FLOAT32
from tests.asserting import assert_within
from tiled_jax import tiled_model_loss

H, V = 8, 16
TOKENS = jax.random.randint(jax.random.key(1), (4, 7), 0, V)
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:].at[0, 2].set(-100)
VALID = int(np.sum(np.asarray(TARGETS) != -100))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over the targets that count, written out."""
    valid = targets != -100
    picked = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[..., None], axis=-1)[..., 0]
    losses = jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) - picked, 0)
    return jnp.sum(losses) / jnp.sum(valid).astype(losses.dtype)


def assert_same(found: Any, expected: Any, limit: float) -> None:
    """Of every floating-point array in a tree."""
    for array, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            assert_within(np.asarray(array), np.asarray(theirs), limit, "loss, gradients and state")


class Model(nnx.Module):
    """An embedding, a layer, a mean that is kept of it in training, and a head of some form."""

    def __init__(self, head: Any, *, bias: bool = False, rate: float = 0.0, dtype: Any = jnp.float64) -> None:
        rngs, types = nnx.Rngs(0), {"param_dtype": dtype}
        self.form = head
        self.embed = nnx.Embed(V, H, rngs=rngs, **types)
        self.layer = nnx.Linear(H, H, rngs=rngs, **types)
        self.mean, self.use_running_average = nnx.BatchStat(jnp.zeros(H, dtype)), False
        self.drop = nnx.Dropout(rate, rngs=rngs) if rate else None
        self.head = nnx.Linear(H, V, use_bias=bias, bias_init=nnx.initializers.normal(1.0), rngs=rngs, **types)

    def __call__(self, tokens: jax.Array) -> Any:
        x = jax.nn.gelu(self.layer(self.embed(tokens)))
        if not self.use_running_average:
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(jnp.mean(x, axis=(0, 1)))
        return self.form(self, x if self.drop is None else self.drop(x))


HEADS = {
    "layer": lambda model, x: model.head(x),
    "embedding": lambda model, x: model.embed.attend(x),
    "einsum": lambda model, x: jnp.einsum("hv,bsh->bsv", model.head.kernel[...], x),
    "flat": lambda model, x: (x.reshape(-1, H) @ model.head.kernel[...]).reshape(*x.shape[:-1], V),
    "cast": lambda model, x: model.head(x).astype(jnp.float32).astype(jnp.float64),
    "scaled": lambda model, x: 0.5 * model.head(x) / jnp.sqrt(8.0),
    "capped": lambda model, x: 5.0 * jnp.tanh(model.head(x) / 5.0),
    "scaled and capped": lambda model, x: jnp.tanh(model.embed.attend(x) * 3.0) * 2.0,
    "jit": lambda model, x: jax.jit(lambda x, w: 7.0 * jnp.tanh(x @ w / 7.0))(x, model.head.kernel[...]),
}


def evaluating(form: Any, **options: Any) -> Model:
    """In float32; no statistics are kept."""
    model = Model(form, dtype=jnp.float32, **options)
    model.eval()
    return model


def both(form: Any, **options: Any) -> tuple[Any, Any]:
    """Loss and gradients of a step with the logits and without them; the states of the two models are the same behind it."""
    models = Model(form, **options), Model(form, **options)

    def plain(model: Any) -> jax.Array:
        return cross_entropy(model(INPUTS), TARGETS)

    def tiled(model: Any) -> jax.Array:
        return tiled_model_loss(model, TARGETS, INPUTS, num_shards=5)

    expected, found = (nnx.jit(nnx.value_and_grad(fn))(model) for fn, model in zip((plain, tiled), models, strict=True))
    states = [nnx.state(model, nnx.Any(nnx.BatchStat, nnx.RngCount)) for model in models]
    assert len(jax.tree.leaves(states[0])) == 1 + bool(options.get("rate"))
    assert_same(states[1], states[0], FLOOR["float64"])
    return found, expected


@pytest.mark.deep_but(5)
@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("capped", {"bias": True}),
        ("embedding", {"rate": 0.3}),
        ("einsum", {}),
        ("scaled and capped", {}),
        ("jit", {}),
        *((head, {}) for head in ("layer", "flat", "cast", "scaled", "capped")),
        ("layer", {"bias": True}),
    ],
    ids=str,
)
def test_it_is_the_loss_of_the_logits(head: str, options: dict[str, Any]) -> None:
    """Statistics and the streams of dropout move on as in a call of the model."""
    with jax.enable_x64(True):
        found, expected = both(HEADS[head], **options)
        assert_same(found, expected, MODEL_FLOAT32 if head == "cast" else FLOOR["float64"])


def test_aux_and_options_of_the_loss() -> None:
    model = Model(lambda model, x: (model.head(x), {"norm": jnp.sum(x)}), dtype=jnp.float32)
    options = LossOptions(reduction="none", outputs=("lse",))
    result, aux = tiled_model_loss(model, TARGETS, INPUTS, loss=options, has_aux=True)
    logits, expected = Model(lambda model, x: (model.head(x), {"norm": jnp.sum(x)}), dtype=jnp.float32)(INPUTS)
    assert_same((result.lse, aux), (jax.nn.logsumexp(logits, axis=-1), expected), MODEL_FLOAT32)
    assert result.loss.shape == TARGETS.shape


def test_a_linen_model() -> None:
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
            embed = nn.Embed(V, H)
            return embed.attend(nn.Dropout(0.2, deterministic=not train)(nn.LayerNorm()(embed(tokens))))

    model, streams = Linen(), {"dropout": jax.random.key(2)}
    variables = model.init(jax.random.key(0), INPUTS, train=False)

    def tiled(variables: Any) -> jax.Array:
        return tiled_model_loss(model.apply, TARGETS, variables, INPUTS, num_shards=3, rngs=streams, train=True)

    def plain(variables: Any) -> jax.Array:
        logits: Any = model.apply(variables, INPUTS, rngs=streams, train=True)
        return cross_entropy(logits, TARGETS)

    found, expected = (jax.jit(jax.value_and_grad(fn))(variables) for fn in (tiled, plain))
    assert_same(found, expected, MODEL_FLOAT32)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("around", [False, True], ids=["jit", "shard_map"])
@pytest.mark.parametrize("kernel", [P(None, "model"), P()], ids=str)
def test_on_a_mesh(kernel: P, around: bool) -> None:
    """Under plain `jit` with tokens and weights that are cut, and inside a shard_map of every device's own tokens."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    graph, state = nnx.split(evaluating(HEADS["capped"]))

    def tiled(state: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        # Of shard_map's devices the mean follows.
        options = LossOptions(num_valid=VALID / (2 if around else 1))
        loss = tiled_model_loss(nnx.merge(graph, state), targets, inputs, loss=options, num_shards=3)
        return jax.lax.pmean(loss, "data") if around else loss

    def plain(state: Any) -> jax.Array:
        return cross_entropy(nnx.merge(graph, state)(INPUTS), TARGETS)

    tokens = NamedSharding(mesh, P("data"))
    placed = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P())), state)
    placed["head"]["kernel"][...] = jax.device_put(state["head"]["kernel"][...], NamedSharding(mesh, kernel))
    fn: Any = tiled
    if around:
        fn = jax.shard_map(tiled, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    found = jax.jit(jax.value_and_grad(fn, allow_int=True))(
        placed, jax.device_put(INPUTS, tokens), jax.device_put(TARGETS, tokens)
    )
    expected = jax.jit(jax.value_and_grad(plain, allow_int=True))(state)
    assert_same(found, expected, MODEL_FLOAT32)


def test_logits_are_never_made() -> None:
    """No product has their size, and temporary bytes are far below one array of them."""
    tokens, vocab, hidden = 1024, 2048, 16
    rngs = nnx.Rngs(0)
    graph, state = nnx.split(nnx.Sequential(nnx.Embed(vocab, hidden, rngs=rngs), nnx.Linear(hidden, vocab, rngs=rngs)))
    ids = jnp.arange(tokens) % vocab

    def step(state: Any) -> Any:
        return jax.value_and_grad(lambda s: tiled_model_loss(nnx.merge(graph, s), ids, ids, num_shards=32))(state)

    compiled = jax.jit(step).lower(state).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < tokens * vocab * 4 / 4
    traced = jax.make_jaxpr(step)(state)
    products = [e for e in _equations(traced.jaxpr) if e.primitive.name == "dot_general"]
    assert all(e.outvars[0].aval.size < tokens * vocab for e in products)


def _equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from _equations(getattr(inner, "jaxpr", inner))


def test_what_a_model_shows_is_shown_once() -> None:
    shown: list[int] = []

    def head(model: Model, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda rows: shown.append(len(rows)), x)
        return 3.0 * jnp.tanh(model.head(x) / 3.0)

    tiled_model_loss(evaluating(head), TARGETS, INPUTS)
    jax.effects_barrier()
    assert shown == [len(INPUTS)]


REFUSED = {
    "log_softmax": (lambda model, x: jax.nn.log_softmax(model.head(x)), "logits to which sub is applied"),
    "a mask": (lambda model, x: jnp.where(x[..., :1] > 0, model.head(x), 0.0), "logits to which select_n is applied"),
    "a learned factor": (lambda model, x: model.head(x) * model.head.bias[0], "multiplied by what is no known number"),
    "tanh twice": (lambda model, x: jnp.tanh(jnp.tanh(model.head(x))), "logits that go through tanh twice"),
    "a cap under a bias": (lambda model, x: jnp.tanh(x @ model.head.kernel[...]) + model.head.bias[...], "tanh twice, or"),
    "a factor under a bias": (lambda model, x: 2 * (x @ model.head.kernel[...]) + model.head.bias[...], "in the midst of"),
    "a number": (lambda model, x: model.head(x) + 1.0, "a number added"),
    "transposed": (lambda model, x: jnp.swapaxes(model.head(x), 0, 1), "logits to which transpose is applied"),
    "no product": (lambda model, x: jnp.repeat(x, V // H, axis=-1), "logits whose entries"),
    "a weight for each token": (
        lambda model, x: jnp.einsum("bsh,bshv->bsv", x, x[..., None] * jnp.ones(V)),
        "a last product that is not of hidden states and one weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_other_logits_are_refused(form: str) -> None:
    head, reason = REFUSED[form]
    swapped = (TARGETS.T, INPUTS) if form == "transposed" else (TARGETS, INPUTS)
    with pytest.raises(
        UnsupportedError, match=rf"^tiled_model_loss: model must be one whose logits .*, got .*{reason}"
    ):
        jax.jit(lambda: tiled_model_loss(evaluating(head, bias=True), *swapped))()


@pytest.mark.parametrize("spread", [False, True])
def test_a_number_for_each_token_is_no_bias_of_the_vocabulary(spread: bool) -> None:
    """Of as many tokens as there are entries: both have the same shape."""

    def model(tokens: jax.Array, each: jax.Array) -> jax.Array:
        logits = jax.nn.one_hot(tokens, V) @ jnp.ones((V, V))
        added = jnp.broadcast_to(each[:, None], (V, V)) if spread else each[:, None]
        return 2.0 * jnp.tanh((logits + added) / 2.0)

    with pytest.raises(UnsupportedError, match="got logits to which add is applied"):
        tiled_model_loss(model, jnp.arange(V), jnp.arange(V), jnp.linspace(0.0, 1.0, V))


def test_bad_arguments_are_refused() -> None:
    model = evaluating(HEADS["layer"])
    with pytest.raises(SpecError, match=r"^tiled_model_loss: targets must be of the shape of the logits \[4, 6, 16\]"):
        tiled_model_loss(model, TARGETS[:, 1:], INPUTS)
    with pytest.raises(TypeError, match=r"^tiled_model_loss: model must be an nnx.Module or a function, got dict"):
        tiled_model_loss({}, TARGETS, INPUTS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^tiled_model_loss: model must be a function that returns logits, got tuple"):
        tiled_model_loss(lambda tokens: (model(tokens), None), TARGETS, INPUTS)
    with pytest.raises(TypeError, match=r"^tiled_model_loss: model must be a function that returns \(logits, aux\)"):
        tiled_model_loss(model, TARGETS, INPUTS, has_aux=True)
    with pytest.raises(UnsupportedError, match=r"^tiled_model_loss: loss.logit_softcap must be None, got 3.0"):
        tiled_model_loss(model, TARGETS, INPUTS, loss=LossOptions(logit_softcap=3.0))
    with pytest.raises(TypeError, match=r"^tiled_model_loss: loss must be a LossOptions, got dict"):
        tiled_model_loss(model, TARGETS, INPUTS, loss={"reduction": "sum"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^tiled_model_loss: has_aux must be True or False, got int"):
        tiled_model_loss(model, TARGETS, INPUTS, has_aux=1)  # type: ignore[arg-type]
