"""Between the halves: arrays through DLPack, parameters of twin modules, a JAX function as a PyTorch operation.

The only room of this package that loads jax (and flax), and only when one of its functions runs.
"""

from tiled_torch.bridge.arrays import to_jax as to_jax
from tiled_torch.bridge.arrays import to_torch as to_torch
from tiled_torch.bridge.function import jax_function as jax_function
from tiled_torch.bridge.params import params_to_jax as params_to_jax
from tiled_torch.bridge.params import params_to_torch as params_to_torch
