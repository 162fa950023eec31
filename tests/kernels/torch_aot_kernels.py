"""Compiles every Triton kernel ahead of time, without a GPU, and reads what the binaries need. A program: prints JSON.

    python -m tests.kernels.torch_aot_kernels sm_90 [name ...]
    python -m tests.kernels.torch_aot_kernels sm_90 candidates
    python -m tests.kernels.torch_aot_kernels sm_90 table

The last one writes what it finds into kernel_resources.json, which has both supported versions of Triton.

The launch wrappers run on meta tensors of Llama-3-8B's sizes and their launches are caught instead of made, so what is
compiled is what would run: the same constants, block sizes, descriptors and alignment.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # its default will change in Triton 3.10

import torch
import triton
import triton.backends.nvidia as nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from shared_specs.kernels.blocks import PAIR, PERSISTENT, ROW_ALONE, TRITON_CANDIDATES, Blocks, candidates_on
from tests.kernels.torch_aot_reading import (
    TENSOR_CORES,
    as_json,
    serialised_products,
    spills_in_product_loops,
    write_table,
)
from tiled_torch.core import launch
from tiled_torch.loss.kernels import cross_entropy
from tiled_torch.mlp.kernels import dgated, glu_elementwise, glu_up, linear, weight_gradient

TOOLS = os.path.join(os.path.dirname(nvidia.__file__), "bin")
TOKENS, HIDDEN, WIDTH, VOCAB, ODD_VOCAB = 8192, 4096, 14336, 128256, 50257
# What stands for an op among the launches below, where its name does not.
LAUNCHES = {
    "glu_up": ("glu_up", "glu_up keep"),
    "glu_up_aux": ("glu_up auxiliary",),
    "glu_elementwise": ("glu forward", "glu backward"),
}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mlp(dtype: torch.dtype, activation: str, *, bias: bool) -> dict[str, Callable[[], Any]]:
    """Kernel -> one launch of it."""
    x, dx = empty(TOKENS, HIDDEN, dtype=dtype), empty(TOKENS, HIDDEN, dtype=dtype)
    w, w_down = empty(WIDTH, HIDDEN, dtype=dtype), empty(HIDDEN, WIDTH, dtype=dtype)
    h, b = empty(TOKENS, WIDTH, dtype=dtype), empty(WIDTH, dtype=dtype) if bias else None
    acc = empty(WIDTH, HIDDEN, dtype=torch.float32)
    return {
        "glu_up": lambda: glu_up.glu_up.wrapper(x, w, w, b, b, h, None, None, activation),
        "glu_up keep": lambda: glu_up.glu_up.wrapper(x, w, w, b, b, h, h, h, activation),
        "glu_up recompute": lambda: glu_up.glu_up.wrapper(x, w, w, b, b, None, h, h, activation),
        "glu_up auxiliary": lambda: glu_up.glu_up_auxiliary.wrapper(x, w, b, h, h, activation),
        "dgated": lambda: dgated.dgated.wrapper(x, w_down, h, h, h, h, h, activation),
        "glu forward": lambda: glu_elementwise.glu_forward.wrapper(h, h, h, activation),
        "glu backward": lambda: glu_elementwise.glu_backward.wrapper(h, h, h, h, h, h, activation),
        "linear": lambda: linear.linear.wrapper(h, w_down, empty(HIDDEN, dtype=dtype) if bias else None, dx),
        "dx": lambda: linear.dx.wrapper(h, h, w, w, dx),
        "weight_gradient": lambda: weight_gradient.weight_gradient.wrapper(acc, h, x, True),
    }


def loss(
    dtype: torch.dtype, *, softcap: float | None, smoothing: float, entropy: bool, vocab: int = VOCAB
) -> dict[str, Callable[[], Any]]:
    logits, index = empty(TOKENS, vocab, dtype=dtype), empty(TOKENS, dtype=torch.int64)
    numbers, one = empty(TOKENS, dtype=torch.float32), empty(dtype=torch.float32)
    found, k = empty(5, TOKENS, dtype=torch.float32), empty(4, TOKENS, dtype=torch.float32)
    token = (logits, index, numbers, numbers, None, one)
    static = (vocab, 0, 1.0, softcap, smoothing, 0.0)
    c = smoothing != 0.0
    wrapper = cross_entropy.cross_entropy.wrapper
    return {
        "cross_entropy": lambda: wrapper(*token, None, None, None, found, *static, False, True, False, False),
        "cross_entropy losses": lambda: wrapper(*token, None, None, None, found, *static, entropy, False, False, False),
        "cross_entropy gradient": lambda: wrapper(
            *token, numbers, numbers if entropy else None, k, None, *static, False, True, c, entropy
        ),
    }


def configurations() -> dict[str, Callable[[], Any]]:
    """Name -> launch. Every kernel in bfloat16 and, of the MLP, in float32; other options where they change the code."""
    found = {f"{name}, bfloat16": run for name, run in mlp(torch.bfloat16, "silu", bias=False).items()}
    found |= {f"{name}, float32": run for name, run in mlp(torch.float32, "gelu", bias=True).items()}
    biased = mlp(torch.float16, "gelu", bias=True)
    found |= {f"{name}, float16, gelu, biases": biased[name] for name in ("glu_up", "glu_up auxiliary", "dgated")}
    tanh = mlp(torch.bfloat16, "gelu_tanh", bias=False)
    found |= {f"{name}, bfloat16, gelu_tanh": tanh[name] for name in ("glu_up auxiliary", "dgated")}
    plain = loss(torch.bfloat16, softcap=None, smoothing=0.0, entropy=False)
    found |= {f"{name}, bfloat16": run for name, run in plain.items()}
    rich = loss(torch.float16, softcap=30.0, smoothing=0.1, entropy=True)
    found |= {f"{name}, float16, softcap, smoothing, entropy": run for name, run in rich.items()}
    odd = loss(torch.bfloat16, softcap=None, smoothing=0.0, entropy=False, vocab=ODD_VOCAB)
    found |= {f"{name}, bfloat16, odd vocabulary": odd[name] for name in ("cross_entropy", "cross_entropy gradient")}
    return found | {
        "glu_up auxiliary, bfloat16, in pairs": trying("glu_up_aux", PAIR, found["glu_up auxiliary, bfloat16"]),
        "dgated, bfloat16, persistent": trying("dgated", PERSISTENT, found["dgated, bfloat16"]),
        "cross_entropy, bfloat16, row alone": trying("cross_entropy", ROW_ALONE, found["cross_entropy, bfloat16"]),
    }


def trying(op: str, blocks: Blocks, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` with these blocks for an op."""

    def launch_with_them() -> None:
        launch.trying[op] = blocks
        try:
            run()
        finally:
            del launch.trying[op]

    return launch_with_them


