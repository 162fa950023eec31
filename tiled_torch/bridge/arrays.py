"""Arrays from one framework to the other through DLPack: what is shared, what is copied, what is refused.

| what crosses | torch to JAX | JAX to torch |
| --- | --- | --- |
| float32, bfloat16, float16, float8, complex64, bool, integers of 8 to 32 bits | no copy | no copy |
| 64-bit dtypes | no copy with jax_enable_x64, else TypeError: JAX would narrow them without a word | no copy |
| transposed, permuted | no copy | no copy |
| gaps or zero strides; conjugate or negative bit; not 64-byte aligned | copy, SpecError with copy=False | never so |
| requires_grad | its values, detached | no gradient |
| other dtypes (4-bit, complex32, random keys); meta, sparse, DTensor, in torch.func; tracers | TypeError | TypeError |

Without a copy both sides own the memory: it lives until the last of the two is gone, also when the other is donated or
deleted. A write through PyTorch is then seen by JAX, which believes that its arrays never change and may still be
computing with them. Nothing can mark the memory read-only (the capsules of jax 0.10 and 0.11 have no such flag), so
write to neither side while the other lives, or pass copy=True.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, fail_with, show_shape
from tiled_torch.core.tensors import dtype_name

if TYPE_CHECKING:
    import jax

_WIDE = ("int64", "uint64", "float64", "complex128")
DTYPES = (
    *("float32", "bfloat16", "float16", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *_WIDE,
)
_ALIGNMENT = 64  # bytes; JAX copies by itself what starts elsewhere
_TO_CPU = "Move it to the CPU."


def to_jax(tensor: Tensor, *, copy: bool | None = None) -> "jax.Array":
    """Return the tensor's values as a jax.Array on the same device, sharing its memory where the table above allows it.

    Args:
        tensor: any shape, also 0-d and empty, on a CPU or CUDA device that JAX has too. Detached by rule.
        copy: None copies only where sharing is impossible; True always (the array is then JAX's own); False never.
    Returns:
        jax.Array of the same shape and dtype. Treat as read-only on both sides if shared.
    Raises:
        TypeError: not a plain tensor, or a dtype that JAX would narrow (64 bits with x64 off) or does not have.
        SpecError: copy=False where only a copy can cross. UnsupportedError: JAX has no such device here.
    Example:
        >>> to_jax(torch.arange(3, dtype=torch.int32)) + 1
        Array([1, 2, 3], dtype=int32)
    """
    import jax

    check_bridged("to_jax", "tensor", tensor)
    why = _needs_copy(tensor)
    if why and copy is False:
        shapes = f"tensor is {show_shape(tensor.shape)}"
        fail("to_jax", "copy", f"None or True for a tensor that {why}", copy, shapes=shapes)
    plain = tensor.detach()
    if why or copy:  # never from_dlpack(copy=True): jax 0.10 ignores it on CPU and aliases
        plain = plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return jax.dlpack.from_dlpack(plain, copy=False)


def to_torch(array: "jax.Array", *, copy: bool = False) -> Tensor:
    """Return the array's values as a tensor on the same device, sharing its memory unless copy=True; waits for them.

    Args:
        array: a concrete array on one device, any shape, a dtype that PyTorch has.
        copy: True for a tensor of its own, which may be written to.
    Returns:
        Tensor of the same shape and dtype, without gradient. Read-only by rule unless copied.
    Raises:
        TypeError: a tracer, no jax.Array, or a dtype without a PyTorch twin.
        SpecError: deleted, or spread over several devices. UnsupportedError: PyTorch has no such device here.
    Example:
        >>> import jax.numpy as jnp
        >>> to_torch(jnp.ones(3))
        tensor([1., 1., 1.])
    """
    import jax
    from jax.core import Tracer

    if isinstance(array, Tracer):
        advice = "Call it outside of jit, grad and vmap; jax_function makes a whole JAX function callable in PyTorch."
        fail_type("to_torch", "array", "a concrete array", "a tracer", advice=advice)
    if not isinstance(array, jax.Array):
        fail_type("to_torch", "array", "a jax.Array", type(array).__name__)
    if array.dtype.name not in DTYPES:
        advice = "Use jax.random.key_data." if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key) else "Cast it."
        fail_type("to_torch", "array", "of a dtype that PyTorch has", array.dtype.name, advice=advice)
    if array.is_deleted():
        fail_with("to_torch", "array was deleted or donated", advice="Hand it over before, or copy it.")
    if len(array.devices()) > 1:
        advice = "Use its addressable_shards, or jax.device_put it first."
        fail("to_torch", "array", "on one device", f"{len(array.devices())} devices", advice=advice)
    (device,) = array.devices()
    if device.platform != "cpu" and not (device.platform == "gpu" and torch.cuda.is_available()):
        rule = "on a device that PyTorch has here"
        raise UnsupportedError(error_text("to_torch", "array", rule, device, advice=_TO_CPU))
    tensor = torch.from_dlpack(array)
    return tensor.clone() if copy else tensor


def check_bridged(function: str, name: str, tensor: Any) -> None:
    """Check that a tensor can cross to JAX, at least as a copy.

    Raises:
        TypeError: it is no plain tensor, or JAX has no such dtype.
        UnsupportedError: its device is one that JAX cannot take it from.
    """
    import jax

    if not isinstance(tensor, Tensor):
        fail_type(function, name, "a torch.Tensor", type(tensor).__name__)
    if kind := _special_kind(tensor):
        advice = "Pass an ordinary one, such as a DTensor's to_local() or a sparse tensor's to_dense()."
        fail_type(function, name, "a plain tensor with memory of its own", kind, advice=advice)
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPES:
        fail_type(function, name, "of a dtype that JAX has", dtype, advice="Cast it.")
    if dtype in _WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        advice = "JAX would narrow it without a warning. Cast it, or use jax.enable_x64."
        fail_type(function, name, "of at most 32 bits a number while jax_enable_x64 is off", dtype, advice=advice)
    _check_device(function, name, tensor.device)


def _special_kind(tensor: Tensor) -> str | None:
    """Return the kind of a tensor that cannot be shared, whatever is done to it; None for ordinary ones."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # type: ignore[attr-defined]  # no public way
        return "one inside torch.func"
    kind: Any = type(tensor)
    plain: Any = Tensor
    if kind.__torch_dispatch__ is not plain.__torch_dispatch__ or tensor.is_nested:
        return kind.__name__
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return "one on the meta device" if tensor.is_meta else None


def _check_device(function: str, name: str, device: torch.device) -> None:
    import jax

    try:
        known = device.type in ("cpu", "cuda") and jax.devices(device.type)
    except RuntimeError:  # how JAX says that it has no such platform
        known = False
    if not known:
        raise UnsupportedError(error_text(function, name, "on a device that JAX has here", device, advice=_TO_CPU))


def _needs_copy(tensor: Tensor) -> str | None:
    """Return why the memory cannot be shared; None where it can."""
    if tensor.is_conj() or tensor.is_neg():
        return "has its conjugate or negative bit set"
    packed = 1  # JAX takes strides that only permute the dims of a block without gaps
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != packed and tensor.numel():
            return "has gaps or zero strides"
        packed *= size
    return f"is not {_ALIGNMENT}-byte aligned" if tensor.data_ptr() % _ALIGNMENT else None
