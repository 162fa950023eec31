"""LoRA around every linear layer of any causal language model of transformers, added before and after tiling."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.models.supported import TEXT, assert_same_step, build, tiled_copy
from tests.models.tiny_overrides import NOT_ADAPTED, NOT_BUILT

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft's own


@pytest.mark.parametrize("tiled_first", [True, False], ids=["tiled-then-peft", "peft-then-tiled"])
@pytest.mark.parametrize("kind", [kind for kind in TEXT if kind not in {*NOT_BUILT, "kimi_linear", "reformer"}])
def test_adapters_on_every_layer_of_any_model(kind: str, tiled_first: bool) -> None:
    """Loss, logits and the gradients of all adapters, but of layers that peft refuses or the model calls in its own way."""

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        options = {"exclude_modules": [NOT_ADAPTED[kind]]} if kind in NOT_ADAPTED else {}
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=2, **options)
        return peft.get_peft_model(model, config).to(model.dtype)

    untiled = build(kind)
    model = adapted(tiled_copy(untiled)) if tiled_first else tiled_copy(adapted(deepcopy(untiled)))
    assert_same_step(model, adapted(untiled), kind)
