"""What users do to a model in PyTorch: calls, what they return, batches and random numbers. See torch_habits.py."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.torch_habits import (
    IDS,
    LABELS,
    OTHER_IDS,
    H,
    Habit,
    Net,
    X,
    check_habit,
    every_habit,
    forward_of,
    gradients_of,
    habit,
    noisy,
    of_step,
)

# Calls and outputs.


@habit("mlp", "block")
def reads_logits(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS)
    return {"loss": outputs.loss, "logits": outputs.logits, "best": outputs.logits.argmax(-1), "names": list(outputs)}


@habit("mlp", "block", refused="Read the logits before that: an optimizer's step")
def copies_logits_and_reads_them_after_a_step(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS)
    kept = outputs.logits.detach().clone()
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), 0.3).step()
    return {"logits": torch.from_numpy(kept.numpy())}


@habit("mlp", "block")
def adds_a_loss_of_logits(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS)
    loss = outputs.loss + 0.1 * outputs.logits.float().logsumexp(-1).square().mean()
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block")
def computes_its_own_loss(model: Any) -> Any:
    logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, IDS[:, 1:].flatten(), label_smoothing=0.1)
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def learns_from_a_teacher(model: Any) -> Any:
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
        target = teacher(input_ids=IDS).logits
    outputs = model(input_ids=IDS, labels=IDS)
    loss = (
        F.kl_div(outputs.logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean")
        + outputs.loss
    )
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def prefers_one_answer(model: Any) -> Any:
    """As DPO does: log probabilities of sequences, against those of a frozen copy."""

    def log_probs(model: Any, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).sum((1, 2))

    frozen = copy.deepcopy(model)
    with torch.no_grad():
        noisy(frozen)
        old = [log_probs(frozen, ids) for ids in (IDS, OTHER_IDS)]
    new = [log_probs(model, ids) for ids in (IDS, OTHER_IDS)]
    loss = -F.logsigmoid((new[0] - old[0]) - (new[1] - old[1])).mean()
    loss.backward()
    return {"loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block")
def asks_for_tuples(model: Any) -> Any:
    found = model(input_ids=IDS, labels=IDS, return_dict=False)
    return {"loss": found[0], "logits": found[1], "length": len(found), "type": type(found).__name__}


@habit("mlp", "block")
def asks_for_hidden_states(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS, output_hidden_states=True)
    loss = outputs.loss + outputs.hidden_states[1].square().mean()
    loss.backward()
    return {"hidden": outputs.hidden_states, "loss": loss, "gradients": gradients_of(model)}


@habit("mlp", "block", deep=True)
def asks_for_attention(model: Any) -> Any:
    model.set_attn_implementation("eager")
    outputs = model(input_ids=IDS, labels=IDS, output_attentions=True)
    outputs.loss.backward()
    return {"attention": outputs.attentions, "loss": outputs.loss, "gradients": gradients_of(model)}


@habit("mlp", "block")
def keeps_a_few_logits(model: Any) -> Any:
    outputs = model(input_ids=IDS, logits_to_keep=3)
    outputs.logits.square().mean().backward()
    return {"logits": outputs.logits, "gradients": gradients_of(model)}


@habit("mlp", "block")
def unpacks_outputs(model: Any) -> Any:
    outputs = model(input_ids=IDS, labels=IDS, use_cache=False)
    copied = {**outputs}
    return {
        "keys": list(copied),
        "tuple": outputs.to_tuple(),
        "item": outputs["logits"],
        "slice": outputs[:2],
        **copied,
    }


@habit("mlp", "block", deep=True)
def pickles_outputs(model: Any) -> Any:
    with torch.no_grad():
        outputs = model(input_ids=IDS, labels=IDS, use_cache=False)
    read = pickle.loads(pickle.dumps(outputs))
    return {"loss": read.loss, "logits": read.logits, "type": type(read).__name__}


@habit("mlp", "block", deep=True)
def goes_on_from_a_cache(model: Any) -> Any:
    model.eval()
    with torch.no_grad():
        first = model(input_ids=IDS[:, :6], use_cache=True)
        second = model(input_ids=IDS[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        whole = model(input_ids=IDS, use_cache=False)
    return {"first": first.logits, "second": second.logits, "whole": whole.logits}


@habit("mlp", "block", deep=True)
def generates_between_steps(model: Any) -> Any:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.3), []
    for ids in (IDS, OTHER_IDS):
        found.append(of_step(model, ids)["loss"])
        optimizer.step()
        model.eval()
        found.append(model.generate(IDS[:, :4], max_new_tokens=4, do_sample=False))
        model.train()
    return [*found, of_step(model)]


@habit("mlp", "block", deep=True)
def samples_with_a_seed(model: Any) -> Any:
    model.eval()
    torch.manual_seed(2)
    options = {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(IDS[:, :3], max_new_tokens=4, do_sample=True, top_k=0, **options)
    return {"sequences": found.sequences, "scores": found.scores}


@habit("mlp", "block", deep=True)
def generates_with_beams(model: Any) -> Any:
    model.eval()
    return {"ids": model.generate(IDS[:, :3], max_new_tokens=4, num_beams=2), "loss": forward_of(model)}


@habit("mlp", "block", deep=True)
def evaluates_between_steps(model: Any) -> Any:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.3), []
    for ids, mode in ((IDS, torch.no_grad), (OTHER_IDS, torch.inference_mode)):
        model.train()
        found.append(of_step(model, ids)["loss"])
        optimizer.step()
        model.eval()
        with mode():
            outputs = model(input_ids=IDS, labels=IDS)
            found += [outputs.loss.clone(), torch.from_numpy(outputs.logits.numpy().copy())]
    return [*found, of_step(model)]


# Batches.


@habit("mlp", "block")
def pads_on_the_right(model: Any) -> Any:
    mask = torch.ones_like(IDS)
    mask[1, 5:] = 0
    return of_step(model, labels=IDS.masked_fill(mask == 0, -100), attention_mask=mask)


@habit("mlp", "block")
def pads_on_the_left(model: Any) -> Any:
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    places = (mask.cumsum(1) - 1).clamp(0)
    return of_step(model, labels=IDS.masked_fill(mask == 0, -100), attention_mask=mask, position_ids=places)


@habit("mlp", "block")
def gives_a_mask_of_pairs(model: Any) -> Any:
    mask = torch.ones(9, 9).tril().bool()
    mask[5:, :2] = False
    return of_step(model, attention_mask=mask[None, None].expand(2, 1, 9, 9))


@habit("mlp", "block")
def packs_documents(model: Any) -> Any:
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    labels = IDS.masked_fill(places == 0, -100)
    return of_step(model, labels=labels, position_ids=places, use_cache=False)


IN_A_CACHE = (
    "documents are kept apart where transformers does not: its cache, on by default, tells it that they are not packed"
)


@habit("mlp", "block", faults={"mlp": IN_A_CACHE, "block": IN_A_CACHE})
def packs_documents_and_leaves_the_cache_on(model: Any) -> Any:
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    return of_step(model, labels=IDS.masked_fill(places == 0, -100), position_ids=places)


@habit("mlp", "block")
def gives_positions(model: Any) -> Any:
    return of_step(model, position_ids=torch.arange(9)[None] + 5)


@habit("mlp", "block")
def ignores_all_of_a_row(model: Any) -> Any:
    labels = LABELS.clone()
    labels[1] = -100
    return of_step(model, labels=labels)


@habit("mlp", "block")
def shifts_labels_itself(model: Any) -> Any:
    shifted = F.pad(LABELS[:, 1:], (0, 1), value=-100)
    return of_step(model, labels=LABELS, shift_labels=shifted)


@habit("module", "mlp", "block")
def has_a_last_small_batch(model: Any) -> Any:
    if isinstance(model, Net):
        return [model(X), model(X[:1, :5], LABELS[:1, :5]), model(X[0, :1], LABELS[0, :1])]
    return [of_step(model), of_step(model, IDS[:1, :5]), of_step(model, IDS[:, :4])]


@habit("mlp", "block")
def has_batches_of_one_token(model: Any) -> Any:
    model.eval()
    return {"logits": model(input_ids=IDS[:1, :1]).logits}


@habit("mlp", "block", deep=True)
def gives_narrow_and_strided_tokens(model: Any) -> Any:
    strided = torch.stack([IDS, OTHER_IDS], -1)[..., 0]
    return [of_step(model, strided), forward_of(model, IDS.int(), labels=IDS)]


@habit("mlp", "block")
def repeats_a_row_without_a_copy(model: Any) -> Any:
    return of_step(model, IDS[:1].expand(3, -1))


@habit("mlp", "block")
def gives_embeddings_and_a_prefix(model: Any) -> Any:
    """As prompt tuning does."""
    prefix = nn.Parameter(torch.full((1, 2, H), 0.2))
    embeds = torch.cat([prefix.expand(2, -1, -1), model.get_input_embeddings()(IDS)], 1)
    loss = model(inputs_embeds=embeds, labels=F.pad(IDS, (2, 0), value=-100)).loss
    loss.backward()
    return {"loss": loss, "gradient of the prefix": prefix.grad, "gradients": gradients_of(model)}


# Random numbers.


@habit("mlp", "block", deep=True)
def drops_in_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    torch.manual_seed(4)
    return of_step(model)


@habit("mlp", "block", deep=True)
def drops_behind_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda part, args, y: F.dropout(y, 0.5, part.training))
    torch.manual_seed(4)
    first = of_step(model)
    model.eval()
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def adds_noise_to_embeddings(model: Any) -> Any:
    """NEFTune."""

    def noise(part: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y + torch.zeros_like(y).uniform_(-0.1, 0.1)

    model.get_input_embeddings().register_forward_hook(noise)
    torch.manual_seed(4)
    return of_step(model)


@habit("mlp", "block", deep=True)
def has_dropout_in_an_mlp_and_evaluates(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    model.train()
    trained = forward_of(model)
    torch.manual_seed(4)
    first = torch.rand(3)
    model.eval()
    return {"finite": bool(trained.isfinite()), "eval": of_step(model), "stream": first}


@habit("mlp", "block")
def draws_the_same_after_a_step(model: Any) -> Any:
    torch.manual_seed(9)
    step = of_step(model)
    return {"step": step, "drawn": torch.rand(4)}


@pytest.mark.deep_but(8)
@every_habit(__name__)
def test_habit(do: Habit, form: str, refused: str, raises: bool) -> None:
    check_habit(do, form, refused, raises)
