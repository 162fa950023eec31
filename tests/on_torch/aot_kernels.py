"""Compiles every Triton kernel ahead of time, without a GPU, and reads what the binaries need. A program: prints JSON.

    python -m tests.on_torch.aot_kernels sm_90 [name ...]

The launch wrappers run on meta tensors of Llama-3-8B's sizes and their launches are caught instead of made, so what is
compiled is what would run: the same constants, block sizes, descriptors and alignment.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
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

from shared_specs.blocks import Blocks
from tiled_torch.kernels import cross_entropy, dgated, glu_elementwise, glu_up, launch, linear, weight_gradient

TOOLS = os.path.join(os.path.dirname(nvidia.__file__), "bin")
TOKENS, HIDDEN, WIDTH, VOCAB = 8192, 4096, 14336, 128256
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}
TENSOR_CORES = {"HGMMA": r"\bHGMMA", "HMMA": r"\bHMMA", "UTCHMMA": r"\bUTC\w*MMA"}


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


def loss(dtype: torch.dtype, *, softcap: float | None, smoothing: float, entropy: bool) -> dict[str, Callable[[], Any]]:
    logits, index = empty(TOKENS, VOCAB, dtype=dtype), empty(TOKENS, dtype=torch.int64)
    numbers, one = empty(TOKENS, dtype=torch.float32), empty(dtype=torch.float32)
    found, k = empty(5, TOKENS, dtype=torch.float32), empty(4, TOKENS, dtype=torch.float32)
    token = (logits, index, numbers, numbers, None, one)
    static = (VOCAB, 0, 1.0, softcap, smoothing, 0.0)
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
    return found | {f"{name}, float16, softcap, smoothing, entropy": run for name, run in rich.items()}


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
        "shared": built.metadata.shared,
        "tensor cores": {name: len(re.findall(p, sass)) for name, p in TENSOR_CORES.items() if re.search(p, sass)},
    }


def tool(name: str, *args: str) -> str:
    run = subprocess.run([os.path.join(TOOLS, name), *args], capture_output=True, text=True, check=True)
    return run.stdout


def spills_in_product_loops(sass: str) -> int:
    """Local loads and stores between a label and a branch back to it, in loops that hold tensor-core instructions."""
    lines = sass.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(\.L_x_\d+):", line))}
    spills: set[int] = set()
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if jump is None or labels.get(jump[1], i) >= i:
            continue
        body = range(labels[jump[1]], i)
        if any(re.search(p, lines[n]) for n in body for p in TENSOR_CORES.values()):
            spills |= {n for n in body if re.search(r"\b(?:LDL|STL)\b", lines[n])}
    return len(spills)


def main(architecture: str, only: list[str]) -> None:
    capability = int(architecture.removeprefix("sm_"))
    launch.ASSUMED = divmod(capability, 10)
    runs = {name: run for name, run in configurations().items() if not only or name in only}
    print(json.dumps({name: compiled(run, capability) for name, run in runs.items()}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
