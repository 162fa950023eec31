"""The MLP and the loss in operations that carry the tangents of forward mode, a shard at a time.

The hand-written loops write into buffers, which no tangent survives. Forward mode keeps nothing for later, so a shard at a
time of PyTorch's own operations needs no more memory than they do; reverse mode through the same call, if it is wanted as
well, keeps what it keeps of the untiled layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from shared_specs.shards import ShardPlan
from tiled_torch.core.autocast import without_autocast
from tiled_torch.core.tensors import rows_of, wide_dtype
from tiled_torch.loss.call import LossCall, Operands, RowsRun
from tiled_torch.loss.math import Labels, Part, Rules
from tiled_torch.loss.ranking import ranking_of


def loss(given: Operands, call: LossCall) -> tuple[Tensor, ...]:
    """Return the results of `call.values`, with tangents. Vocabulary shards become shorter shards of tokens: as many logits."""
    rows = rows_of(given.x)
    run = RowsRun()
    with without_autocast(given.x):
        labels, weight = call.labels(given, run), given.weight.to(call.dtype)
        bias = None if given.bias is None else given.bias.to(call.dtype)
        plan = ShardPlan(rows.shape[0], max(1, call.shard_tokens // call.vocab_shards))
        found = [_of_no_tokens(rows.new_empty(0, dtype=wide_dtype(call.dtype)), call.rules.options.top_k or 1)]
        found *= not len(plan)
        for start, stop in plan.spans:
            logits = F.linear(rows[start:stop].to(call.dtype), weight, bias)
            value, *rest = _of_logits(call.rules, logits, labels[start:stop])
            weight_of = labels[start:stop].token_weight
            found.append((value if weight_of is None else torch.where(value == 0, 0.0, value * weight_of), *rest))
        loss, log_probs, lse, entropy, right, *ranked = map(torch.cat, zip(*found, strict=True))
        factor, count = call.factors(labels, given.num_valid)
        dims = given.targets.shape
        value, right = call.reduced(loss, factor, dims, run), call.reduced(right, count, dims, run)
        of_tokens = [call.result(a, dims, run) for a in (log_probs, lse, entropy, *ranked)]
        return value, *of_tokens[:3], right, *of_tokens[3:]


def _of_no_tokens(empty: Tensor, top_k: int) -> tuple[Tensor, ...]:
    entries = empty.long()
    best = [a[:, None].expand(0, top_k) for a in (empty, entries)]
    return (*(empty,) * 5, entries, *best)


def _of_logits(rules: Rules, logits: Tensor, labels: Labels) -> tuple[Tensor, ...]:
    """Return the loss, log_probs, lse, entropy, accuracy and prediction of each token [t], and values and indices of its best
    entries [t, k], from logits [t, V].
    """
    options, vocab = rules.options, rules.vocab
    z = logits.to(wide_dtype(logits.dtype)) * options.logit_scale
    if options.logit_softcap is not None:
        z = options.logit_softcap * torch.tanh(z / options.logit_softcap)
    lse = z.logsumexp(1)
    log_p, ignored = z - lse[:, None], labels.counted == 0
    nll = -log_p.gather(1, labels.target[:, None])[:, 0]
    value = (1 - options.label_smoothing) * labels.weight * nll
    if options.label_smoothing:
        omega = (
            torch.ones(vocab, dtype=z.dtype, device=z.device) if labels.class_weight is None else labels.class_weight
        )
        value = value - labels.counted * (options.label_smoothing / vocab) * (log_p @ omega)
    if options.z_loss:
        value = value + labels.counted * options.z_loss * lse.square()
    zero = torch.zeros_like(nll)
    log_probs = torch.where(ignored, zero, -nll * labels.counted)
    entropy = zero
    if rules.entropy:
        p = log_p.exp()
        entropy = -torch.where(p == 0, 0.0, p * log_p).sum(1)
    with torch.no_grad():
        primal, stored, known = (
            forward_ad.unpack_dual(a).primal if forward_ad._current_level >= 0 else a for a in (z, logits, log_p)
        )
        hit = primal.gather(1, labels.target[:, None])[:, 0] == primal.amax(1)
        first, best = (ranking_of(rules, stored, Part(0, vocab), k).entries for k in (1, options.top_k or 1))
        ranked = first[:, 0], known.gather(1, best), best
    return torch.where(ignored, zero, value), log_probs, lse, entropy, hit.to(z.dtype) * labels.counted, *ranked
