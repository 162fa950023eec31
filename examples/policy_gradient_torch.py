"""A policy-gradient step in PyTorch whose logits never exist: log-probabilities and entropies from the tiled loss.

    python examples/policy_gradient_torch.py --tokens 4096

The clipped objective of PPO and GRPO with a penalty on the divergence from a reference model, over one batch of completions.
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tiled_torch import LossOptions, tile_model, tiled_linear_cross_entropy

OPTIONS = LossOptions(reduction="none", outputs=("log_probs", "entropy"))


def log_probs_of(model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every target [B, S], 0 where targets are -100, and the entropy of every token's
    distribution, which is there for any target.
    """
    hidden = model.model(input_ids=ids).last_hidden_state
    result = tiled_linear_cross_entropy(hidden, model.lm_head.weight, targets, loss=OPTIONS)
    return result.log_probs, result.entropy


def objective(
    new: Tensor,
    old: Tensor,
    reference: Tensor,
    advantages: Tensor,
    counted: Tensor,
    clip: tuple[float, float] = (0.2, 0.2),
) -> Tensor:
    """Return the mean over the counted tokens of the clipped objective and the divergence from the reference.

    clip: how far a ratio may go down and up; DAPO (arXiv 2503.14476) has (0.2, 0.28).
    """
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)
    away = (reference - new).exp() - (reference - new) - 1
    return ((0.04 * away - gain) * counted).sum() / counted.sum()


def main(arguments: list[str] | None = None) -> list[float]:
    """Take two steps on one batch of completions and return the objective of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    policy, reference = (LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256)) for _ in range(2))
    for model in (policy, reference):
        tile_model(model.model)  # the decoder below the head: the loss is called by hand
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    ids = torch.randint(256, (2, options.tokens))
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    targets[:, : options.tokens // 4] = -100  # the prompt
    counted, advantages = (targets != -100).float(), torch.tensor([[1.0], [-1.0]])
    with torch.no_grad():
        old, _ = log_probs_of(policy, ids, targets)
        fixed, _ = log_probs_of(reference, ids, targets)
    found = []
    for step in range(2):
        new, entropy = log_probs_of(policy, ids, targets)
        loss = objective(new, old, fixed, advantages, counted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_entropy = (entropy.detach() * counted).sum() / counted.sum()
        found.append(loss.item())
        print(f"step {step}: objective {found[-1]:+.5f}, entropy {mean_entropy:.3f} nats")
    return found


if __name__ == "__main__":
    main()
