"""A Flax nnx module or a decoder of `tiled_jax.models`, for `verify`: the same input through it tiled and untiled."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.app.models.weights import read_model
from shared_specs.app.options import InputError, VerifyOptions
from shared_specs.app.verification.target import made, named_object
from shared_specs.app.verification.verify import Computed, check_subject
from shared_specs.check.compare import named_results
from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError
from tiled_jax import tile, tile_model, tiling_paths
from tiled_jax.check.train import cast, computing_in
from tiled_jax.models import Llama, LlamaConfig, from_hf, next_token_loss
from tiled_jax.models.tiling import paths_that_ran

Arrays = dict[str, jax.Array]


class JaxSubject:
    """See `shared_specs.app.verification.verify.Subject`. A module whose call takes `tokens` or `input_ids` first is a language
    model; where it takes labels too, they are these tokens.

    JAX has no hooks, and a compiled step says by itself what memory it takes. What `train` changes nothing of, as of a decoder
    of `tiled_jax.models`, is the same function in training.
    """

    def __init__(self, options: VerifyOptions) -> None:
        self._device = _device(options.device)
        self._options, self._whole = options, False
        self.name = options.model or str(options.target)
        self.modes: tuple[str, ...] = ("evaluation",)
        self._paths: dict[str, str] = {}
        self._takes: tuple[str, ...] = ()
        if options.model is None:
            module = _module(options)
            self._takes = tuple(inspect.signature(type(module).__call__).parameters)[1:]
            check_subject(options, self._of_tokens)
            self._whole = not self._of_tokens and not _has_layers(module, options.num_shards)
            self._entries = _entries(self.name, module) if self._of_tokens else 0
            self._graph, self._parameters, self._rest = nnx.split(module, nnx.Param, ...)
            module.train()
            if nnx.split(module, nnx.Param, ...)[0] != self._graph:
                self.modes = ("evaluation", "training")
        else:
            files = read_model(options.model, "verify")
            self._config, self._tensors = LlamaConfig.from_hf(files.config), files.tensors
        alone = self._of_tokens or options.model is not None
        self.dtypes: tuple[str, ...] = ("float32",) if alone else ("float64", "float32")

    @property
    def _of_tokens(self) -> bool:
        return self._takes[:1] in (("tokens",), ("input_ids",))

    def compute(self, dtype: str, tiled: bool, mode: str = "evaluation", draw: int = 0) -> Computed:
        with jax.enable_x64(dtype == "float64"), jax.default_device(self._device):
            step, given = self._step(dtype, tiled, mode, draw)
            values, gradients = jax.jit(step)(*given)
            found = dict(values) | ({"dx": gradients[1]} if len(gradients) > 1 else {})
            for path, leaf in nnx.to_flat_state(gradients[0]):
                found["d" + ".".join(map(str, path))] = leaf.get_value()
            return Computed(results={name: np.asarray(array) for name, array in found.items()})

    def paths(self) -> Mapping[str, str]:
        if self._options.model is None:
            return {"": "tile: the whole of it is one token-wise function"} if self._whole else self._paths
        path = "tiled_block" if self._options.scope == "block" else "tiled_mlp"
        return {"layers.mlp": path, "head": "tiled_linear_cross_entropy"}

    def peak_bytes(self, tiled: bool) -> int:
        """Return the temporary bytes of the compiled program."""
        with jax.default_device(self._device):
            step, given = self._step("float32", tiled, "evaluation", 0)
            analysis: Any = jax.jit(step).lower(*given).compile().memory_analysis()
            return int(analysis.temp_size_in_bytes)

    def _step(self, dtype: str, tiled: bool, mode: str, draw: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a function that gives everything floating that comes out, by its name, and the gradients of its arguments,
        and the arguments.
        """
        if self._options.model is not None:
            return self._step_of_model(tiled)
        wide = jnp.dtype(dtype)
        apart = tiled and not self._whole
        given = (cast(state, wide) for state in (self._parameters, self._rest))
        module = computing_in(_drawing(nnx.merge(self._graph, *given), draw), wide)
        if mode == "training":
            module.train()
        options = self._options
        tiled_module = _tiled(module, options.num_shards, options.scope) if apart else module
        known = tiling_paths(tiled_module) if apart else {}
        graph, parameters, rest = nnx.split(tiled_module, nnx.Param, ...)
        random = np.random.default_rng(options.seed)

        def forward(parameters: Any, x: jax.Array) -> Arrays:
            # Variables of this trace: a dropout counts what it has drawn.
            module: Any = nnx.merge(graph, parameters, jax.tree.map(lambda a: a, rest))
            call = tile(module, num_shards=options.num_shards) if tiled and self._whole else module
            y = call(x, labels=x) if self._of_tokens and "labels" in self._takes else call(x)
            if apart:
                self._paths = known | paths_that_ran(module)
            found = named_results(y, lambda a: isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jnp.floating))
            if not found:
                kind = f"one of {y.dtype}" if isinstance(y, jax.Array) else type(y).__name__
                raise InputError(f"verify: {self.name} must return an array of floating-point numbers, got {kind}.")
            return found

        if self._of_tokens:
            ids = jnp.asarray(random.integers(self._entries, size=(1, options.tokens)), jnp.int32)
            call, given = partial(forward, x=ids), (parameters,)
        else:
            x = jnp.asarray(random.standard_normal((1, options.tokens, options.hidden or 1)), wide)
            call, given = forward, (parameters, x)
        draws = np.random.default_rng(options.seed + 1)
        shapes = jax.eval_shape(call, *given)
        upstream = {name: jnp.asarray(draws.standard_normal(a.shape), a.dtype) for name, a in shapes.items()}

        def step(upstream: Arrays, *given: Any) -> tuple[Arrays, tuple[Any, ...]]:
            y, pull = jax.vjp(call, *given)
            return y, pull(upstream)

        return step, (upstream, *given)

    def _step_of_model(self, tiled: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        options = self._options
        shards: dict[str, Any] = {"plain": True}
        if tiled:
            shards = {"tiling": Tiling(num_shards=options.num_shards), "scope": options.scope}
        model = nnx.eval_shape(lambda: Llama(self._config, rngs=nnx.Rngs(0), **shards))
        graph, shapes = nnx.split(model)
        parameters = from_hf(shapes, self._tensors, self._device)
        ids = np.random.default_rng(options.seed).integers(self._config.vocab_size, size=(1, options.tokens))

        def step(parameters: Any, ids: jax.Array) -> tuple[Arrays, tuple[Any, ...]]:
            loss, gradients = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graph, p), ids))(parameters)
            return {"loss": loss}, (gradients,)

        return step, (parameters, jnp.asarray(ids, jnp.int32))


