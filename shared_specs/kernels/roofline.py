"""How long the MLP and the loss should take on a GPU: products, passes over memory and launches, from published rates.

A model, nothing measured: a row of a benchmark is read against it ("94 % of the model"). Nothing overlaps in it; the
operands of a product are read under its arithmetic, so a product takes the longer of the two; what a product's own
epilogue reads and writes (a fused kernel) costs nothing, which is the best that fusing can do.

Letters as in `costs.py`. One T x H x I product is 2 THI FLOP. Sources: NVIDIA's data sheets of A100 80GB SXM (2020), H100
and H200 SXM (2023), HGX B200 (2024), GH200 (96 GB), L40S, RTX A6000, RTX 6000 Ada and RTX PRO 6000 Blackwell, and its white
papers of GA102, Ada and RTX Blackwell for the GeForce cards; products summed in float32, without sparsity. The shares of them
that libraries reach: an 8192-cubed bfloat16 product of random numbers runs at 790 TFLOP/s on H100 and H200, a copy at 3.0 and
4.3 TB/s; Triton's Gluon tutorial has cuBLAS at 1548 TFLOP/s on a B200. Those of the others and of the B200's memory are taken
to be as on the H200.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from shared_specs.errors import fail
from shared_specs.kernels.blocks import Paths
from shared_specs.loss.costs import LossShape
from shared_specs.mlp.costs import MLPShape
from shared_specs.shards import ShardPlan

# Between the end of one kernel and the first useful work of the next on the device, while the host is ahead.
LAUNCH_SECONDS = 4e-6

MLPVariant = Literal["plain", "checkpoint", "checkpoint-reentrant", "tiled", "whole", "whole-in-checkpoint", "products"]


@dataclass(frozen=True, kw_only=True)
class GPU:
    """Published rates of one GPU, dense, and the shares of them that a library's large products and copies reach.

    Args:
        flops_16, flops_32, flops_64: FLOP/s of products in bfloat16 or float16, IEEE float32 (no TF32) and float64.
        bytes_per_second: of device memory. memory_bytes: how much of it there is.
        reached_flops, reached_bytes: shares, above 0, at most 1.
    """

    name: str
    flops_16: float
    flops_32: float
    flops_64: float
    bytes_per_second: float
    memory_bytes: float
    reached_flops: float = 0.80
    reached_bytes: float = 0.90

    def flops(self, itemsize: int) -> float:
        """FLOP/s that large products of operands of `itemsize` bytes reach."""
        return {2: self.flops_16, 4: self.flops_32, 8: self.flops_64}[itemsize] * self.reached_flops

    @property
    def bandwidth(self) -> float:
        """Bytes/s, read and written together, that a large copy reaches."""
        return self.bytes_per_second * self.reached_bytes


GPUS = {
    "a100": GPU(name="A100", flops_16=312e12, flops_32=19.5e12, flops_64=19.5e12,
                bytes_per_second=2.039e12, memory_bytes=80e9),
    "h100": GPU(name="H100", flops_16=989e12, flops_32=67e12, flops_64=67e12,
                bytes_per_second=3.35e12, memory_bytes=80e9),
    "h200": GPU(name="H200", flops_16=989e12, flops_32=67e12, flops_64=67e12,
                bytes_per_second=4.8e12, memory_bytes=141e9),
    "b200": GPU(name="B200", flops_16=2250e12, flops_32=75e12, flops_64=37e12,
                bytes_per_second=8.0e12, memory_bytes=180e9, reached_flops=0.69),
    "gh200": GPU(name="GH200", flops_16=989e12, flops_32=67e12, flops_64=67e12,
                 bytes_per_second=4.0e12, memory_bytes=96e9),
    "l40s": GPU(name="L40S", flops_16=362e12, flops_32=91.6e12, flops_64=1.43e12,
                bytes_per_second=0.864e12, memory_bytes=48e9),
    "a6000": GPU(name="RTX A6000", flops_16=154.8e12, flops_32=38.7e12, flops_64=0.6e12,
                 bytes_per_second=0.768e12, memory_bytes=48e9),
    "rtx6000ada": GPU(name="RTX 6000 Ada", flops_16=364e12, flops_32=91.1e12, flops_64=1.42e12,
                      bytes_per_second=0.96e12, memory_bytes=48e9),
    "rtxpro6000": GPU(name="RTX PRO 6000", flops_16=500e12, flops_32=125e12, flops_64=1.95e12,
                      bytes_per_second=1.792e12, memory_bytes=96e9),
    "rtx3090": GPU(name="RTX 3090", flops_16=71e12, flops_32=35.6e12, flops_64=0.556e12,
                   bytes_per_second=0.936e12, memory_bytes=24e9),
    "rtx4090": GPU(name="RTX 4090", flops_16=165.2e12, flops_32=82.6e12, flops_64=1.29e12,
                   bytes_per_second=1.008e12, memory_bytes=24e9),
    "rtx5090": GPU(name="RTX 5090", flops_16=209.5e12, flops_32=104.8e12, flops_64=1.64e12,
                   bytes_per_second=1.792e12, memory_bytes=32e9),
}  # fmt: skip
# Words of device names of other rates than those of the GPU that the rest of the name tells.
_OTHERS = {"PCIE", "NVL", "TI", "SUPER", "LAPTOP", "MAX", "D"}


def gpu_named(name: str) -> GPU | None:
    """Return the GPU that a device's name tells ("NVIDIA H100 80GB HBM3"); None for one that is not in `GPUS`.

    Variants with other rates (PCIe, NVL, Ti, Laptop) are not: their names say so.
    """
    words = set(name.upper().replace("-", " ").split())
    if _OTHERS & words:
        return None
    return next((gpu for gpu in GPUS.values() if words >= set(gpu.name.upper().split())), None)


def gpu_of_users(name: str) -> GPU | None:
    """Return the GPU that a user calls so, however it is written: "h100", "RTX 4090", "rtx-4090"; None for an unknown one."""
    said = "".join(letter for letter in name.lower() if letter.isalnum())
    return next((gpu for key, gpu in GPUS.items() if said in (key, gpu.name.lower().replace(" ", ""))), None)


class Seconds(NamedTuple):
    """The predicted time of one run, in seconds."""

    products: float
    passes: float
    launches: float

    @property
    def total(self) -> float:
        return self.products + self.passes + self.launches


class Work(NamedTuple):
    """The work of one run on the device: the products as (M, N, K), bytes of passes over memory, launches of both."""

    products: tuple[tuple[int, int, int], ...] = ()
    bytes: int = 0
    launches: int = 0

    def __add__(self, other: tuple[object, ...]) -> "Work":
        if not isinstance(other, Work):
            return NotImplemented
        return Work(self.products + other.products, self.bytes + other.bytes, self.launches + other.launches)

    @property
    def flop(self) -> int:
        return sum(2 * m * n * k for m, n, k in self.products)

    def seconds(self, gpu: GPU, itemsize: int) -> Seconds:
        """Return how long it should take with operands of `itemsize` bytes."""
        return Seconds(
            sum(_product_seconds(size, gpu, itemsize) for size in self.products),
            self.bytes / gpu.bandwidth,
            self.launches * LAUNCH_SECONDS,
        )


def product(m: int, n: int, k: int) -> Work:
    """Return one product [M, K] x [K, N]."""
    return Work(((m, n, k),), 0, 1)


def passing(bytes_: int, launches: int = 1) -> Work:
    """Passes that read and write `bytes_` together."""
    return Work((), bytes_, launches)


def _product_seconds(size: tuple[int, int, int], gpu: GPU, itemsize: int) -> float:
    m, n, k = size
    return max(2 * m * n * k / gpu.flops(itemsize), (m * k + k * n + m * n) * itemsize / gpu.bandwidth)


@dataclass(frozen=True)
class _RowWork:
    """The work of t rows of one MLP, a step each. A gated one has two up-projections."""

    shape: MLPShape
    t: int

    @property
    def ups(self) -> int:
        return 2 if self.shape.gated else 1

    @property
    def out(self) -> int:
        return self.shape.hidden if self.shape.out is None else self.shape.out

    def elements(self, count: int) -> int:
        """Return bytes of `count` arrays [t, I]."""
        return count * self.t * self.shape.intermediate * self.shape.itemsize

    def up(self, path: str = "vendor") -> Work:
        """gate, up and h. Unfused the pass reads gate and up and writes h."""
        products = self.projections()
        if path == "vendor":
            return products + passing(self.elements(self.ups + 1))
        return products._replace(launches=1 if path == "dual" else self.ups)

    def projections(self) -> Work:
        """Return gate and up alone."""
        return _repeat(product(self.t, self.shape.intermediate, self.shape.hidden), self.ups)

    def down(self) -> Work:
        """y from h."""
        return product(self.t, self.out, self.shape.intermediate)

    def hidden_gradients(self, path: str = "vendor") -> Work:
        """dgate, dup and h from dy. Unfused the pass reads dh, gate and up and writes dgate, dup and h."""
        dh = product(self.t, self.shape.intermediate, self.out)
        return dh + passing(self.elements(2 * (self.ups + 1))) if path == "vendor" else dh

    def dx(self) -> Work:
        """dx: with a gate the second product adds to what the first one wrote."""
        products = _repeat(product(self.t, self.shape.hidden, self.shape.intermediate), self.ups)
        return products + passing((self.ups - 1) * 2 * self.t * self.shape.hidden * self.shape.itemsize, 0)

    def weight_gradients(self) -> Work:
        """Products alone: what sums over shards cost is added by `_sums`."""
        ups = _repeat(product(self.shape.intermediate, self.shape.hidden, self.t), self.ups)
        return ups + product(self.shape.intermediate, self.out, self.t)

    def autograd(self, *, forward: int, replayed: int) -> Work:
        """Return the passes of PyTorch's own activation and product, and of its two dx: no fused step.

        Forward reads gate, writes act(gate), reads it and up, writes h (gated); backward reads and writes nine [t, I].
        """
        of_forward, of_backward = (5, 9) if self.shape.gated else (2, 3)
        passes = passing(self.elements(of_forward * (forward + replayed)), self.ups * (forward + replayed))
        added = (self.ups - 1) * 3 * self.t * self.shape.hidden * self.shape.itemsize
        return passes + passing(self.elements(of_backward) + added, 2 * self.ups)


def _repeat(work: Work, count: int) -> Work:
    return Work(work.products * count, work.bytes * count, work.launches * count)


def _sums(elements: int, shards: int, itemsize: int) -> Work:
    """Beyond products: float32 (float64) sums read and written again by every shard but the first, and cast once."""
    if shards <= 1:
        return Work()
    wide = max(4, itemsize)
    cast = elements * (wide + itemsize) if itemsize < wide else 0
    return passing(elements * 2 * wide * (shards - 1) + cast, 1 if cast else 0)


def mlp_work(
    shape: MLPShape, plan: ShardPlan, *, variant: MLPVariant = "tiled", keep: float = 0.0, paths: Paths | None = None
) -> Work:
    """Return what one forward and backward of the MLP does on the device.

    Args:
        variant: "tiled" is this library's; "plain" the untiled layer, "checkpoint" and "checkpoint-reentrant" the same under
            `torch.utils.checkpoint`; "whole" a tiling that recomputes a shard's whole forward and adds up 16-bit weight
            gradients in their dtype (Liger, DeepSpeed), and the same in a non-reentrant checkpoint; "products" the
            products of "tiled" and nothing else.
        keep: fraction of the shards whose gate and up are kept ("tiled", "products").
        paths: who makes which product ("tiled"); None is all the vendor's.
    Raises:
        SpecError: the variant is unknown, or `keep` or `paths` is given to one that has none.
    """
    rows = {t: _RowWork(shape, t) for t in {stop - start for start, stop in plan.spans}}
    whole = _RowWork(shape, shape.tokens)
    if variant not in ("tiled", "products") and (keep or paths is not None):
        fail("mlp_work", "keep and paths", "left out for a variant that has none", (keep, paths))
    paths = paths or Paths(up="vendor", down="vendor")
    if variant in ("tiled", "products"):
        kept_start, work = plan.kept_start(keep), Work()
        for start, stop in plan.spans:
            shard = rows[stop - start]
            again = Work() if start >= kept_start else shard.projections()
            work += shard.up(paths.up) + shard.down() + again
            work += shard.hidden_gradients(paths.down) + shard.weight_gradients() + shard.dx()
        work += _sums(shape.weight_elements, len(plan), shape.weight_itemsize)
        return work if variant == "tiled" else Work(work.products, 0, len(work.products))
    if variant in ("plain", "checkpoint", "checkpoint-reentrant"):
        replayed = {"plain": Work(), "checkpoint": whole.projections()}.get(variant, whole.projections() + whole.down())
        products = whole.projections() + whole.down() + replayed + product(shape.tokens, shape.intermediate, whole.out)
        passes = whole.autograd(forward=1, replayed=int(variant != "plain"))
        return products + whole.weight_gradients() + _products_alone(whole.dx()) + passes
    if variant not in ("whole", "whole-in-checkpoint"):
        fail("mlp_work", "variant", f"among {', '.join(get_args(MLPVariant))}", variant)
    forwards, work = 2 + (variant == "whole-in-checkpoint"), Work()
    for start, stop in plan.spans:
        shard = rows[stop - start]
        forward = shard.projections() + shard.down() + passing(shard.elements(shard.ups + 1))
        work += _repeat(forward, forwards) + shard.hidden_gradients("dgated") + shard.weight_gradients()
        # their backward has h from the recomputed forward: it reads dh, gate and up and writes dgate and dup
        work += _products_alone(shard.dx()) + passing(shard.elements(2 * shard.ups + 1))
        # dx of gate and up added; y, x and dx copied from and to rows of the whole
        work += passing(6 * shard.t * shape.hidden * shape.itemsize, 3)
    return work + passing(3 * shape.weight_elements * shape.weight_itemsize * (len(plan) - 1), 3 * (len(plan) - 1))


def _products_alone(work: Work) -> Work:
    return Work(work.products, 0, work.launches)


def mlp_seconds(
    shape: MLPShape,
    plan: ShardPlan,
    gpu: GPU,
    *,
    variant: MLPVariant = "tiled",
    keep: float = 0.0,
    paths: Paths | None = None,
) -> Seconds:
    """Return how long one forward and backward of the MLP should take; arguments as in `mlp_work`."""
    return mlp_work(shape, plan, variant=variant, keep=keep, paths=paths).seconds(gpu, shape.itemsize)


def loss_work(
    shape: LossShape, plan: ShardPlan, *, variant: Literal["plain", "tiled"] = "tiled", sweeps: int = 3
) -> Work:
    """Return what one forward and backward of a linear cross entropy with a mean or a sum does on the device.

    Args:
        variant: "plain" is `cross_entropy` of the whole logits, in the dtype of the logits.
        sweeps: how often the kernel of the tiled loss moves a shard of logits: 3 reads them twice and writes once, 2
            finds them in the L2 cache the second time.
    """
    t, h, v = shape.tokens, shape.hidden, shape.vocab
    if variant == "plain":
        products = product(t, v, h) + product(t, h, v) + product(v, h, t)
        # log-softmax reads and writes; the picked gradient is written, read with the log-probabilities, and written
        return products + passing(6 * t * v * shape.itemsize, 4)
    work = _sums(v * h, len(plan), shape.weight_itemsize)
    for start, stop in plan.spans:
        rows = stop - start
        work += product(rows, v, h) + product(rows, h, v) + product(v, h, rows)
        work += passing(sweeps * rows * v * shape.itemsize)
    return work


def loss_seconds(
    shape: LossShape, plan: ShardPlan, gpu: GPU, *, variant: Literal["plain", "tiled"] = "tiled", sweeps: int = 3
) -> Seconds:
    """Return how long one forward and backward of the loss should take; arguments as in `loss_work`."""
    return loss_work(shape, plan, variant=variant, sweeps=sweeps).seconds(gpu, shape.itemsize)


def shard_work(question: str, shape: MLPShape, *, fused: bool) -> Work:
    """Return what one step of one shard (`shape.tokens` rows) does: a row of the kernels' benchmark.

    Args:
        question: "up", "glu", "glu_backward", "down", "linear", "dx" or "weight_gradient".
        fused: whether the elementwise work rides on the product ("up", "down").
    Raises:
        SpecError: the question is unknown.
    """
    rows, path = _RowWork(shape, shape.tokens), "dgated" if fused else "vendor"
    weight = product(shape.intermediate, shape.hidden, shape.tokens)
    answers: dict[str, Callable[[], Work]] = {
        "up": lambda: rows.up("dual" if fused else "vendor"),
        "glu": lambda: passing(rows.elements(rows.ups + 1)),
        "glu_backward": lambda: passing(rows.elements(2 * (rows.ups + 1))),
        "down": lambda: rows.hidden_gradients(path),
        "linear": rows.down,
        "dx": rows.dx,
        "weight_gradient": lambda: weight + passing(2 * 4 * shape.intermediate * shape.hidden, 0),
    }
    if question not in answers:
        fail("shard_work", "question", f"among {', '.join(answers)}", question)
    return answers[question]()
