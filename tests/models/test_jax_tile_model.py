"""`tile_model` on Flax nnx models of others: what is found is the module's own function, and what is not found is said."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.models.jax_other_models import FORMS, Config, Decoder, GatedMLP, H, I, Layer, TwoLayers, in_sequence
from tiled_jax import SpecError, TiledMLP, Tiling, UnsupportedError, tile_model, tiling_paths, untile_model
from tiled_jax.models.others import tiled

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 7)))


def drawn(*shape: int, dtype: Any = jnp.float64) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)


def results(module: Any, x: jax.Array) -> Any:
    """Return the result and the gradients of x and all parameters, by their paths."""

    @nnx.jit
    def run(module: Any, x: jax.Array) -> Any:
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params, rest)(x), params, x)
        return y, pull(jnp.cos(y))

    y, (of_params, dx) = run(module, x)
    return {"y": y, "x": dx, **{str(path): leaf[...] for path, leaf in nnx.to_flat_state(of_params)}}


def paths_of(module: nnx.Module) -> list[Any]:
    return [(path, type(leaf), leaf.shape) for path, leaf in nnx.to_flat_state(nnx.state(module))]


@pytest.mark.parametrize("form", FORMS)
def test_an_mlp_of_any_form_is_its_own_function(form: str, same: Any) -> None:
    """Values and every gradient in float64, the same state, and the module itself again when it is untiled."""
    module, x = FORMS[form](Config(param_dtype=jnp.float64), nnx.Rngs(0)), drawn(2, 7, H)
    kind, before, expected = type(module), paths_of(module), results(module, x)
    assert tile_model(module, num_shards=4, keep=0.3) is module
    assert tiling_paths(module) == {"": "tiled_mlp"}
    assert isinstance(module, kind)
    same(results(module, x), expected)
    assert paths_of(module) == before
    assert type(untile_model(module)) is kind
    assert tiling_paths(module) == {}


def test_a_shard_of_tokens_at_a_time_is_what_runs() -> None:
    """No array of all tokens and the intermediate size is in the program any more."""
    module, x = FORMS["gate_proj"](Config(), nnx.Rngs(0)), drawn(1, 40, H, dtype=jnp.float32)

    def widest() -> bool:
        return "40,12]" in str(jax.make_jaxpr(lambda module, x: module(x))(module, x))

    assert widest()
    tile_model(module, num_shards=8)
    assert not widest()


@pytest.mark.deep_but(5)
@pytest.mark.parametrize("limit", [0.5, 10.0, 500.0])
@pytest.mark.parametrize("where", ["gate", "up", "h", "y", "gradient"])
def test_what_is_cut_off_only_at_large_values_is_seen(where: str, limit: float) -> None:
    """Clamped activations as gpt-oss has them, relu6, clipped hidden states, a clipped gradient: none is the formula."""

    @jax.custom_vjp
    def cut_in_backward(x: jax.Array) -> jax.Array:
        return x

    cut_in_backward.defvjp(lambda x: (x, x), lambda x, dx: (jnp.where(abs(x) > limit, 0.0, dx),))

    class Clipped(GatedMLP):
        def __call__(self, x: jax.Array) -> jax.Array:
            def cut(at: str, x: jax.Array) -> jax.Array:
                return jnp.clip(x, -limit, limit) if at == where else x

            x = cut_in_backward(x) if where == "gradient" else x
            h = nnx.silu(cut("gate", self.gate_proj(x))) * cut("up", self.up_proj(x))
            return cut("y", self.down_proj(cut("h", h)))

    module = Clipped(Config(), nnx.Rngs(0))
    x = 10 * limit * drawn(2, 7, H, dtype=jnp.float32)
    expected = module(x)
    tile_model(module, num_shards=2)
    assert tiling_paths(module)[""] != "tiled_mlp"
    np.testing.assert_array_equal(module(x), expected)


def one(**options: Any) -> GatedMLP:
    return GatedMLP(Config(**options), nnx.Rngs(0))


def test_parameters_say_nothing() -> None:
    """Zeros that a checkpoint will replace, and shapes alone, are told apart as drawn ones are."""
    zeros = one(init=nnx.initializers.zeros)
    abstract = nnx.eval_shape(lambda: Decoder(one(), TwoLayers(Config(), nnx.Rngs(0), nnx.relu), rngs=nnx.Rngs(0)))
    for module in (zeros, abstract):
        tile_model(module, strict=True)
        assert set(tiling_paths(module).values()) == {"tiled_mlp"}
    classes = [type(layer.mlp)._formula.activation for layer in abstract.layers]
    assert classes == ["silu", "relu"]
    assert type(zeros)._formula.activation == "silu"


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("of_x", [jnp.float32, jnp.bfloat16])
def test_dtypes_are_those_of_the_module(dtype: Any, param_dtype: Any, of_x: Any) -> None:
    module = one(dtype=dtype, param_dtype=param_dtype)
    x = drawn(2, 7, H, dtype=of_x)
    with jax.numpy_dtype_promotion("standard"):
        forms = []
        for tiled in (False, True):
            if tiled:
                tile_model(module, num_shards=3)
                assert tiling_paths(module) == {"": "tiled_mlp"}
            forms.append(jax.eval_shape(lambda module, x: results(module, x), module, x))
    assert forms[0] == forms[1]


def test_bfloat16_is_as_near_as_it_was() -> None:
    """Of one rounding or another: against float32, tiled errs no more than twice what the module itself does."""
    x, kinds = drawn(2, 64, H, dtype=jnp.float32), {"exact": None, "own": jnp.bfloat16, "tiled": jnp.bfloat16}
    found = {}
    for name, dtype in kinds.items():
        module = one(dtype=dtype)
        found[name] = results(tile_model(module, num_shards=5) if name == "tiled" else module, x)
    for key, exact in found["exact"].items():
        own, tiled = (float(jnp.linalg.norm(found[kind][key].astype(jnp.float32) - exact)) for kind in ("own", "tiled"))
        assert tiled <= 2 * own, key


def loss(model: Any, tokens: jax.Array) -> jax.Array:
    logits = model(tokens)[:, :-1]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def trained(model: Any, steps: int = 3) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.sgd(1e-1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        value, gradient = nnx.value_and_grad(loss)(model, TOKENS)
        optimizer.update(model, gradient)
        return value

    return [float(step(model, optimizer)) for _ in range(steps)]


def test_a_model_trains_as_it_did() -> None:
    """Through split and merge, clone and a copy, with an optimizer; what was learnt is read by the untiled model."""
    models = [Decoder(one(), TwoLayers(Config(), nnx.Rngs(1)), rngs=nnx.Rngs(2)) for _ in range(3)]
    paths = {"layers.0.mlp": "tiled_mlp", "layers.1.mlp": "tiled_mlp"}
    tile_model(models[1], num_shards=3, strict=True)
    for made in (nnx.merge(*nnx.split(models[1])), nnx.clone(models[1]), copy.deepcopy(models[1])):
        assert tiling_paths(made) == paths
    losses = [trained(model) for model in models[:2]]
    np.testing.assert_allclose(losses[1], losses[0], rtol=DEMO_LOSS_RTOL)
    assert losses[0][2] < losses[0][0]
    nnx.update(models[2], nnx.state(models[1]))
    np.testing.assert_allclose(loss(models[2], TOKENS), loss(untile_model(models[1]), TOKENS), rtol=DEMO_LOSS_RTOL)


def test_under_vmap_and_with_one_token(same: Any) -> None:
    module, x = FORMS["fused"](Config(param_dtype=jnp.float64), nnx.Rngs(0)), drawn(3, 7, H)
    expected = module(x)
    tile_model(module, num_shards=2)
    same(jax.vmap(module)(x), expected)
    same(jax.vmap(jax.vmap(module))(x), expected)
    same(module(x[0, 0]), expected[0, 0])
    np.testing.assert_array_equal(module(x[:, :0]), expected[:, :0])


@pytest.mark.parametrize("axes", [P("data"), P(None, "data"), P("data", "model")], ids=str)
def test_tokens_on_a_mesh_stay_where_they_are(axes: P, same: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    module, x = one(param_dtype=jnp.float64), drawn(4, 8, H)
    expected = results(module, x)
    tile_model(module, num_shards=2)
    found = results(module, jax.device_put(x, NamedSharding(mesh, axes)))
    same(found, expected)


def test_layers_that_are_stacked_for_a_scan(same: Any) -> None:
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Layer:
        return Layer(GatedMLP(Config(param_dtype=jnp.float64), rngs), rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def apply(x: jax.Array, layer: Layer) -> jax.Array:
        return layer(x)

    layers, x = make(nnx.Rngs(0)), drawn(2, 7, H)
    gradients = nnx.jit(nnx.grad(lambda layers, x: jnp.sum(jnp.sin(apply(x, layers)))))
    with jax.numpy_dtype_promotion("standard"):
        expected = gradients(layers, x)
        tile_model(layers, num_shards=3)
        assert tiling_paths(layers) == {"mlp": "tiled_mlp"}
        found = gradients(layers, x)
    same(*([leaf[...] for leaf in jax.tree.leaves(each.mlp)] for each in (found, expected)))


TOLD = r"^tile_model: \w+ runs through tile, which recomputes all of it: "


def test_an_adapter_that_comes_later_runs_through_tile(same: Any) -> None:
    """And one that was there before; taken away again, the formula is back."""
    module, x = one(param_dtype=jnp.float64), drawn(2, 7, H)
    tile_model(module, num_shards=4)
    plain = module.up_proj
    adapter = nnx.LoRA(H, 3, I, base_module=plain, param_dtype=jnp.float64, rngs=nnx.Rngs(1))
    adapter.lora_b[...] = drawn(3, I)
    module.up_proj = adapter
    assert tiling_paths(module) == {"": "tile: up_proj is LoRA"}
    with pytest.warns(UserWarning, match=TOLD + "up_proj is LoRA"):
        tiled = results(module, x)
    same(tiled, results(untile_model(module), x))
    assert any("lora_a" in path for path in tiled)
    tile_model(module, num_shards=4, strict=True)
    assert tiling_paths(module) == {"": "tile: it is not the formula of an MLP"}
    same(results(module, x), tiled)
    untile_model(module)
    module.up_proj = plain
    tile_model(module)
    assert tiling_paths(module) == {"": "tiled_mlp"}


@pytest.mark.parametrize("change", ["activation", "dtype", "precision", "sown"])
def test_what_changes_later_is_not_missed(change: str) -> None:
    module, x = one(), drawn(2, 7, H, dtype=jnp.float32)
    tile_model(module, num_shards=2)
    match change:
        case "activation":
            module.activation, reason = nnx.tanh, "activation is tanh"
        case "dtype":
            module.down_proj.dtype, reason = jnp.bfloat16, "down_proj.dtype is bfloat16"
        case "precision":
            module.gate_proj.precision, reason = "high", "gate_proj.precision is 'high'"
        case _:
            module.up_proj.extra, reason = nnx.Param(jnp.ones(3)), "it has up_proj.extra besides"
    assert tiling_paths(module) == {"": f"tile: {reason}"}
    with pytest.warns(UserWarning, match=TOLD + reason):
        found = module(x)
    np.testing.assert_allclose(found, untile_model(module)(x), rtol=DEMO_LOSS_RTOL)


class Mixing(TwoLayers):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + jnp.mean(x, axis=-2, keepdims=True)


class Counting(TwoLayers):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return super().__call__(x)


class FewPlaces(TwoLayers):
    """An expert that takes the first quarter of the tokens that ask for it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, H)
        asks = rows[:, 0] > 0
        taken = asks & (jnp.cumsum(asks) <= rows.shape[0] // 4)
        return jnp.where(taken[:, None], super().__call__(rows), 0).reshape(x.shape)


class OnlyTrained(TwoLayers):
    """Scales its gradients: the values are those of the formula."""

    def __call__(self, x: jax.Array) -> jax.Array:
        y = super().__call__(x)
        return 2 * y - jax.lax.stop_gradient(y)


class WithMask(TwoLayers):
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return super().__call__(x) * mask


LEFT = {
    Mixing: "a token's result depends on other tokens",
    FewPlaces: "a token's result depends on other tokens",
    Counting: "it writes to its state",
    WithMask: "it cannot be called with tokens alone: TypeError",
}


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_what_is_left_is_said_and_refused_by_strict(kind: Any) -> None:
    model = Decoder(one(), kind(Config(), nnx.Rngs(1)), rngs=nnx.Rngs(2))
    text = f"layers.1.mlp: {LEFT[kind]}"
    with pytest.raises(
        UnsupportedError, match=f"^tile_model: model must be one whose MLPs can all be tiled, .* got {text}"
    ):
        tile_model(model, strict=True)
    assert type(model.layers[0].mlp) is GatedMLP, "something was changed"
    with pytest.warns(UserWarning, match=f"^tile_model: MLPs of Decoder stay as they are: {text}"):
        tile_model(model)
    assert tiling_paths(model) == {"layers.0.mlp": "tiled_mlp", "layers.1.mlp": f"untiled: {LEFT[kind]}"}
    with pytest.raises(
        UnsupportedError, match=r"^tile_model: model must be a model with an MLP, got \w+ \(the model: "
    ):
        tile_model(kind(Config(), nnx.Rngs(1)))


def test_other_gradients_are_not_the_formula(same: Any) -> None:
    module, x = OnlyTrained(Config(param_dtype=jnp.float64), nnx.Rngs(0)), drawn(2, 7, H)
    expected = results(module, x)
    tile_model(module, num_shards=3)
    assert tiling_paths(module) == {"": "tile: it is not the formula of an MLP"}
    same(results(module, x), expected)


def test_dropout_runs_through_tile_and_draws_for_every_token() -> None:
    """In evaluation the values are the module's; in training half of the values are dropped, others in every shard."""
    module = TwoLayers(Config(), nnx.Rngs(0), nnx.relu, rate=0.5)
    module.fc1.kernel[...], module.fc2.kernel[...] = jnp.ones((H, I)), jnp.eye(I, H)
    tile_model(module, num_shards=4)
    assert tiling_paths(module) == {"": "tile: it is not the formula of an MLP"}
    x = jnp.ones((1, 40, H))
    y = np.asarray(nnx.jit(lambda module, x: module(x))(module, x))[0]
    masks = (y == y.min(axis=0)).reshape(4, 10, H)
    assert 0.3 < masks.mean() < 0.7
    assert all((masks[i] != masks[j]).any() for i in range(4) for j in range(i))
    module.eval()
    found = module(x)
    np.testing.assert_allclose(found, untile_model(module)(x), rtol=DEMO_LOSS_RTOL)
    narrow = TwoLayers(Config(), nnx.Rngs(0), rate=0.5)
    narrow.dropout.broadcast_dims = (1,)
    with pytest.raises(UnsupportedError, match="its dropout draws one mask for several tokens"):
        tile_model(narrow)


class Transition(nnx.Module):
    """No name in it is an MLP's."""

    def __init__(self, mixes: bool) -> None:
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(H, I, rngs=rngs), nnx.Linear(I, H, rngs=rngs)
        self.drop, self.mixes = nnx.Dropout(0.5, rngs=rngs), mixes

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.drop(self.b(nnx.relu(self.a(x))))
        return y + jnp.mean(x, axis=-2, keepdims=True) if self.mixes else y


def test_the_sizes_of_an_mlp_are_seen_whatever_its_names_are() -> None:
    model = nnx.List([nnx.Linear(I, H, rngs=nnx.Rngs(1)), Transition(mixes=False), one()])
    tile_model(model, num_shards=2, strict=True)
    assert tiling_paths(model) == {"1": "tile: it is not the formula of an MLP", "2": "tiled_mlp"}
    with pytest.raises(UnsupportedError, match="a token's result depends on other tokens"):
        tile_model(Transition(mixes=True))


class WrittenOut(nnx.Module):
    """Its MLP is written into it."""

    def __init__(self, attends: bool) -> None:
        rngs = nnx.Rngs(0)
        self.mixes = (
            nnx.Linear(H, H, rngs=rngs) if not attends else nnx.MultiHeadAttention(2, H, decode=False, rngs=rngs)
        )
        self.wide, self.narrow = nnx.Linear(H, I, rngs=rngs), nnx.Linear(I, H, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.narrow(nnx.relu(self.wide(x + self.mixes(x))))


def test_an_mlp_inside_a_layer_is_left_with_a_reason() -> None:
    """Once for all layers. What is token-wise as a whole runs through tile; a layer of its own names is none."""
    reason = "narrow and wide are called beside what is no MLP; in a module of their own they can be tiled"
    layers = nnx.List([*(WrittenOut(attends=True) for _ in range(12)), one()])
    with pytest.warns(UserWarning, match=f"as they are: 0, 1, 2 and 9 more: {reason}"):
        tile_model(layers)
    assert tiling_paths(layers) == {f"{i}": f"untiled: {reason}" for i in range(12)} | {"12": "tiled_mlp"}
    with pytest.raises(UnsupportedError, match=rf"got WrittenOut \(the model: {reason}\)"):
        tile_model(WrittenOut(attends=True))
    with pytest.raises(
        UnsupportedError, match=r"a model with an MLP, got WrittenOut\. "
    ):  # three layers, of no MLP's sizes
        tile_model(WrittenOut(attends=False))


def test_modules_of_ours_count_and_stay() -> None:
    model = Decoder(TiledMLP(H, I, num_shards=2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    assert tiling_paths(tile_model(model)) == {"layers.0.mlp": "tiled_mlp"}
    assert type(model.layers[0].mlp) is TiledMLP


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another process"])
def test_a_tiled_model_is_pickled(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its classes are made of, which nobody can look up by their names; a graph definition and a deep copy too."""
    layers = [nnx.Linear(8, 12, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(12, 8, rngs=nnx.Rngs(1))]
    model = tile_model(nnx.Sequential(nnx.Sequential(*layers), nnx.Linear(8, 8, rngs=nnx.Rngs(2))), num_shards=3)
    x, kind = drawn(2, 5, 8, dtype=jnp.float32), type(model.layers[0])
    y = model(x)
    stored = [pickle.dumps(model), pickle.dumps(model, protocol=2), pickle.dumps(nnx.split(model))]
    assert type(copy.deepcopy(model).layers[0]) is kind
    if elsewhere:
        monkeypatch.setattr(tiled, "_classes", {})
    for each in stored:
        found = pickle.loads(each)
        found = nnx.merge(*found) if isinstance(found, tuple) else found
        assert tiling_paths(found) == {"layers.0": "tiled_mlp"}
        assert (type(found.layers[0]) is kind) != elsewhere
        assert type(found.layers[0])._tiling == kind._tiling
        assert jnp.array_equal(found(x), y)


def test_tiling_again_and_what_it_is_given() -> None:
    model = Decoder(one(), in_sequence(Config(), nnx.Rngs(1)), rngs=nnx.Rngs(2))
    tile_model(model, num_shards=4)
    first = type(model.layers[0].mlp)
    tile_model(model, tiling=Tiling(shard_tokens=np.int64(2), keep=0.5))
    again = type(model.layers[0].mlp)
    assert (first.__name__, again.__name__, again is first) == ("TiledGatedMLP", "TiledGatedMLP", False)
    assert (first._tiling, again._tiling) == (Tiling(num_shards=4), Tiling(shard_tokens=2, keep=0.5))
    assert type(tile_model(model, num_shards=4).layers[0].mlp) is first

    class Wrapped(first):
        pass

    object.__setattr__(model.layers[0].mlp, "__class__", Wrapped)
    with pytest.raises(UnsupportedError, match="model must be free of classes added after tiling, got Wrapped"):
        untile_model(model)


def test_bad_arguments_are_refused() -> None:
    for function in (tile_model, untile_model, tiling_paths):
        with pytest.raises(TypeError, match=rf"^{function.__name__}: model must be an nnx.Module, got int"):
            function(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="scope must be 'mlp' here, got 'block'"):
        tile_model(one(), scope="block")
    with pytest.raises(SpecError, match="scope must be 'mlp' or 'block', got 'all'"):
        tile_model(one(), scope="all")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="num_shards must be >= 1, got 0"):
        tile_model(one(), num_shards=0)
    with pytest.raises(TypeError, match="strict must be True or False, got str"):
        tile_model(one(), strict="yes")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="model must be a model with an MLP, got Embed"):
        tile_model(nnx.Embed(4, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(
        SpecError, match=r"keep must be 0\.0 where an MLP runs through tile, got 0\.5\. That is layers\.1\.mlp"
    ):
        tile_model(Decoder(one(), TwoLayers(Config(), nnx.Rngs(1), nnx.tanh), rngs=nnx.Rngs(2)), keep=0.5)
