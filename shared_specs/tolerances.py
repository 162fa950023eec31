"""The only tolerance numbers of the repository. No environment variable and no test loosens one.

A result may be at most FACTOR times as wrong as the baseline (`shared_specs/core/rounding.py`) plus a floor, measured as
relative L2 distance to the float64 oracle. Evidence: a correct half scores 0.7 to 1.4 times the baseline, a half that
drops one shard of 64 scores 38.
"""

FACTOR = 2.0

# What is left when the baseline happens to be (nearly) exact, as on a single token. The baseline of float64 is the oracle
# itself. float32: two units in the last place, the error of a framework's own exp (one token through XLA scores 1.8e-7
# where NumPy is lucky at 0.4e-7). 16 bits: an eighth of a unit, since exp there is computed in float32.
FLOOR = {"float64": 1e-12, "float32": 2.4e-7, "bfloat16": 1e-3, "float16": 1.2e-4}

# A bfloat16 weight gradient at 256 shards against the untiled framework code on the same inputs, both against float64.
BF16_256_SHARDS = 1.25

# Sharded and distributed runs in float64 against the untiled single process.
DISTRIBUTED_FLOAT64 = 1e-12

# Variants of one benchmark in float32 against the plain one, relative L2: they must compute the same thing.
BENCH_GRADIENTS = 1e-5

# Loss and gradients of a whole float32 model against float64, relative: what is further off is another model's. PyTorch's own
# cross entropy over 49152 entries errs by a thousandth in the worst gradient. In bfloat16 the worst gradient of thirty layers
# is off by a sixth, in the plain model too.
BENCH_MODEL = {"float32": 1e-2, "bfloat16": 0.3}

# Two ways to compute one thing on a GPU, relative L2 of a whole result. 16 bits: gate, up, h, dh, dgate and dup are each
# rounded once in either, by half a unit at most (bfloat16: 0.17% on average); together that is 0.5%, and 1.6% allows each
# three times its part. A tile that is missing or made of other operands is off by far more in its rows, which are looked at one
# by one. What sums weight gradients in 16 bits, shard by shard, is less exact and not wrong.
GPU_RESULTS = {"float64": 1e-11, "float32": BENCH_GRADIENTS, "bfloat16": 1.6e-2, "float16": 2e-3}
GPU_WORST_ROW = 4.0
GPU_PEERS = 0.1

# Measured bytes against `costs.py`.
COST_BYTES = 0.05
PLAN_PUBLISHED = 0.25  # what `plan` says beside a published figure
PLAN_BYTES = 0.10  # of a whole training step: what `plan` predicts beside what is held
PLAN_COMPILED = 0.085  # the same beside a program that XLA has compiled, which may place arrays with gaps between them
# The same of PyTorch's formulas of dense layers beside simulated ranks: too small and, for rings of two, too large, in small
# models; and of models of eight billion parameters.
PLAN_SHORT, PLAN_LONG, PLAN_RECORDED = 0.025, 0.07, 0.005
# The same of published models at real size, in settings drawn by chance; and of what waits on the host.
PLAN_UNDER, PLAN_OVER, PLAN_HOST = 0.01, 0.03, 0.005
PLAN_OVER_XLA = 0.055  # too large beside compiled programs: XLA has some arrays in the room of results that come later

# Loss of one fine-tuning step between any two of plain and tiled, PyTorch and JAX, float32, relative.
DEMO_LOSS_RTOL = 1e-4

# A whole float32 model (tens of layers) between the halves or between tiled and plain, relative L2.
MODEL_FLOAT32 = 2e-5

# A function or a module of somebody else's against the formula that it is taken for, float32: an activation's values and slopes
# at every point, a module's results and gradients in relative L2. gelu and its tanh form are 4.7e-4 and 2.5e-4 apart.
FORMULA_FLOAT32 = 1e-5

# A gradient that is shorter than this part of all of a model's together is rounding, as of a bias in front of a softmax.
NOTHING = 1e-6

# An element of a gradient whose size is below so many times the errors' root mean square may have the other sign: what an
# optimizer that divides by the gradient's own size (Adam) makes of it is not known.
KNOWN_SIGN = 8.0


def limit(baseline_error: float, dtype: str) -> float:
    """Return the largest relative L2 error allowed for a result in `dtype` whose baseline errs by `baseline_error`."""
    return FACTOR * baseline_error + FLOOR[dtype]


def between(dtype: str, *, peer: bool = False) -> float:
    """Largest relative L2 distance of two ways to compute one thing in `dtype`; peer: one of them may sum in 16 bits."""
    return max(GPU_RESULTS[dtype], GPU_PEERS if peer else 0.0)


def between_rows(dtype: str, *, peer: bool = False) -> float:
    """Return the same of the row that is furthest off."""
    return GPU_WORST_ROW * between(dtype, peer=peer)
