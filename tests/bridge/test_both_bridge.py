"""Arrays through DLPack: what shares memory, what is copied, what is refused; values are the same to the bit."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shared_specs.errors import SpecError, UnsupportedError
from tiled_torch.bridge import to_jax, to_torch
from tiled_torch.bridge.arrays import _WIDE, DTYPES, _check_device


def tensor_of(dtype: str) -> Tensor:
    """[4, 6] of ordinary numbers, also where the dtype has no arithmetic."""
    numbers = torch.arange(24).view(4, 6)
    if dtype.startswith("float8"):
        return (numbers + 60).to(torch.uint8).view(getattr(torch, dtype))
    return (numbers % 2 if dtype == "bool" else numbers).to(getattr(torch, dtype))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_crosses_without_a_copy(dtype: str) -> None:
    with jax.enable_x64(dtype in _WIDE):
        tensor = tensor_of(dtype)
        array = to_jax(tensor, copy=False)
        back = to_torch(array)
        assert array.dtype.name == dtype
        assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
        assert np.asarray(array).tobytes() == bytes(bits(tensor).numpy())
    assert back.dtype == tensor.dtype
    assert torch.equal(bits(back), bits(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_from_an_array_of_jax(dtype: str) -> None:
    with jax.enable_x64(dtype in _WIDE):
        array = jnp.asarray(np.arange(24).reshape(4, 6).astype(bool if dtype == "bool" else np.float32)).astype(dtype)
        tensor = to_torch(array)
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
        assert bytes(bits(tensor).numpy()) == np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", _WIDE)
def test_wide_dtypes_are_refused_while_x64_is_off(dtype: str) -> None:
    with pytest.raises(TypeError) as caught:
        to_jax(torch.zeros(3, dtype=getattr(torch, dtype)))
    assert str(caught.value) == (
        f"to_jax: tensor must be of at most 32 bits a number while jax_enable_x64 is off, got {dtype}. "
        "JAX would narrow it without a warning. Cast it, or use jax.enable_x64."
    )


def test_wide_values_survive_with_x64() -> None:
    with jax.enable_x64(True):
        assert to_jax(torch.tensor([2**40 + 3])).item() == 2**40 + 3
        assert to_jax(torch.tensor([1e300], dtype=torch.float64)).item() == 1e300


X = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
Z = torch.complex(X, -X)
SHARED: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: X.clone(),
    "transposed": lambda: X.clone().transpose(0, 1),
    "permuted": lambda: X.clone().permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "one row": lambda: X.clone()[:1].transpose(0, 2),
    "0-d": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 3),
    "empty, odd strides": lambda: torch.zeros(4, 6, 0)[::2, :3].transpose(0, 1),
    "one element expanded": lambda: torch.tensor([3.0]).expand(1),
    "requires_grad": lambda: X.clone().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(X.clone()),
    "non-leaf": lambda: X.clone().requires_grad_() * 2,
}
COPIED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "every second row": (lambda: X.clone()[::2], "has gaps or zero strides"),
    "some columns": (lambda: X.clone()[..., :4], "has gaps or zero strides"),
    "one column": (lambda: X.clone()[..., :1], "has gaps or zero strides"),
    "expanded": (lambda: torch.tensor(2.0).expand(3, 4), "has gaps or zero strides"),
    "expanded row": (lambda: X.clone()[:1].expand(3, 4, 5), "has gaps or zero strides"),
    "overlapping": (lambda: torch.arange(8.0).as_strided((3, 4), (2, 1)), "has gaps or zero strides"),
    "4 bytes in": (lambda: torch.arange(9.0)[1:], "is not 64-byte aligned"),
    "32 bytes in": (lambda: torch.arange(20.0)[8:], "is not 64-byte aligned"),
    "conjugate": (lambda: Z.clone().conj(), "has its conjugate or negative bit set"),
    "negative": (lambda: Z.clone().conj().imag, "has its conjugate or negative bit set"),
}


@pytest.mark.parametrize("name", SHARED)
def test_packed_layouts_share_memory(name: str) -> None:
    tensor = SHARED[name]()
    array = to_jax(tensor, copy=False)
    assert array.shape == tensor.shape
    assert np.array_equal(array, tensor.detach().numpy())
    assert np.array_equal(jax.jit(lambda a: a + 1)(array), tensor.detach().numpy() + 1)
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)
    assert not back.requires_grad


@pytest.mark.parametrize("name", COPIED)
def test_other_layouts_are_copied_or_refused(name: str) -> None:
    make, why = COPIED[name]
    tensor = make()
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() != tensor.data_ptr()
    assert torch.equal(to_torch(array), tensor)
    with pytest.raises(SpecError) as caught:
        to_jax(tensor, copy=False)
    shape = "[" + ", ".join(map(str, tensor.shape)) + "]"
    assert str(caught.value) == (
        f"to_jax: copy must be None or True for a tensor that {why}, got False (tensor is {shape})."
    )


def test_shared_memory_shows_writes() -> None:
    """Why the rule is to write to neither side: JAX's own array changes."""
    tensor = torch.zeros(4)
    array = to_jax(tensor)
    tensor += 1
    assert np.array_equal(array, [1, 1, 1, 1])
    own = jnp.zeros(4)
    to_torch(own).add_(1)
    assert np.array_equal(own, [1, 1, 1, 1])


