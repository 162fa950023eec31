"""Preferences in PyTorch whose logits never exist: DPO, and a reward that needs no reference model.

    python examples/preference_torch.py --tokens 4096

A batch holds chosen and rejected answers to the same prompts. What either objective needs is the log-probability of every token
of an answer. The prompts' labels are -100, so their rows are never multiplied by the head.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tiled_torch import LossOptions, tile_model, tiled_linear_cross_entropy

OPTIONS = LossOptions(reduction="none", outputs=("log_probs",))


def log_probs_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of every target, [..., S]; 0 where targets are -100."""
    return tiled_linear_cross_entropy(hidden, weight, targets, loss=OPTIONS).log_probs


def dpo(new: Tensor, reference: Tensor, beta: float = 0.1) -> Tensor:
    """Return the loss of DPO (arXiv 2305.18290) of log-probabilities [2, B, S]: of the chosen answers, then of the rejected."""
    chosen, rejected = beta * (new - reference).sum(-1)
    return -F.logsigmoid(chosen - rejected).mean()


def simpo(new: Tensor, counted: Tensor, beta: float = 2.0, margin: float = 1.0) -> Tensor:
    """Return the loss of SimPO (arXiv 2405.14734), whose reward is an answer's mean log-probability. counted: [2, B, S]."""
    chosen, rejected = beta * new.sum(-1) / counted.sum(-1)
    return -F.logsigmoid(chosen - rejected - margin).mean()


def main(arguments: list[str] | None = None) -> list[float]:
    """Take two steps of DPO on one batch and return the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    policy = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
    tile_model(policy.model)  # the decoder below the head: the loss is called by hand
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    ids = torch.randint(256, (2, 3, options.tokens))
    targets = torch.cat([ids[..., 1:], torch.full((2, 3, 1), -100)], -1)
    targets[..., : options.tokens // 2] = -100  # the prompts

    def scored(model: nn.Module) -> Tensor:
        hidden = model.model(input_ids=ids.flatten(0, 1)).last_hidden_state
        return log_probs_of(hidden.unflatten(0, (2, 3)), model.lm_head.weight, targets)

    with torch.no_grad():
        reference = scored(policy)  # the policy before its first step
    found = []
    for step in range(2):
        new = scored(policy)
        loss = dpo(new, reference)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        reward = simpo(new.detach(), targets != -100).item()
        print(f"step {step}: DPO {found[-1]:.5f}, SimPO {reward:.5f}")
    return found


if __name__ == "__main__":
    main()