def _module(options: VerifyOptions) -> nnx.Module:
    found = named_object(str(options.target))
    if not isinstance(found, nnx.Module):
        if not callable(found):
            raise InputError(
                f"verify: {options.target} must be a flax.nnx.Module, or return one, got {type(found).__name__}."
            )
        found = made(str(options.target), found, options.hidden, rngs=nnx.Rngs(options.seed))
    if not isinstance(found, nnx.Module):
        raise InputError(f"verify: {options.target} must return a flax.nnx.Module, got {type(found).__name__}.")
    found.eval()
    return found


def _has_layers(module: nnx.Module, num_shards: int) -> bool:
    """Return whether `tile_model` knows an MLP inside; a module without one is tiled as it is."""
    try:
        _tiled(nnx.merge(*nnx.split(module)), num_shards)
    except UnsupportedError:
        return False
    return True


def _tiled(module: nnx.Module, num_shards: int, scope: Any = "mlp") -> Any:
    """Return the module, its MLPs tiled. What is left untiled is told by its path, and not by a warning as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tile_model(module, scope=scope, num_shards=num_shards)


def _entries(name: str, module: nnx.Module) -> int:
    """Return how many entries the vocabulary of a language model has: those of its first embedding."""
    for _, inside in nnx.iter_modules(module):
        if isinstance(inside, nnx.Embed):
            return inside.num_embeddings
    raise InputError(f"verify: {name} must have a flax.nnx.Embed for the tokens that it takes.")


def _drawing(module: Any, draw: int) -> Any:
    """Return the module, whose streams of random numbers are others for another `draw`."""
    keys = nnx.state(module, nnx.RngKey)
    nnx.update(module, jax.tree.map(lambda key: jax.random.fold_in(key, draw), keys))
    return module


def _device(name: str) -> Any:
    if name == "auto":
        return jax.devices()[0]
    try:
        return jax.devices(name)[0]
    except RuntimeError as error:
        text = f"verify: --device must be cpu or auto here, got {name}. JAX sees no such device."
        raise UnsupportedError(text) from error
