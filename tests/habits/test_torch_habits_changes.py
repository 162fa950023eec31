"""What users do to a model in PyTorch: changes of weights and parts. See torch_habits.py."""

from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from tests.habits.torch_habits import (
    IDS,
    LABELS,
    VOCAB,
    H,
    Habit,
    Net,
    X,
    check_habit,
    every_habit,
    gradients_of,
    habit,
    noisy,
    of_step,
)

# Changes of weights and parts.


@habit("mlp", "block")
def changes_weights_in_place(model: Any) -> Any:
    first = of_step(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model.model.layers[1].self_attn.q_proj.weight[0].fill_(0.3)
        model.lm_head.weight.data.add_(0.1)
        model.model.norm.weight.clamp_(0.5, 1.0)
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def assigns_new_parameters(model: Any) -> Any:
    first = of_step(model)
    layer = model.model.layers[0]
    for part in (layer.mlp.down_proj, layer.self_attn.o_proj, layer.input_layernorm, model.lm_head, model.model.norm):
        part.weight = nn.Parameter(part.weight.detach().flip(0))
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def points_data_elsewhere(model: Any) -> Any:
    first = of_step(model)
    for parameter in model.parameters():
        parameter.data = 0.5 * parameter.data
    return [first, of_step(model)]


@habit("mlp", "block")
def ties_the_head_by_assignment(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    return of_step(model)


@habit("mlp", "block")
def shares_one_weight_between_gate_and_up(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight = layer.mlp.up_proj.weight
    return of_step(model)


@habit("mlp", "block")
def shares_one_mlp_between_layers(model: Any) -> Any:
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return of_step(model)


@habit("mlp", "block", deep=True)
def runs_one_layer_twice(model: Any) -> Any:
    model.model.layers = nn.ModuleList([model.model.layers[0], model.model.layers[0]])
    return of_step(model, use_cache=False)


@habit("mlp", "block")
def takes_layers_out(model: Any) -> Any:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return of_step(model)


@habit("mlp", "block", deep=True)
def makes_the_vocabulary_larger(model: Any) -> Any:
    first = of_step(model)
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[VOCAB:] = 0.1
    ids = IDS.clone()
    ids[0, 4] = VOCAB + 3
    return [first, of_step(model, ids), model.config.vocab_size]


class Doubled(nn.Linear):
    def forward(self, *args: Any) -> Tensor:
        return 2 * super().forward(*args)


@habit("mlp", "block")
def replaces_projections_by_a_subclass(model: Any) -> Any:
    for layer in (model.model.layers[0].mlp, model.model.layers[1].self_attn):
        layer._modules["down_proj" if "down_proj" in layer._modules else "v_proj"].__class__ = Doubled
    return of_step(model)


@habit("mlp", "block")
def replaces_the_head_by_a_subclass(model: Any) -> Any:
    model.lm_head.__class__ = Doubled
    return of_step(model)


@habit("mlp", "block")
def gives_the_head_a_bias(model: Any) -> Any:
    weight = model.lm_head.weight
    model.set_output_embeddings(noisy(nn.Linear(H, VOCAB)))
    model.lm_head.weight = weight
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.arange(VOCAB) / VOCAB)
    return of_step(model)


@habit("mlp", "block", deep=True)
def puts_dropout_and_a_layer_before_the_head(model: Any) -> Any:
    torch.manual_seed(1)
    model.lm_head = nn.Sequential(nn.Linear(H, H), nn.Tanh(), model.lm_head)
    return of_step(model)


@habit("mlp", "block", deep=True)
def changes_the_activation(model: Any) -> Any:
    first = of_step(model)
    model.model.layers[0].mlp.act_fn = nn.GELU()
    model.model.layers[1].mlp.act_fn = nn.Tanh()
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def changes_an_epsilon(model: Any) -> Any:
    first = of_step(model)
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5
    model.model.norm.variance_epsilon = 0.1
    return [first, of_step(model)]


@habit("mlp", "block", deep=True)
def replaces_norms(model: Any) -> Any:
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.LayerNorm(H)
    return of_step(model)


@habit("mlp", "block")
def replaces_an_mlp(model: Any) -> Any:
    model.model.layers[0].mlp = noisy(nn.Sequential(nn.Linear(H, 5), nn.ReLU(), nn.Linear(5, H)).requires_grad_())
    return of_step(model)


@habit("mlp", "block")
def puts_a_layer_out_of_action(model: Any) -> Any:
    model.model.layers[0].mlp.down_proj = nn.Identity()
    model.model.layers[0].mlp.gate_proj = model.model.layers[0].mlp.up_proj = nn.Identity()
    return of_step(model)


@habit("mlp", "block")
def patches_the_forward_of_an_mlp(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(lambda self, x: self.down_proj(torch.tanh(self.up_proj(x))), layer.mlp)
        layer.mlp.gate_proj.requires_grad_(False)
    return of_step(model)


@habit("mlp", "block", deep=True)
def patches_the_forward_of_a_projection(model: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tanh())

    for layer in (model.model.layers[0].mlp.up_proj, model.model.layers[1].self_attn.q_proj, model.lm_head):
        layer.forward = MethodType(forward, layer)
    return of_step(model)


@habit("mlp", "block")
def patches_the_forward_of_a_layer(model: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = lambda x, *args, before=layer.forward, **options: 0.5 * before(x, *args, **options)
    return of_step(model)


@habit("mlp", "block")
def patches_the_forward_of_attention(model: Any) -> Any:
    attention = model.model.layers[0].self_attn

    def forward(*args: Any, before: Any = attention.forward, **options: Any) -> Any:
        y, *more = before(*args, **options)
        return (2 * y, *more)

    attention.forward = forward
    return of_step(model)


@habit("mlp", "block")
def has_a_loss_function_of_its_own(model: Any) -> Any:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)

    model.loss_function = loss
    return of_step(model)


@habit("mlp", "block")
def scales_attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.5
    return of_step(model)


@habit("mlp", "block", deep=True)
def normalizes_weights(model: Any) -> Any:
    for name, layer in list(model.named_modules()):
        if name.endswith(("up_proj", "q_proj")):
            nn.utils.parametrizations.weight_norm(layer)
    return of_step(model)


@habit("mlp", "block", deep=True)
def parametrizes_weights(model: Any) -> Any:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.tanh()

    for name, layer in list(model.named_modules()):
        if name.endswith(("gate_proj", "down_proj", "o_proj")) or (name == "lm_head"):
            parametrize.register_parametrization(layer, "weight", Symmetric())
    return of_step(model)


@habit("mlp", "block", deep=True)
def prunes(model: Any) -> Any:
    for name, layer in list(model.named_modules()):
        if name.endswith(("up_proj", "v_proj")) or name == "lm_head":
            prune.l1_unstructured(layer, "weight", 0.5)
    return of_step(model)


@habit("mlp", "block", deep=True)
def prunes_for_good(model: Any) -> Any:
    for name, layer in list(model.named_modules()):
        if name.endswith(("up_proj", "v_proj")):
            prune.random_structured(layer, "weight", 0.3, dim=0)
            prune.remove(layer, "weight")
    return of_step(model)


@habit("module", "mlp", "block")
def calls_with_other_parameters(model: Any) -> Any:
    others = {name: (1.5 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    arguments: Any = (X, LABELS) if isinstance(model, Net) else ()
    options: Any = {} if isinstance(model, Net) else {"input_ids": IDS, "labels": IDS}
    found: Any = torch.func.functional_call(model, others, arguments, options)
    loss = found if isinstance(found, Tensor) else found.loss
    loss.backward()
    return {"loss": loss, "gradients": {name: p.grad for name, p in others.items()}, "own": len(gradients_of(model))}


@habit("module", "mlp", "block", refused="torch.func|setup_context|vmap")
def differentiates_with_torch_func(model: Any) -> Any:
    params = {name: p.detach() for name, p in model.named_parameters()}
    options: Any = {} if isinstance(model, Net) else {"input_ids": IDS, "labels": IDS, "use_cache": False}
    arguments: Any = (X, LABELS) if isinstance(model, Net) else ()

    def loss(params: Any) -> Any:
        found: Any = torch.func.functional_call(model, params, arguments, options)
        return found if isinstance(found, Tensor) else found.loss

    return {"gradients": torch.func.grad(loss)(params)}


@pytest.mark.deep_but(8)
@every_habit(__name__)
def test_habit(do: Habit, form: str, refused: str, raises: bool) -> None:
    check_habit(do, form, refused, raises)
