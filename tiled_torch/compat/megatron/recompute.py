"""Megatron-core's `CheckpointWithoutOutput` and its manager, over `tiled_torch.parallel.CheckpointWithoutOutput`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shared_specs.errors import fail, fail_type, fail_with
from tiled_torch.layers import recompute


class CheckpointWithoutOutput(recompute.CheckpointWithoutOutput):
    """`tiled_torch.parallel.CheckpointWithoutOutput` with Megatron-core's constructor.

    Args:
        fp8: False or None; Transformer Engine's formats are not used here.
        ckpt_manager: discards the outputs of several calls together; `discard_output_and_register_recompute` does nothing then.
        retain_input_tensors: an output that shares the memory of an argument is kept instead of refused.
    Source: named and called as Megatron-core's (core/tensor_parallel/random.py).
    """

    def __init__(
        self,
        fp8: Any = False,
        ckpt_manager: "CheckpointWithoutOutputManager | None" = None,
        retain_input_tensors: bool = False,
    ) -> None:
        super().__init__()
        if fp8 is not None and fp8 is not False:
            fail(type(self).__name__, "fp8", "False or None", fp8, advice="8-bit layers are plans' own (TorchAO).")
        self.ckpt_manager, self.retains_inputs = ckpt_manager, retain_input_tensors

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Return run_function(*args), whose activations are not kept."""
        results = super().checkpoint(run_function, *args)
        if self.ckpt_manager is not None:
            self.ckpt_manager.add_checkpoint(self)
        return results

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the output; it is computed again when the gradient of hook_tensor is there. With a manager: do nothing."""
        if self.ckpt_manager is None:
            self.discard(hook_tensor)

    def discard(self, hook_tensor: Tensor) -> None:
        """Free the output now."""
        super().discard_output_and_register_recompute(hook_tensor)


class CheckpointWithoutOutputManager:
    """Calls in a row, one's output the next one's input, whose outputs are discarded together and come back in order.

    Source: named and called as Megatron-core's (core/tensor_parallel/random.py).
    """

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointWithoutOutput] = []
        self.is_last_layer_in_recompute_block = False

    def add_checkpoint(self, ckpt: CheckpointWithoutOutput) -> None:
        """Take a call that has run.

        Raises:
            TypeError: no CheckpointWithoutOutput. SpecError: it has not run.
        """
        name = f"{type(self).__name__}.add_checkpoint"
        if not isinstance(ckpt, CheckpointWithoutOutput):
            fail_type(name, "ckpt", "a CheckpointWithoutOutput", type(ckpt).__name__)
        if not ckpt._outputs:
            fail_with(name, "ckpt has not run a call", advice="Call its checkpoint first.")
        self.checkpoints.append(ckpt)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Free all outputs; they are computed again, in order, when the gradient of hook_tensor is there."""
        for ckpt in self.checkpoints:
            ckpt.discard(hook_tensor)
        self.checkpoints = []
