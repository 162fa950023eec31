"""Token-wise layers of long-context training, computed shard by shard, exactly, in PyTorch.

Example:
    >>> import torch
    >>> from tiled_torch import TiledMLP
    >>> x, mlp = torch.randn(2, 5, 8), TiledMLP(8, 12, num_shards=4)
    >>> mlp(x).shape
    torch.Size([2, 5, 8])
"""

from typing import TYPE_CHECKING

from shared_specs.config import Checkpointing as Checkpointing
from shared_specs.config import Compile as Compile
from shared_specs.config import DataParallel as DataParallel
from shared_specs.config import LossOptions as LossOptions
from shared_specs.config import LossResult as LossResult
from shared_specs.config import ParallelConfig as ParallelConfig
from shared_specs.config import ParallelLinearOptions as ParallelLinearOptions
from shared_specs.config import TensorParallel as TensorParallel
from shared_specs.config import Tiling as Tiling
from shared_specs.core.lazy import import_lazily
from shared_specs.errors import SpecError as SpecError
from shared_specs.errors import UnsupportedError as UnsupportedError

if TYPE_CHECKING:
    __version__: str
    from tiled_torch.backends import usable_backends as usable_backends
    from tiled_torch.check.api import check as check
    from tiled_torch.functional import tile as tile
    from tiled_torch.functional import tiled_distillation_loss as tiled_distillation_loss
    from tiled_torch.functional import tiled_linear_cross_entropy as tiled_linear_cross_entropy
    from tiled_torch.functional import tiled_loss as tiled_loss
    from tiled_torch.functional import tiled_mlp as tiled_mlp
    from tiled_torch.functional import tiled_moe as tiled_moe
    from tiled_torch.models import AutoTiledModelForCausalLM as AutoTiledModelForCausalLM
    from tiled_torch.models import tile_model as tile_model
    from tiled_torch.models import tiled_model_loss as tiled_model_loss
    from tiled_torch.models import tiling_paths as tiling_paths
    from tiled_torch.models import untile_model as untile_model
    from tiled_torch.modules import TiledLinear as TiledLinear
    from tiled_torch.modules import TiledLinearCrossEntropy as TiledLinearCrossEntropy
    from tiled_torch.modules import TiledLinearReturnBias as TiledLinearReturnBias
    from tiled_torch.modules import TiledMLP as TiledMLP
    from tiled_torch.modules import TiledMoE as TiledMoE
    from tiled_torch.parallel import parallelize as parallelize
    from tiled_torch.parallel import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from tiled_torch.parallel import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
    from tiled_torch.plan.api import fits as fits
    from tiled_torch.plan.api import plan as plan

__all__ = [
    "AutoTiledModelForCausalLM",
    "Checkpointing",
    "Compile",
    "DataParallel",
    "LossOptions",
    "LossResult",
    "ParallelConfig",
    "ParallelLinearOptions",
    "SpecError",
    "TensorParallel",
    "TiledLinear",
    "TiledLinearCrossEntropy",
    "TiledLinearReturnBias",
    "TiledMLP",
    "TiledMoE",
    "Tiling",
    "UnsupportedError",
    "check",
    "fits",
    "parallelize",
    "plan",
    "tile",
    "tile_model",
    "tiled_distillation_loss",
    "tiled_linear_cross_entropy",
    "tiled_loss",
    "tiled_mlp",
    "tiled_model_loss",
    "tiled_moe",
    "tiling_paths",
    "untile_model",
    "usable_backends",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]

_MODULES = {
    "backends": ("usable_backends",),
    "check.api": ("check",),
    "functional": (
        "tile",
        "tiled_distillation_loss",
        "tiled_linear_cross_entropy",
        "tiled_loss",
        "tiled_mlp",
        "tiled_moe",
    ),
    "models": ("AutoTiledModelForCausalLM", "tile_model", "tiled_model_loss", "tiling_paths", "untile_model"),
    "modules": ("TiledLinear", "TiledLinearCrossEntropy", "TiledLinearReturnBias", "TiledMLP", "TiledMoE"),
    "plan.api": ("fits", "plan"),
    "parallel": ("parallelize", "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"),
}
import_lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})
