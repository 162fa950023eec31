"""transformers' Trainer with a tiled model: one line more, and evaluation of the loss makes no logits.

python examples/trainer_torch.py --model FOLDER --tokens 32768 --bf16
"""

import argparse
import tempfile

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from tiled_torch import tile_model, tiling_paths


def small_model() -> PreTrainedModel:
    """Return a model of random weights, which stands in for yours."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Train for a few steps and return the loss of the evaluation before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face folder; without it a small random model")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else small_model()
    tile_model(model)  # the line
    print(tiling_paths(model))

    text = torch.arange(options.tokens * 4).reshape(4, -1) % 97
    rows = [{"input_ids": row, "labels": row} for row in text]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            bf16=options.bf16,
            learning_rate=1e-3,
            prediction_loss_only=True,  # else the logits of the evaluation are asked for
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    print(f"loss of the evaluation: {before:.4f} before, {after:.4f} after")
    return before, after


if __name__ == "__main__":
    main()