@pytest.mark.parametrize("make", list(SHARED.values()), ids=list(SHARED))
def test_a_copy_is_its_own(make: Callable[[], Tensor]) -> None:
    tensor = make().detach()
    before = tensor.numpy().copy()
    array, back = to_jax(tensor, copy=True), to_torch(to_jax(tensor), copy=True)
    tensor.fill_(-7)
    assert np.array_equal(array, before)
    assert np.array_equal(back, before)
    back.fill_(-8)
    assert np.array_equal(tensor, np.full_like(before, -7))


def test_the_array_keeps_the_memory_of_a_deleted_tensor_and_no_longer() -> None:
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    tensor = torch.from_numpy(memory[start : start + 4096]).view(torch.float32)
    owner = weakref.ref(memory)
    array = to_jax(tensor.fill_(5), copy=False)
    del memory, tensor
    gc.collect()
    assert owner() is not None
    assert np.array_equal(array, np.full(1024, 5.0))
    del array
    gc.collect()
    assert owner() is None


@pytest.mark.parametrize("end", ["deleted", "forgotten", "donated"])
def test_the_tensor_keeps_the_memory_of_a_gone_array(end: str) -> None:
    array = jnp.arange(4096.0)
    tensor = to_torch(array)
    if end == "deleted":
        array.delete()
    elif end == "donated":
        jax.jit(lambda a: a * 0, donate_argnums=0)(array).block_until_ready()
    del array
    gc.collect()
    other = [jnp.full(4096, -1.0) for _ in range(20)]
    assert torch.equal(tensor, torch.arange(4096.0))
    del other


def test_donating_an_imported_array_leaves_the_tensor_alone() -> None:
    tensor = torch.arange(4096.0)
    jax.jit(lambda a: a * 0, donate_argnums=0)(to_jax(tensor)).block_until_ready()
    assert torch.equal(tensor, torch.arange(4096.0))


def test_a_result_still_being_computed_is_waited_for() -> None:
    a = jnp.asarray(np.random.default_rng(0).standard_normal((300, 300)), jnp.float32)
    slow = jax.jit(lambda a: jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ a), a))
    want = np.asarray(slow(a))
    assert np.array_equal(to_torch(slow(a)), want)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