def candidates(architecture: str) -> dict[str, Callable[[], Any]]:
    """Name -> launch of every configuration that `tune` tries on an architecture, with 16-bit operands."""
    launches = mlp(torch.bfloat16, "silu", bias=False)
    launches |= loss(torch.bfloat16, softcap=None, smoothing=0.0, entropy=False)
    return {
        f"{name}: {named(blocks)}": trying(op, blocks, launches[name])
        for op in TRITON_CANDIDATES
        for blocks in candidates_on("triton", op, architecture).values()
        for name in LAUNCHES.get(op, (op,))
    }


def named(blocks: Blocks) -> str:
    """128x256x64, 8 warps, 3 stages; what else is not the default."""
    rest = {f.name: getattr(blocks, f.name) for f in fields(blocks)[5:] if getattr(blocks, f.name) != f.default}
    sizes = f"{blocks.rows}x{blocks.columns}x{blocks.depth}, {blocks.warps} warps, {blocks.stages} stages"
    return ", ".join([sizes, *(f"{name} {value}" for name, value in rest.items())])


def caught(run: Callable[[], Any]) -> tuple[Any, list[Any], dict[str, Any], Blocks]:
    """(kernel, arguments, constants, block sizes) of the one launch that `run` makes."""
    found: list[Any] = []

    def start(kernel: Any, programs: int, *args: Any, blocks: Blocks, **constants: Any) -> None:
        found.append((kernel, list(args), constants, blocks))

    before, launch.start = launch.start, start
    try:
        run()
    finally:
        launch.start = before
    (launched,) = found
    return launched


def compiled(run: Callable[[], Any], capability: int) -> dict[str, Any]:
    """What the binary of one launch needs and holds."""
    kernel, args, constants, sizes = caught(run)
    names = kernel.arg_names
    signature: dict[str, str] = {}
    values: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for number, (name, value) in enumerate(
        zip(names, [*args, *(constants[n] for n in names[len(args) :])], strict=True)
    ):
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, Tensor):
            signature[name] = "*" + NAMES[value.dtype]
            aligned[(number,)] = [["tt.divisibility", 16]]
        elif name in constants or value is None or (value == 1 and isinstance(value, int)):
            signature[name], values[(number,)] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                aligned[(number,)] = [["tt.divisibility", 16]]
    built = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=values, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": sizes.warps, "num_stages": sizes.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage, sass = tool("cuobjdump", "-res-usage", file.name), tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage}")
    return {
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "spills in product loops": spills_in_product_loops(sass),
        "serialised": serialised_products(sass),
        "shared": built.metadata.shared,
        "16-byte accesses": len(re.findall(r"\b(?:ld|st)\.global[\w.]*\.v4\.b32", built.asm["ptx"])),
        "tensor cores": {name: len(re.findall(p, sass)) for name, p in TENSOR_CORES.items() if re.search(p, sass)},
    }


def tool(name: str, *args: str) -> str:
    run = subprocess.run([os.path.join(TOOLS, name), *args], capture_output=True, text=True, check=True)
    return run.stdout


def main(architecture: str, only: list[str]) -> None:
    capability = int(architecture.removeprefix("sm_"))
    launch.ASSUMED = divmod(capability, 10)
    every = candidates(architecture) if only == ["candidates"] else configurations()
    named = set(only) & set(every)
    found = {name: compiled(run, capability) for name, run in every.items() if not named or name in named}
    if only == ["table"]:
        write_table(triton.__version__, architecture, found)
    print(as_json({"triton": triton.__version__, "kernels": found}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
