"""Right ways of training tiny Flax models, of which `check` must say nothing: no false alarm."""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.check.jax_faults import gradients_of
from tests.check.jax_models import H, T, TinyLM, tokens

WAYS = ("whole", "adapters", "frozen", "accumulation", "padding", "packed", "adamw", "checkpointing")


class Checkpointed(TinyLM):
    """Computes its attention and MLP again in backward."""

    def __call__(self, ids: Any, labels: Any, document: Any = None, padding: Any = None) -> jax.Array:
        x = self.embed(ids)
        x = nnx.remat(lambda self, x: x + self.attention(self.norm(x)))(self, x)
        x = nnx.remat(lambda self, x: x + self.mlp(x))(self, x)
        return self.loss(x, labels)


@dataclass(frozen=True)
class Setup:
    kind: str
    dtype: str
    way: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.dtype}-{self.way}"

    def arguments(self) -> dict[str, Any]:
        """Return those of `check`."""
        dtypes = {} if self.dtype == "float32" else {"dtype": jnp.bfloat16}
        if self.dtype == "bfloat16":
            dtypes["param_dtype"] = jnp.bfloat16
        model = (Checkpointed if self.way == "checkpointing" else TinyLM)(tied=self.kind == "tied", **dtypes)
        found: dict[str, Any] = dict(model=model, batch=tokens())
        if self.way == "adapters":
            normal = nnx.initializers.normal(0.3)
            mlp: Any = model.mlp
            mlp.up = nnx.LoRA(H, 2, 12, base_module=mlp.up, rngs=nnx.Rngs(3), b_initializer=normal, **dtypes)
            found |= dict(wrt=nnx.LoRAParam)
        elif self.way == "frozen":
            found |= dict(wrt=nnx.All(nnx.Param, nnx.PathContains("mlp")))
        elif self.way == "accumulation":
            found |= dict(batch=tokens(4), step=accumulated, plain_step=lambda model, batch: model(**batch))
        elif self.way == "padding":
            seen = jnp.arange(T) >= jnp.asarray([[5], [0]])
            batch = tokens(labels=jnp.where(seen, tokens()["ids"], -100), padding=seen)
            found |= dict(batch=batch)
        elif self.way == "packed":
            found |= dict(batch=tokens(document=jnp.broadcast_to(jnp.arange(T) // 6, (2, T))))
        elif self.way == "adamw":
            found |= dict(optimizer=optax.adamw(1e-3))
        return found


def accumulated(model: Any, batch: Any) -> Any:
    """Return the mean loss of two micro-batches, and of their gradients."""
    halves = [jax.tree.map(lambda a, n=n: jnp.split(a, 2)[n], batch) for n in range(2)]
    (one, first), (other, second) = (gradients_of(model, half) for half in halves)
    return (one + other) / 2, jax.tree.map(lambda a, b: (a + b) / 2, first, second)


EVERY = [Setup(*chosen) for chosen in itertools.product(("own", "tied"), ("float32", "bfloat16", "mixed"), WAYS)]
