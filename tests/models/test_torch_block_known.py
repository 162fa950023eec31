"""Which decoder layers `tile_model(scope="block")` takes: those of a list, and those that are written as one of the list."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from transformers.models.youtu import modeling_youtu

from tests.models.test_torch_block import LATENT
from tests.models.test_torch_models import build
from tiled_torch.models.block.families import BLOCK_FAMILIES
from tiled_torch.models.block.known import _all_written, is_block, name_of_alike

LATENTS = ("axk1", "glm4_moe_lite", "youtu")
EXPERTS = {"n_routed_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1}


def last_layer(kind: str, **changes: Any) -> Any:
    config = transformers.CONFIG_MAPPING[kind]()
    sizes = {name: size for name, size in EXPERTS.items() if hasattr(config, name)}
    sizes |= LATENT if kind in LATENTS else {}
    return build(kind, num_attention_heads=4, **sizes | changes).base_model.layers[-1]


def test_the_text_of_every_known_class_is_found() -> None:
    written = _all_written()
    assert set(written) == set(BLOCK_FAMILIES)
    assert all(one.layer and one.attention and (one.mlps or one.mixtures) for one in written.values())


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("glm4_moe_lite", "DeepseekV3DecoderLayer"),
        ("youtu", "DeepseekV3DecoderLayer"),
        ("axk1", None),  # of whose experts' result a norm in its MLP wants the value
        ("diffllama", None),  # whose attention is a difference
    ],
)
def test_layers_that_are_written_as_a_known_one(kind: str, known: str | None) -> None:
    layer = last_layer(kind)
    assert name_of_alike(layer) == known
    assert is_block(layer) == (known is not None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hidden_states = residual + hidden_states", "hidden_states = residual + 2 * hidden_states"),
        ("k_rot = k_rot.expand(-1, k_nope.shape[1], -1, -1)", "k_rot = 2 * k_rot.expand(-1, k_nope.shape[1], -1, -1)"),
        ("down_proj = self.down_proj(self.act_fn(", "down_proj = 2 * self.down_proj(self.act_fn("),
    ],
)
def test_one_other_line_is_another_layer(old: str, new: str, tmp_path: Path) -> None:
    """In the layer, in a method that its attention calls, in its MLP."""
    text, home = Path(modeling_youtu.__file__).read_text(), tmp_path / "modeling_other.py"
    assert old in text
    names: list[str | None] = []
    for written in (text, text.replace(old, new)):
        home.write_text(written)
        module = ModuleType(modeling_youtu.__name__)
        vars(module).update(__file__=str(home), __package__=modeling_youtu.__package__)
        exec(compile(written, str(home), "exec"), vars(module))
        config: Any = last_layer("youtu").self_attn.config
        names.append(name_of_alike(module.YoutuDecoderLayer(config, 0)))
        home = tmp_path / "modeling_another.py"
    assert names == ["DeepseekV3DecoderLayer", None]
