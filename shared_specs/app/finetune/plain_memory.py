"""Memory of a whole training step without tiling, as a formula: what plain training of a context would need."""

from dataclasses import dataclass
from typing import Any

from shared_specs.app.models.decoders import DECODERS, ExpertTerms
from shared_specs.app.models.model_config import weight_shapes

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """Live bytes of one float32 training step of the plain PyTorch model, without layer checkpointing.

    Attributes:
        weights: parameters; gradients are as many bytes again, the two AdamW moments twice as many.
        activations: what autograd keeps for backward, vocabulary aside.
        logits: one [tokens, vocabulary] array.
    """

    weights: int
    activations: int
    logits: int

    @property
    def peak(self) -> int:
        """Return the larger of two moments: backward begins (the kept log-softmax, its gradient and that of the logits), or
        the optimizer steps (gradients complete, activations gone).
        """
        return max(3 * self.weights + self.activations + 3 * self.logits, 4 * self.weights)


def plain_step(config: dict[str, Any], tokens: int) -> PlainStep:
    """Return the bytes of a step on `tokens` tokens (batch x context), process and allocator not counted.

    Per token and layer autograd keeps 6 H (the input, the normalised input and the scaled input of both norms), query
    and attention output, key and value, the attention's log-sum, one scale for each norm, and 4 I (gate, up,
    act(gate) and h). The final norm keeps 3 H and a scale, the rotation a cosine and a sine.
    """
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts = DECODERS[config["model_type"]].experts
    of_mlp = 4 * inner if experts is None else _of_experts(config, experts)
    layer = 6 * hidden + 2 * heads * width + 2 * key_heads * width + heads + 2 + of_mlp
    per_token = config["num_hidden_layers"] * layer + 3 * hidden + 1 + 2 * width
    weights = 0
    for shape in weight_shapes(config).values():
        elements = 1
        for size in shape:
            elements *= size
        weights += elements
    return PlainStep(
        weights=weights * _FLOAT32,
        activations=per_token * tokens * _FLOAT32,
        logits=tokens * config["vocab_size"] * _FLOAT32,
    )


def _of_experts(config: dict[str, Any], terms: ExpertTerms) -> int:
    """Return what a token keeps in a mixture: of each of its experts an MLP's 4 I, the row that goes in and the one that comes
    out, and its weight; the router's probabilities of all; and, where weights are made to add up to one, these and their sum.
    """
    chosen = config[terms.chosen]
    normalised = terms.normalised is None or config[terms.normalised]
    of_router = config[terms.count] + (chosen + 1 if normalised else 0)
    return chosen * (4 * config[terms.intermediate] + 2 * config["hidden_size"] + 1) + of_router
