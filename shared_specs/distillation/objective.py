"""What a distillation loss minimises, as frozen data: the same words in both halves."""

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of one token: weight_soft D(p, q) + weight_hard (-log softmax(z)[target]).

    z are the student's logits; q = softmax(z / temperature) and p, the teacher's likewise, are what D compares:
    "forward_kl" is KL(p || q), "reverse_kl" KL(q || p), and "jsd" beta KL(p || m) + (1 - beta) KL(q || m) with
    m = beta p + (1 - beta) q, the generalised Jensen-Shannon divergence.
    """

    kind: Kind = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5
    weight_hard: float = 0.0
    weight_soft: float = 1.0

    @property
    def largest_slope(self) -> float:
        """Return about how large the gradient of the loss of a token in its logits gets."""
        return max(self.weight_soft / self.temperature, self.weight_hard)
