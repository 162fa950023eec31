"""What runs across ranks: losses over a vocabulary that is split over them."""

from tiled_torch.parallel.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from tiled_torch.parallel.loss import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
