"""Hugging Face models with tiled MLPs."""

from tiled_torch.models.auto import AutoTiledModelForCausalLM as AutoTiledModelForCausalLM
from tiled_torch.models.heads.model_loss import tiled_model_loss as tiled_model_loss
from tiled_torch.models.tiling import tile_model as tile_model
from tiled_torch.models.tiling import tiling_paths as tiling_paths
from tiled_torch.models.tiling import untile_model as untile_model
