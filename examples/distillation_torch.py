"""Distillation in PyTorch whose logits never exist: a small model learns from a larger one of the same vocabulary.

    python examples/distillation_torch.py --tokens 4096

The prompts' labels are -100: neither head multiplies their rows.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiled_torch import tile_model, tiled_distillation_loss


def model_of(hidden_size: int, layers: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=256))
    tile_model(model.model)  # the decoder below the head: the loss is called by hand
    return model


def main(arguments: list[str] | None = None) -> list[float]:
    """Take three steps on one batch and return the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kind", choices=("forward_kl", "reverse_kl", "jsd"), default="forward_kl")
    parser.add_argument("--temperature", type=float, default=2.0)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    teacher, student = model_of(64, 3).requires_grad_(False).eval(), model_of(32, 2)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)

    ids = torch.randint(256, (2, options.tokens))
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], -1)
    targets[:, : options.tokens // 2] = -100  # the prompts

    with torch.no_grad():
        of_teacher = teacher.model(input_ids=ids).last_hidden_state
    found = []
    for step in range(3):
        loss = tiled_distillation_loss(
            student.model(input_ids=ids).last_hidden_state,
            student.lm_head.weight,
            of_teacher,
            teacher.lm_head.weight,
            targets,
            kind=options.kind,
            temperature=options.temperature,
            weight_hard=0.1,  # a tenth of the cross entropy with the labels
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        print(f"step {step}: {found[-1]:.5f}")
    return found


if __name__ == "__main__":
    main()
