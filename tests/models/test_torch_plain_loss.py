"""The loss of a language model that is not transformers': a plain module with an lm_head, whose forward takes targets."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs import UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.core.torch_counting import LiveBytes
from tiled_torch import tile_model, tiling_paths, untile_model

pytest.importorskip("transformers")

V, H, T = 64, 8, 11
PATHS = {"lm_head": "tiled_linear_cross_entropy", "mlp": "tiled_mlp"}


class Model(nn.Module):
    """As nanoGPT's: a tied head, logits of the last token alone where there are no targets, a tuple for a result."""

    def __init__(self, vocab: int = V) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, H)
        self.mlp = nn.Sequential(nn.Linear(H, 24), nn.GELU(), nn.Linear(24, H))
        self.lm_head = nn.Linear(H, vocab, bias=False)
        self.embedding.weight = self.lm_head.weight

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x + self.mlp(x)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.hidden(ids)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Squared(Model):
    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.lm_head(self.hidden(ids))
        return logits, None if targets is None else logits.log_softmax(-1).square().mean()


class Outside(Model):
    """Whose loss is its caller's."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.hidden(ids))


def made(kind: type[Model] = Model) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(V, (2, T))
    return kind().double(), ids, torch.where(torch.arange(T) % 4 == 0, -1, ids.roll(-1, 1))


def off(found: Tensor, expected: Tensor) -> float:
    return relative_error(found.detach().numpy(), expected.detach().numpy())


@pytest.mark.filterwarnings("error")
def test_its_loss_is_tiled_and_equal() -> None:
    untiled, ids, targets = made()
    model = tile_model(copy.deepcopy(untiled), num_shards=3, strict=True)
    assert tiling_paths(model) == PATHS, "said before the first call"
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for call in (lambda of: of(ids, targets), lambda of: of(ids, targets=targets)):
        (expected, expected_loss), (found, loss) = call(untiled), call(model)
        assert off(found, expected) <= DISTRIBUTED_FLOAT64, "logits are there for who reads them"
        expected_loss.backward()
        loss.backward()
        assert loss.item() == pytest.approx(expected_loss.item(), rel=DISTRIBUTED_FLOAT64)
    assert tiling_paths(model) == PATHS
    assert model.state_dict().keys() == untiled.state_dict().keys()
    for (name, p), q in zip(untiled.named_parameters(), model.parameters(), strict=True):
        assert off(q.grad, p.grad) <= DISTRIBUTED_FLOAT64, name
    assert off(model.eval()(ids)[0], untiled.eval()(ids)[0]) <= DISTRIBUTED_FLOAT64
    assert type(untile_model(model)) is Model
    assert tiling_paths(model) == {}


def test_the_logits_never_exist() -> None:
    model, ids = tile_model(Model(4096), num_shards=8), torch.arange(128).reshape(2, 64)
    with LiveBytes() as live:
        model(ids, ids)[1].backward()
    assert 4096 * H * 4 <= live.largest < 128 * 4096 * 4 / 2


def test_what_reads_its_logits_is_told() -> None:
    untiled, ids, targets = made(Squared)
    with pytest.raises(UnsupportedError, match="got head: untiled: log_softmax reads the logits of all tokens"):
        tile_model(untiled, strict=True)
    model = tile_model(untiled)
    with pytest.warns(UserWarning, match="the loss of Squared does not run through .*: log_softmax reads"):
        model(ids, targets)
    assert tiling_paths(model)["lm_head"].startswith("untiled: log_softmax reads")


def test_a_model_without_a_loss_has_none_to_tile() -> None:
    untiled, ids, _ = made(Outside)
    expected = untiled(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tile_model(untiled, num_shards=3, strict=True)
        assert off(model(ids), expected) <= DISTRIBUTED_FLOAT64
    assert tiling_paths(model) == {"mlp": "tiled_mlp"}
