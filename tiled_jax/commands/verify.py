"""A Flax nnx module or a decoder of `tiled_jax.models`, for `verify`: the same input through it tiled and untiled."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.app.models.weights import read_model
from shared_specs.app.options import InputError, VerifyOptions
from shared_specs.app.verify import Computed, made, named_object
from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError
from tiled_jax import tile, tile_model
from tiled_jax.models import Llama, LlamaConfig, from_hf, next_token_loss
from tiled_jax.models.tiling import paths_that_ran


class JaxSubject:
    """See `shared_specs.app.verify.Subject`. In evaluation mode: what dropout leaves out depends on how tokens are cut.

    JAX has no hooks, and a compiled step says by itself what memory it takes.
    """

    def __init__(self, options: VerifyOptions) -> None:
        self._device = _device(options.device)
        self._options, self._of_tokens = options, options.model is not None
        self.name = options.model or str(options.target)
        self.dtypes: tuple[str, ...] = ("float32",) if self._of_tokens else ("float64", "float32")
        self._paths: dict[str, str] = {}
        if options.model is None:
            module = _module(options)
            self._whole = not _has_layers(module, options.num_shards)
            self._graph, self._parameters, self._rest = nnx.split(module, nnx.Param, ...)
        else:
            files = read_model(options.model, "verify")
            self._config, self._tensors = LlamaConfig.from_hf(files.config), files.tensors

    def compute(self, dtype: str, tiled: bool) -> Computed:
        with jax.enable_x64(dtype == "float64"), jax.default_device(self._device):
            step, given = self._step(dtype, tiled)
            value, gradients = jax.jit(step)(*given)
            found = {"loss" if self._of_tokens else "y": value}
            found |= {"dx": gradients[1]} if len(gradients) > 1 else {}
            for path, leaf in nnx.to_flat_state(gradients[0]):
                found["d" + ".".join(map(str, path))] = leaf.get_value()
            return Computed(results={name: np.asarray(array) for name, array in found.items()})

    def paths(self) -> Mapping[str, str]:
        if not self._of_tokens:
            return {"": "tile: the whole of it is one token-wise function"} if self._whole else self._paths
        path = "tiled_block" if self._options.scope == "block" else "tiled_mlp"
        return {"layers.mlp": path, "head": "tiled_linear_cross_entropy"}

    def peak_bytes(self, tiled: bool) -> int:
        """Return the temporary bytes of the compiled program."""
        with jax.default_device(self._device):
            step, given = self._step("float32", tiled)
            analysis: Any = jax.jit(step).lower(*given).compile().memory_analysis()
            return int(analysis.temp_size_in_bytes)

    def _step(self, dtype: str, tiled: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a function that gives the output or the loss and the gradients of its arguments, and the arguments."""
        if self._of_tokens:
            return self._step_of_model(tiled)
        wide = jnp.dtype(dtype)
        apart = tiled and not self._whole
        given = (jax.tree.map(lambda a: _cast(a, wide), state) for state in (self._parameters, self._rest))
        module = _computing_in(nnx.merge(self._graph, *given), wide)
        graph, parameters, rest = nnx.split(
            _tiled(module, self._options.num_shards) if apart else module, nnx.Param, ...
        )
        options = self._options
        random = np.random.default_rng(options.seed)
        x = jnp.asarray(random.standard_normal((1, options.tokens, options.hidden or 1)), wide)

        def forward(parameters: Any, x: jax.Array) -> jax.Array:
            module: Any = nnx.merge(graph, parameters, rest)
            call = tile(module, num_shards=options.num_shards) if tiled and self._whole else module
            y = call(x)
            if apart:
                self._paths = paths_that_ran(module)
            y = y[0] if isinstance(y, tuple) else y
            if not isinstance(y, jax.Array):
                text = f"{self.name} must return an array, or a tuple that begins with one, got {type(y).__name__}"
                raise InputError(f"verify: {text}.")
            return y

        shape = jax.eval_shape(forward, parameters, x).shape
        dy = jnp.asarray(np.random.default_rng(options.seed + 1).standard_normal(shape), wide)

        def step(parameters: Any, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
            y, pull = jax.vjp(forward, parameters, x)
            return y, pull(dy.astype(y.dtype))

        return step, (parameters, x, dy)

    def _step_of_model(self, tiled: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        options = self._options
        shards: dict[str, Any] = {"plain": True}
        if tiled:
            shards = {"tiling": Tiling(num_shards=options.num_shards), "scope": options.scope}
        model = nnx.eval_shape(lambda: Llama(self._config, rngs=nnx.Rngs(0), **shards))
        graph, shapes = nnx.split(model)
        parameters = from_hf(shapes, self._tensors, self._device)
        ids = np.random.default_rng(options.seed).integers(self._config.vocab_size, size=(1, options.tokens))

        def step(parameters: Any, ids: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
            loss, gradients = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graph, p), ids))(parameters)
            return loss, (gradients,)

        return step, (parameters, jnp.asarray(ids, jnp.int32))


def _module(options: VerifyOptions) -> nnx.Module:
    found = named_object(str(options.target))
    if not isinstance(found, nnx.Module):
        if not callable(found):
            raise InputError(
                f"verify: {options.target} must be a flax.nnx.Module, or return one, got {type(found).__name__}."
            )
        found = made(str(options.target), found, options.hidden or 1, rngs=nnx.Rngs(options.seed))
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


def _tiled(module: nnx.Module, num_shards: int) -> Any:
    """Return the module, its MLPs tiled. What is left untiled is told by its path, and not by a warning as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tile_model(module, num_shards=num_shards)


def _cast(array: Any, dtype: Any) -> Any:
    """Return a floating-point array in this dtype; what else is there stays."""
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _computing_in(module: nnx.Module, dtype: Any) -> nnx.Module:
    """Return the module, with what says in which dtype it computes saying this one."""
    inside: Any
    for _, inside in nnx.iter_modules(module):
        if getattr(inside, "dtype", None) is not None:
            inside.dtype = dtype
    return module


def _device(name: str) -> Any:
    if name == "auto":
        return jax.devices()[0]
    try:
        return jax.devices(name)[0]
    except RuntimeError as error:
        text = f"verify: --device must be cpu or auto here, got {name}. JAX sees no such device."
        raise UnsupportedError(text) from error
