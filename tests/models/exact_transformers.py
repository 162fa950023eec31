"""Decoders of transformers in which everything is float64, also what they compute in float32 whatever their dtype is."""

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, modeling_rope_utils

from tests.models.families import FAMILIES, SIZES


class _Wide:
    """The module `torch`, with float64 in the place of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def exact_model(monkeypatch: pytest.MonkeyPatch, family: str) -> Any:
    """A model of a family with random weights, which float32 can hold, and float64 arithmetic."""
    changes = SIZES | FAMILIES[family]
    config = AutoConfig.for_model(**changes)
    config._experts_implementation = "eager"  # the others have no float64
    kind = type(AutoModelForCausalLM.from_config(config))
    wide: Any = _Wide()
    for module in (sys.modules[kind.__module__], modeling_rope_utils):
        monkeypatch.setattr(module, "torch", wide)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = kind._from_config(config, dtype=torch.float64, attn_implementation="eager").train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            near = 1.0 if "norm" in name and "gemma" not in family else 0.0
            parameter.copy_(near + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model
