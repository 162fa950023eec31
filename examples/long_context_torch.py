"""A long context over many GPUs in PyTorch: sharded state, sequences cut over ranks, layer inputs in host memory.

    torchrun --nproc-per-node 8 examples/long_context_torch.py --model FOLDER --tokens 1048576
    python examples/long_context_torch.py        # small, one process, to see it run

Every rank is given the whole sequence; `parallelize` cuts it. With several nodes torchrun's usual options say where they are.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tiled_torch import Checkpointing, DataParallel, ParallelConfig, parallelize, tile_model


def build(folder: str | None) -> nn.Module:
    """Return a model with its weights on the CPU; each rank keeps its part of them."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))


def main(arguments: list[str] | None = None) -> list[float]:
    """Train for a few steps and return their losses, the same on every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face folder; without it a small random model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(arguments)

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}.items():
            os.environ.setdefault(name, value)  # started without torchrun: one process
        dist.init_process_group("nccl" if gpu else "gloo")

    # All ranks share one sequence, as a ring: keys and values travel round, so the number of heads is no limit.
    mesh = init_device_mesh("cuda" if gpu else "cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_shard", "cp"))
    config = ParallelConfig(
        checkpointing=Checkpointing(offload=gpu),  # inputs of layers wait in host memory
        data=DataParallel(context_axis="cp", context="ring", param_dtype="bfloat16" if gpu else None),
    )
    torch.manual_seed(0)
    model = tile_model(build(options.model), scope="block")  # everything but attention, a shard at a time
    model = parallelize(model, mesh, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    tokens = (torch.arange(options.tokens)[None] % 97).to("cuda" if gpu else "cpu")
    losses = []
    for step in range(options.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            peak = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if gpu else ""
            print(f"step {step}: loss {losses[-1]:.4f}{peak}", flush=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