PLAIN = (
    "to_jax: tensor must be a plain tensor with memory of its own, got {}. "
    "Pass an ordinary one, such as a DTensor's to_local() or a sparse tensor's to_dense()."
)
NO_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3.0, "to_jax: tensor must be a torch.Tensor, got float."),
    "numpy": (lambda: np.zeros(3), "to_jax: tensor must be a torch.Tensor, got ndarray."),
    "jax": (lambda: jnp.zeros(3), "to_jax: tensor must be a torch.Tensor, got ArrayImpl."),
    "meta": (lambda: torch.zeros(3, device="meta"), PLAIN.format("one on the meta device")),
    "sparse": (lambda: torch.eye(3).to_sparse(), PLAIN.format("torch.sparse_coo")),
    "fake": (fake, PLAIN.format("FakeTensor")),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        PLAIN.format("NestedTensor"),
    ),
    "half complex": (
        lambda: torch.zeros(3, dtype=torch.complex64).to(torch.complex32),
        "to_jax: tensor must be of a dtype that JAX has, got complex32. Cast it.",
    ),
    "4-bit": (
        lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "to_jax: tensor must be of a dtype that JAX has, got float4_e2m1fn_x2. Cast it.",
    ),
}


@pytest.mark.parametrize("name", NO_TENSORS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_what_cannot_become_an_array_is_refused(name: str) -> None:
    make, message = NO_TENSORS[name]
    with pytest.raises(TypeError) as caught:
        to_jax(make())
    assert str(caught.value) == message


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_tensor_inside_torch_func_is_refused(transform: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"plain tensor with memory of its own, got one inside torch\.func"):
        transform(lambda x: to_torch(to_jax(x)).sum())(torch.zeros(3))


NO_ARRAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3.0, "to_torch: array must be a jax.Array, got float."),
    "numpy": (lambda: np.zeros(3), "to_torch: array must be a jax.Array, got ndarray."),
    "torch": (lambda: torch.zeros(3), "to_torch: array must be a jax.Array, got Tensor."),
    "4-bit": (
        lambda: jnp.zeros(3, jnp.int4),
        "to_torch: array must be of a dtype that PyTorch has, got int4. Cast it.",
    ),
    "key": (
        lambda: jax.random.key(0),
        "to_torch: array must be of a dtype that PyTorch has, got key<fry>. Use jax.random.key_data.",
    ),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_what_cannot_become_a_tensor_is_refused(name: str) -> None:
    make, message = NO_ARRAYS[name]
    with pytest.raises(TypeError) as caught:
        to_torch(make())
    assert str(caught.value) == message


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_tracer_is_refused(transform: Callable[..., Any]) -> None:
    with pytest.raises(TypeError) as caught:
        transform(lambda a: to_torch(a).sum())(jnp.ones(1) if transform is not jax.grad else 1.0)
    assert str(caught.value) == (
        "to_torch: array must be a concrete array, got a tracer. Call it outside of jit, grad and vmap; "
        "jax_function makes a whole JAX function callable in PyTorch."
    )


def test_a_deleted_array_is_refused() -> None:
    array = jnp.zeros(3)
    array.delete()
    with pytest.raises(
        SpecError, match=r"^to_torch: array was deleted or donated\. Hand it over before, or copy it\.$"
    ):
        to_torch(array)


def test_an_array_on_several_devices_is_refused() -> None:
    mesh = jax.make_mesh((2,), ("data",))
    array = jax.device_put(jnp.zeros(4), NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(SpecError, match=r"^to_torch: array must be on one device, got 2 devices\. Use its address"):
        to_torch(array)
    assert torch.equal(to_torch(array.addressable_shards[1].data), torch.zeros(2))


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_a_device_that_jax_lacks_is_refused(device: str) -> None:
    if device == "cuda" and jax.default_backend() == "gpu":
        pytest.skip("JAX has this device here")
    with pytest.raises(UnsupportedError) as caught:
        _check_device("to_jax", "tensor", torch.device(device))
    assert str(caught.value) == (
        f"to_jax: tensor must be on a device that JAX has here, got {device}. Move it to the CPU."
    )


def test_importing_the_bridge_loads_no_jax() -> None:
    code = "import sys, tiled_torch.bridge; sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'tiled_jax')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
