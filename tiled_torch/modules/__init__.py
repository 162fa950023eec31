"""Parameters and options around one functional call each; no math."""

from tiled_torch.modules.mlp import TiledMLP as TiledMLP
