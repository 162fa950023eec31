"""The sizes of a layer of a plan, as the formulas of blocks and of MLPs take them."""

from typing import Any

from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.setting import Setting
from shared_specs.mlp.costs import MLPShape
from shared_specs.moe.costs import MoEShape


def block_sizes(decoder: Decoder, setting: Setting) -> dict[str, Any]:
    """Return the arguments of the formulas in `shared_specs.layers.block_costs`; hidden: of a token, between the layers."""
    return {
        "hidden": decoder.hidden // setting.tensor,
        "heads": decoder.heads,
        "kv_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "itemsize": setting.itemsize,
    }


def mlp_shape(decoder: Decoder, setting: Setting) -> MLPShape:
    """Return a layer's MLP with a rank's tokens, its weights in the dtype of the products."""
    sizes: dict[str, Any] = {"hidden": decoder.hidden, "intermediate": decoder.intermediate, "tokens": setting.rows}
    return MLPShape(**sizes, itemsize=setting.itemsize, weight_itemsize=setting.itemsize)


def moe_shape(decoder: Decoder, setting: Setting) -> MoEShape:
    """Return a layer's mixture of experts with a rank's tokens, its weights in the dtype of the products."""
    sizes: dict[str, Any] = {"hidden": decoder.hidden, "intermediate": decoder.intermediate, "tokens": setting.rows}
    sizes |= {"experts": decoder.experts, "top_k": decoder.chosen}
    return MoEShape(**sizes, itemsize=setting.itemsize, weight_itemsize=setting.itemsize)
