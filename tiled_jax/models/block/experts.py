"""The experts of a decoder layer that runs as one block: which call each of its shards is a part of."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from shared_specs.config import JAX, Tiling
from shared_specs.core.checks import flat_tokens
from shared_specs.moe.checks import check_moe
from shared_specs.shards import ShardPlan, plan_tiling
from tiled_jax import backends
from tiled_jax.core.arrays import operands
from tiled_jax.core.own_tokens import split_of
from tiled_jax.models.experts import ExpertsMLP
from tiled_jax.moe.loops import MOE_WEIGHTS, MoECall
from tiled_jax.moe.steps import steps_here


def experts_call(function: str, mlp: ExpertsMLP, x: jax.Array, parameters: Mapping[str, jax.Array]) -> MoECall:
    """Return the call of the experts on x [T, H], in the dtype of the products, with the layer's parameters by name.

    A shard of the layer is one of the call's, so it is cut as the layer is: by tokens alone. Logits of the router are rounded
    as those of the layer's own router are.

    Raises:
        SpecError: shapes or dtypes disagree.
    """
    w = {name: parameters[name] for name in MOE_WEIGHTS}
    seen = operands({"x": x, **w})
    check_moe(function, x=seen["x"], weights={name: seen[name] for name in w}, names=JAX, master_weights=True)
    replan = _Replan(mlp.tiling, backends.device_kind())
    split = split_of(function, x, w.values(), (), None)
    return MoECall(
        plan=replan(flat_tokens(x.shape)),
        top_k=mlp.experts.chosen,
        scoring="softmax",
        normalize=mlp.experts.normalised,
        activation=mlp.activation,
        logits=False,
        steps=steps_here(),
        split=split,
        replan=None if split is None else replan,
        rounded=True,
    )


@dataclass(frozen=True)
class _Replan:
    """The plan of so many tokens. Static."""

    tiling: Tiling
    device: str

    def __call__(self, tokens: int) -> ShardPlan:
        return plan_tiling(tokens, self.tiling, device=self.device)
