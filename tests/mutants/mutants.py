"""Known ways to break the library, each with the tests that must notice it. `make mutants` tries them (run.py).

A mutant is one piece of text that stands once in its file, what it becomes, and pytest's arguments for the tests of the
default suite that fail then. `new_jax`: by Python 3.12 with the newest JAX, as `make test-new-jax` does.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    path: str
    old: str
    new: str
    tests: str
    new_jax: bool = False


MUTANTS = (
    # The specification.
    Mutant(
        "the ragged shard is dropped",
        "shared_specs/shards.py",
        "starts = range(0, self.tokens, self.shard_tokens)",
        "starts = range(0, self.tokens - self.tokens % self.shard_tokens, self.shard_tokens)",
        "tests/core/test_shards.py",
    ),
    Mutant(
        "kept tokens begin inside a shard",
        "shared_specs/shards.py",
        "return min(self.tokens, (len(self) - self.kept_shards(keep)) * self.shard_tokens)",
        "return self.tokens - int(self.tokens * keep)",
        "tests/core/test_shards.py",
    ),
    Mutant(
        "more shards than asked for",
        "shared_specs/shards.py",
        "shard_tokens = -(-tokens // max(1, num_shards))",
        "shard_tokens = tokens // max(1, num_shards)",
        "tests/core/test_shards.py",
    ),
    Mutant(
        "every tolerance is doubled",
        "shared_specs/tolerances.py",
        "FACTOR = 2.0",
        "FACTOR = 4.0",
        "tests/core/test_tolerances.py",
    ),
    Mutant(
        "peak bytes are four percent off",
        "shared_specs/mlp/costs.py",
        "buffers = (3 if shape.gated else 2) * t * shape.intermediate * shape.itemsize\n    block",
        "buffers = int(1.04 * (3 if shape.gated else 2) * t * shape.intermediate * shape.itemsize)\n    block",
        "tests/mlp/test_torch_exact.py -k peak_bytes",
    ),
    Mutant(
        "kept shards are counted as recomputed",
        "shared_specs/mlp/costs.py",
        "recompute = up_products * (1 - kept)",
        "recompute = up_products",
        "tests/mlp/test_torch_exact.py -k test_flop",
    ),
    Mutant(
        "logits computed twice are not counted",
        "shared_specs/loss/costs.py",
        "return (1 + again + dx + dweight) * 2",
        "return (1 + dx + dweight) * 2",
        "tests/loss/test_torch_exact.py -k flop",
    ),
    Mutant(
        "the oracle's gate gets the gradient of up",
        "shared_specs/mlp/oracle.py",
        "dup, dgate = r(dh * act), r(dh * up * slope)",
        "dup, dgate = r(dh * act), r(dh * act * slope)",
        "tests/core/test_oracle.py",
    ),
    Mutant(
        "the oracle forgets the slope of the softcap",
        "shared_specs/loss/oracle.py",
        "z, slope = cap * bent, slope * (1 - bent * bent)",
        "z = cap * bent",
        "tests/core/test_oracle.py",
    ),
    Mutant(
        "parts of a dim overlap",
        "shared_specs/collectives/partitions.py",
        "return edges[part], edges[part + 1]",
        "return edges[part], edges[part + 1] + (part == 0)",
        "tests/collectives/test_partitions.py",
    ),
    Mutant(
        "tensor-parallel ranks draw the same dropout mask",
        "shared_specs/layers/random.py",
        '"tensor-parallel": ("data", "tensor"),',
        '"tensor-parallel": ("data",),',
        "tests/layers/test_both_random_streams.py tests/collectives/test_partitions.py",
    ),
    Mutant(
        "an error says less than it did",
        "shared_specs/errors.py",
        '        text += f" ({shapes})"',
        "        pass",
        "tests/core/test_both_bad_inputs.py -x",
    ),
    Mutant(
        "checkpoints are not on the disk when they are renamed",
        "shared_specs/app/finetune/checkpoint.py",
        'for path in (*partial.rglob("*"), partial):\n        _sync(path)',
        'for path in (*partial.rglob("*"), partial):\n        pass',
        "tests/app/test_loop.py tests/app/test_output.py -k 'disk or sync or killed_while_saving'",
    ),
    Mutant(
        "a damaged checkpoint is taken",
        "shared_specs/app/finetune/checkpoint.py",
        "wrong = sorted(name for name in expected if found[name] != expected[name])",
        "wrong = []",
        "tests/app/test_loop.py -k damaged_checkpoint",
    ),
    # PyTorch: the MLP.
    Mutant(
        "gate is computed from the weight of up",
        "tiled_torch/mlp/steps.py",
        "self.linear(x, w.w_gate, w.b_gate, gate)\n        self.linear(x, w.w_up",
        "self.linear(x, w.w_up, w.b_gate, gate)\n        self.linear(x, w.w_up",
        "tests/mlp/test_torch_autograd.py -k gradcheck",
    ),
    Mutant(
        "dx misses the part of gate",
        "tiled_torch/mlp/steps.py",
        "rows.addmm_(dgate, w.w_gate)",
        "pass",
        "tests/mlp/test_torch_autograd.py -k gradcheck",
    ),
    Mutant(
        "h of the backward is that of the gradient",
        "tiled_torch/mlp/math.py",
        "torch.mul(act, up, out=h)",
        "torch.mul(act, dh, out=h)",
        "tests/mlp/test_torch_autograd.py -k gradcheck",
    ),
    Mutant(
        "the slope of relu squared is halved",
        "tiled_torch/mlp/math.py",
        "slope = value.clamp(min=0).mul_(2)",
        "slope = value.clamp(min=0)",
        "tests/mlp/test_torch_autograd.py -k gradcheck",
    ),
    Mutant(
        "kept rows of another shard are read",
        "tiled_torch/mlp/loops.py",
        "gate, up = _kept_rows(kept, gated, slice(start - kept_start, stop - kept_start))\n                dy_shard",
        "gate, up = _kept_rows(kept, gated, slice(0, stop - start))\n                dy_shard",
        "tests/mlp/test_torch_autograd.py -k gradcheck",
    ),
    Mutant(
        "weight gradients are summed in bfloat16",
        "tiled_torch/core/gradients.py",
        "dtype = self.dtype if single and main_grad is None else wide_dtype(self.dtype)",
        "dtype = self.dtype",
        "tests/mlp/test_torch_exact.py -k drift",
    ),
    Mutant(
        "main_grad gets the sum twice",
        "tiled_torch/core/gradients.py",
        "if self.acc.dtype != self.main_grad.dtype and not self.empty:",
        "if not self.empty:",
        "tests/mlp/test_torch_autograd.py -k main_grad",
    ),
    Mutant(
        "the engine is not told that main_grad has the gradient",
        "tiled_torch/core/gradients.py",
        'setattr(getattr(owner, "main_grad_owner", owner), _ADDED, True)',
        "pass",
        "tests/mlp/test_torch_autograd.py -k main_grad",
    ),
    Mutant(
        "the gradient of a bias is that of the last shard",
        "tiled_torch/core/gradients.py",
        "acc += d.sum(0, dtype=acc.dtype)",
        "acc.copy_(d.sum(0, dtype=acc.dtype))",
        "tests/mlp/test_both_mlp.py -k 'torch and bias'",
    ),
    Mutant(
        "second derivatives are silently wrong",
        "tiled_torch/mlp/api.py",
        "        refuse_second_order(ctx.call.function, _UNTILED)\n",
        "",
        "tests/mlp/test_torch_autograd.py -k create_graph",
    ),
    Mutant(
        "parameters are drawn by outputs instead of inputs",
        "tiled_torch/mlp/module.py",
        'inputs = whole_shape(getattr(self, "w" + name[1:]))[1]',
        'inputs = whole_shape(getattr(self, "w" + name[1:]))[0]',
        "tests/collectives/test_both_initialisation.py tests/mlp/test_torch_autograd.py -k 'initial or sizes'",
    ),
    # PyTorch: the losses.
    Mutant(
        "the loss of ignored tokens counts",
        "tiled_torch/loss/math.py",
        "valid = targets != ignore_index\n    exists",
        "valid = targets == targets\n    exists",
        "tests/loss/test_torch_autograd.py -x",
    ),
    Mutant(
        "smoothing forgets the vocabulary's size",
        "tiled_torch/loss/math.py",
        "c = labels.counted * (options.label_smoothing / vocab)",
        "c = labels.counted * options.label_smoothing",
        "tests/loss/test_both_loss.py -k 'torch and smooth'",
    ),
    Mutant(
        "the gradient of z_loss is halved",
        "tiled_torch/loss/math.py",
        "a = a + (2 * options.z_loss) * labels.counted * lse",
        "a = a + options.z_loss * labels.counted * lse",
        "tests/loss/test_both_loss.py -k 'torch and z'",
    ),
    Mutant(
        "the softcap has slope one",
        "tiled_torch/loss/math.py",
        "bent = z.square().neg_().add_(1.0).mul_(options.logit_scale) if slope else None",
        "bent = torch.ones_like(z).mul_(options.logit_scale) if slope else None",
        "tests/loss/test_both_loss.py -k 'torch and cap'",
    ),
    Mutant(
        "every part of the vocabulary begins at zero",
        "tiled_torch/loss/loops.py",
        "return Columns(self.start + piece.start, self.start + piece.stop)",
        "return Columns(piece.start, piece.stop)",
        "tests/loss/test_torch_ranks_loss.py -x",
    ),
    Mutant(
        "dx is not summed over the holders of the vocabulary",
        "tiled_torch/loss/loops.py",
        "self.summed.sum_(self.dx)",
        "pass",
        "tests/loss/test_torch_ranks_loss.py -x",
    ),
    Mutant(
        "maxima of vocabulary shards are not compared",
        "tiled_torch/loss/math.py",
        "top = torch.maximum(self.top, other.top)",
        "top = self.top",
        "tests/loss/test_both_loss.py -k 'torch and (large or extreme or V)'",
    ),
    # PyTorch: tile.
    Mutant(
        "recomputed shards draw other random numbers",
        "tiled_torch/core/replay.py",
        "    torch.set_rng_state(state[0])\n",
        "",
        "tests/tile/test_torch_replay.py",
    ),
    Mutant(
        "recomputed shards find buffers as the last one left them",
        "tiled_torch/tile/state.py",
        "slots[key].put(copy)",
        "pass",
        "tests/tile/test_torch_buffers.py",
    ),
    Mutant(
        "a weight changed before backward goes unnoticed",
        "tiled_torch/tile/versions.py",
        "                _refuse_written(self.function, tensor, version)\n        changed",
        "                pass\n        changed",
        "tests/tile/test_torch_versions.py",
    ),
    Mutant(
        "tile sums gradients in bfloat16",
        "tiled_torch/tile/shared_gradients.py",
        "wide = part.dtype if part.dtype.is_complex else wide_dtype(part.dtype)",
        "wide = part.dtype",
        "tests/tile/test_torch_leaves.py -k low_precision",
    ),
    Mutant(
        "rows that a shard does not depend on hold garbage",
        "tiled_torch/tile/shared_gradients.py",
        "self.rows[start:stop] = 0",
        "pass",
        "tests/tile/test_torch_tile.py tests/tile/test_torch_leaves.py",
    ),
    # PyTorch: ranks.
    Mutant(
        "heads are exchanged in reverse order",
        "tiled_torch/collectives/conjugates.py",
        "cut = torch.cat(x.unflatten(-1, (over.size, x.shape[-1] // over.size)).unbind(-2))",
        "cut = torch.cat(x.unflatten(-1, (over.size, x.shape[-1] // over.size)).unbind(-2)[::-1])",
        "tests/collectives/test_torch_ranks_collectives.py -x",
    ),
    Mutant(
        "uneven parts are taken from the wrong place",
        "tiled_torch/collectives/conjugates.py",
        "return x.narrow(dim, sum(sizes[: over.rank]), sizes[over.rank])",
        "return x.narrow(dim, x.shape[dim] - sizes[over.rank], sizes[over.rank])",
        "tests/collectives/test_torch_ranks_collectives.py -x",
    ),
    Mutant(
        "16-bit sums are rounded at every rank",
        "tiled_torch/collectives/transport.py",
        "return over.size > 2 and x.dtype in (torch.bfloat16, torch.float16)",
        "return False",
        "tests/collectives/test_torch_ranks_collectives.py -x",
    ),
    Mutant(
        "the input gradient of a column layer is not reduced",
        "tiled_torch/layers/linear_autodiff.py",
        "return transport.all_reduce_(self.over, dx.contiguous())",
        'return Pending(self.over, "", None, lambda: dx)',
        "tests/layers/test_torch_ranks_layers.py -x",
    ),
    Mutant(
        "labels are not shifted",
        "tiled_torch/models/causal_lm.py",
        "return F.pad(labels[..., 1:], (0, 1), value=ignore_index)",
        "return labels",
        "tests/models/test_torch_models.py -x",
    ),
    # Triton's kernels, in its interpreter.
    Mutant(
        "the weight gradient reads past its shard",
        "tiled_torch/mlp/kernels/weight_gradient.py",
        "columns = load_block(a, k, m, T, M, a_stride, BK, BM, TMA).T",
        "columns = load_block(a, k, m, T + 1, M, a_stride, BK, BM, TMA).T",
        "tests/kernels/test_torch_memory.py -k past_the_end",
    ),
    Mutant(
        "the elementwise kernel swaps up and its activation",
        "tiled_torch/mlp/kernels/glu_elementwise.py",
        "tl.store(dup + i, (d * act).to(kind), mask=inside)",
        "tl.store(dup + i, (d * u).to(kind), mask=inside)",
        "tests/kernels/test_torch_triton.py -x",
    ),
    # JAX: the MLP.
    Mutant(
        "JAX: dup is made of up",
        "tiled_jax/mlp/math.py",
        '"up": (dh * act).astype(dtype)}',
        '"up": (dh * up).astype(dtype)}',
        "tests/mlp/test_jax_matrix.py -x",
    ),
    Mutant(
        "JAX: dx misses the part of up",
        "tiled_jax/mlp/math.py",
        'return (parts[0] + parts[1] if "gate" in d else parts[0]).astype(dtype)',
        "return parts[0].astype(dtype)",
        "tests/mlp/test_jax_matrix.py -x",
    ),
    Mutant(
        "JAX: weight gradients are summed in bfloat16",
        "tiled_jax/mlp/loops.py",
        "(steps.sum_shape(name, shapes[name]), acc)",
        "(steps.sum_shape(name, shapes[name]), x.dtype)",
        "tests/mlp/test_jax_mlp.py -x",
    ),
    Mutant(
        "JAX: kept rows of another shard are read",
        "tiled_jax/mlp/loops.py",
        "pre = {name: _rows(value, first, x_shard.shape[0]) for name, value in kept_pre.items()}",
        "pre = {name: _rows(value, first * 0, x_shard.shape[0]) for name, value in kept_pre.items()}",
        "tests/mlp/test_jax_matrix.py -x",
    ),
    Mutant(
        "JAX: recomputation is merged with forward",
        "tiled_jax/mlp/loops.py",
        "    x, dy, w = barrier((x, dy, w))\n",
        "",
        "tests/mlp/test_jax_bytes.py -x",
        new_jax=True,
    ),
    Mutant(
        "JAX: every device adds the bias of y",
        "tiled_jax/mlp/loops.py",
        "jnp.where(lax.axis_index(axes) == 0, w[name], jnp.zeros_like(w[name]))",
        "w[name]",
        "tests/tile/test_jax_mesh.py -k bias_of_y",
    ),
    Mutant(
        "JAX: weight gradients are those of a device's own tokens",
        "tiled_jax/core/own_tokens.py",
        "sums = lax.psum(sums, tokens)",
        "pass",
        "tests/tile/test_jax_mesh.py -k kept_shards",
    ),
    # JAX: the losses.
    Mutant(
        "JAX: smoothing forgets the vocabulary's size",
        "tiled_jax/loss/math.py",
        "share=g_loss * (smooth / rules.vocab) if smooth else None",
        "share=g_loss * smooth if smooth else None",
        "tests/loss/test_both_loss.py -k 'jax and smooth'",
    ),
    Mutant(
        "JAX: the gradient of z_loss is halved",
        "tiled_jax/loss/math.py",
        "+ 2 * options.z_loss * lse)",
        "+ options.z_loss * lse)",
        "tests/loss/test_both_loss.py -k 'jax and z'",
    ),
    Mutant(
        "JAX: the softcap has slope one",
        "tiled_jax/loss/math.py",
        "return cap * bent, scale * (1 - bent * bent)",
        "return cap * bent, scale",
        "tests/loss/test_both_loss.py -k 'jax and cap'",
    ),
    Mutant(
        "JAX: every part of the vocabulary begins at zero",
        "tiled_jax/loss/math.py",
        "_pick(logits, target - jnp.asarray(part.first, target.dtype))",
        "_pick(logits, target)",
        "tests/loss/test_both_loss.py -k 'jax and V'",
    ),
    Mutant(
        "JAX: ignored tokens have a gradient",
        "tiled_jax/loss/math.py",
        'g_loss = jnp.where(labels.valid, g["loss"], 0) if "loss" in g else zero',
        'g_loss = g["loss"] if "loss" in g else zero',
        "tests/loss/test_both_loss.py -k 'jax and z'",
    ),
    # JAX: tile, layers, kernels.
    Mutant(
        "JAX: all shards share one dropout mask",
        "tiled_jax/tile/module_state.py",
        "return jax.random.split(jax.random.fold_in(key, count), shards)",
        "return jax.random.split(jax.random.fold_in(key, count), 1).repeat(shards, 0)",
        "tests/tile/test_jax_tile.py -x",
    ),
    Mutant(
        "JAX: two calls draw the same numbers",
        "tiled_jax/tile/module_state.py",
        "count.set_value(count.get_value() + 1)",
        "pass",
        "tests/tile/test_jax_tile.py -x",
    ),
    Mutant(
        "JAX: the gradient of a scattered array is a device's own",
        "tiled_jax/collectives/conjugates.py",
        "return (gathered(d, axis, dim, same=True),)",
        "return (jnp.concatenate([summed(d, axis)] * axis.size, dim),)",
        "tests/collectives/test_jax_collectives.py -x",
    ),
    Mutant(
        "JAX: uneven parts lose their place",
        "tiled_jax/collectives/conjugates.py",
        "spans = [(rank * longest, size) for rank, size in enumerate(sizes)]",
        "spans = [(rank * size, size) for rank, size in enumerate(sizes)]",
        "tests/collectives/test_jax_collectives.py -x",
    ),
    Mutant(
        "JAX: a block is overwritten before its products are made",
        "tiled_jax/mlp/kernels/main_loop.py",
        "            plgpu.wgmma_wait(0)  # the copying warpgroup may overwrite these blocks after this step\n",
        "",
        "tests/kernels/test_jax_kernel_waits.py -x",
    ),
)
