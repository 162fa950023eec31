"""Adapters of Flax around the projections of decoder layers of this library, one or a stack of them."""

from typing import Any

from flax import nnx

RANK = 3
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")


def around(base: nnx.Linear, dtype: Any, *, linear: bool = False) -> Any:
    """A layer around a plain one: nnx.LoRA, or of the same parameters an nnx.LoRALinear."""
    sizes: Any = base.kernel.shape[-2:]
    bias, options = base.bias is not None, {"lora_dtype": dtype, "lora_param_dtype": base.kernel.dtype}

    def make(rngs: nnx.Rngs) -> Any:
        if linear:
            return nnx.LoRALinear(*sizes, lora_rank=RANK, use_bias=bias, dtype=base.dtype, rngs=rngs, **options)
        return nnx.LoRA(sizes[0], RANK, sizes[1], dtype=dtype, param_dtype=base.kernel.dtype, rngs=rngs)

    if base.kernel.ndim > 2:  # of a stack of layers
        count = base.kernel.shape[0]
        made = nnx.split_rngs(splits=count)(nnx.vmap(make, in_axes=0, out_axes=0))(nnx.Rngs(0))
    else:
        made = make(nnx.Rngs(0))
    if linear:
        made.kernel, made.bias = base.kernel, base.bias
    else:
        made.base_module = nnx.data(base)
    return made


def adapt(layer: Any, names: tuple[str, ...], dtype: Any, *, linear: bool = False) -> None:
    """Put adapters around some projections of a layer."""
    for name in names:
        if name in ATTENTION:
            setattr(layer.attention, name, around(getattr(layer.attention, name), dtype, linear=linear))
        else:
            mlp = layer.mlp
            base = dict(zip(MLP, mlp.to_linears(), strict=True))[name]
            for key in (f"w_{name}", f"b_{name}"):
                if hasattr(mlp, key):
                    delattr(mlp, key)
            setattr(mlp, name, around(base, dtype, linear=linear))
