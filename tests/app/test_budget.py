"""The least `--memory-budget` of a model: which layers, ranks and ways of computing decide it. The loop refuses less."""

import pytest

from shared_specs.app.finetune.budget import Buffers, check_budget
from shared_specs.app.options import FinetuneOptions, InputError
from tests.tiny_model import tiny_config


@pytest.mark.parametrize(
    ("changes", "buffers", "least"),
    [
        ({"dp": 2}, Buffers(), 5 * 64 * 4),
        # A token of each rank: its logits of half the vocabulary and their copy, two gathered x, three sums of dx.
        ({"tp": 2}, Buffers(), (2 * 2 * 136 + 2 * 2 * 32 + 3 * 32) * 4),
        # Tokens that two ranks do not divide are gathered nowhere.
        ({"tp": 2, "tokens": 31, "batch": 1}, Buffers(), 2 * 136 * 4),
        # All 64 tokens are fewer than a kernel's block.
        ({}, Buffers(kernels=True, multiple_of=128), 3 * 64 * 64 * 4),
        # Columns of padding: logits, x and dx in two widths, the product of dweight, and the head with its padding.
        ({}, Buffers(compiled=True, logit_columns=lambda entries: entries + 28), (300 + 4 * 32 + 2 * 32 * 300) * 4),
    ],
    ids=["replicas", "split", "split layers alone", "kernels", "padding"],
)
def test_least_budget_follows_ranks_and_buffers(changes, buffers, least):
    def options(budget):
        base = {"model": "model", "text": "text", "tokens": 32, "steps": 6, "batch": 2, "out": "run"}
        return FinetuneOptions(**base | {"memory_budget": budget} | changes)

    with pytest.raises(InputError, match=f"must be >= {least} bytes"):
        check_budget(tiny_config(), options(least - 1), buffers)
    check_budget(tiny_config(), options(least), buffers)
