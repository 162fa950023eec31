"""What `tile_model` does with every causal language model of transformers: tiny models, compared with their untiled selves.

`python -m tests.models.supported` runs all of them and writes docs/supported_models.md; with names, those alone, to the screen.
"""

import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shared_specs.app.option_fields import InputError
from shared_specs.tolerances import MODEL_FLOAT32
from tests.models.tiny_configs import tiny_config, tiny_model
from tests.models.tiny_overrides import (
    FILES_DIFFER,
    FLOAT32,
    INPUTS,
    NOT_BUILT,
    NOT_CHECKPOINTED,
    NOT_GENERATED,
    OVERRIDES,
)
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.models.experts.module import TiledRouter
from tiled_torch.plan.sizes import decoder_of_model

transformers = pytest.importorskip("transformers")

TEXT = dict(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGES = dict(transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
TABLE = Path(__file__).parents[2] / "docs" / "supported_models.md"
NOT_TRIED = "not tried"
LARGEST = 30_000_000  # parameters of a model that is still tiny
IDS = torch.arange(2 * 9).reshape(2, 9) % 50 + 3
LABELS = torch.where(IDS % 4 == 0, -100, IDS)


@dataclass(frozen=True)
class Row:
    """One line of the table: the paths of the loss and of the MLPs, what stays as it is, and how `plan` reads the model."""

    kind: str
    model: str
    loss: str
    mlps: str
    left: str = ""
    plan: str = NOT_TRIED

    @property
    def line(self) -> str:
        cells = (self.kind, self.model, self.loss, self.mlps, self.left, self.plan)
        return f"| {' | '.join(cells)} |"


@contextmanager
def exact_losses() -> Iterator[None]:
    """transformers casts logits to float32 before its loss; of float64 models, compared, that hides what differs."""
    known = Tensor.float

    def float_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype == torch.float64 else known(self, *args, **kwargs)

    with mock.patch.object(Tensor, "float", float_):
        yield


def build(kind: str, *, images: bool = False) -> Any:
    """A tiny model of a type; images: of its class that takes them."""
    dtype = torch.float32 if kind in FLOAT32 else torch.float64
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    return tiny_model(tiny_config(kind, OVERRIDES.get(kind, {})), auto, dtype).train()


def step(model: Any, kind: str, **given: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, the logits and the gradients of a step."""
    model.zero_grad()
    with exact_losses():
        torch.manual_seed(1)
        outputs = model(input_ids=IDS, labels=LABELS, **INPUTS.get(kind, {}), **given)
        outputs.loss.backward()
        logits = outputs.logits.detach()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs.loss.detach(), torch.as_tensor(logits).clone(), gradients


def difference(found: tuple[Any, ...], expected: tuple[Any, ...]) -> float:
    """The largest relative error of the loss, the logits and each gradient.

    A gradient that is zero but for rounding (a bias that softmax takes out again) is measured by the others' size.
    """
    assert found[2].keys() == expected[2].keys()
    whole = sum(float(g.double().square().sum()) for g in expected[2].values()) ** 0.5
    pairs = [(found[0], expected[0], 0.0), (found[1], expected[1], 0.0)]
    pairs += [(found[2][name], expected[2][name], whole * MODEL_FLOAT32) for name in expected[2]]
    return max(
        float((a.double() - b.double()).norm()) / max(float(b.double().norm()), floor, 1e-300) for a, b, floor in pairs
    )


def checked(kind: str, *, images: bool = False, saved: bool = True) -> Row:
    """Build, compare and return what ran; an AssertionError where the tiled model is not the untiled one."""
    name = (IMAGES if images else TEXT)[kind]
    if kind in NOT_BUILT:
        return Row(kind, name, NOT_TRIED, NOT_TRIED, NOT_BUILT[kind])
    try:
        model = build(kind, images=images)
        assert not images or sum(p.numel() for p in model.parameters()) < LARGEST
        expected, keys = step(model, kind), list(model.state_dict())
    except Exception:
        if not images:
            raise
        return Row(kind, name, NOT_TRIED, NOT_TRIED, "it was not built tiny, or needs more than tokens")
    assert type(model).__name__ == name
    with _left_untold():
        tile_model(model, num_shards=3)
        planned = tiling_paths(model)
        found = step(model, kind)
    paths = tiling_paths(model)
    row = _row(kind, name, model, paths)
    assert difference(found, expected) <= MODEL_FLOAT32, f"{kind}: {difference(found, expected)}"
    assert list(model.state_dict()) == keys
    head = _head(model, paths)
    assert head is None or planned[head] == paths[head] or planned[head].startswith("unknown"), (
        planned[head],
        paths[head],
    )
    if saved and kind not in FILES_DIFFER:
        _check_files(model, getattr(transformers, name), kind, found)
    untile_model(model)
    assert tiling_paths(model) == {}
    return row


def planned(kind: str, *, images: bool = False) -> str:
    """How `plan` reads a tiny model of a type: its layers by formulas, or measured, or its whole step; or why it does not."""
    if kind in NOT_BUILT:
        return NOT_TRIED
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(tiny_config(kind, OVERRIDES.get(kind, {})), dtype=torch.float32)
    try:
        decoder = decoder_of_model("plan", model, tokens=IDS.shape[1])
    except InputError as error:
        reason = str(error).partition(f"got {kind}. ")[2].partition(" Or pass a loss_fn")[0].rstrip(".")
        return f"no: {reason[:1].lower() if reason[1:2].islower() else reason[:1]}{reason[1:]}"
    if decoder.whole is not None:
        return "whole step"
    return "measured" if decoder.measured is not None else "formulas"


def check_use(kind: str) -> None:
    """Assert that greedy generation and a step with checkpointed layers are those of the untiled model."""
    plain = build(kind)
    tiled = tiled_copy(plain)
    if kind in NOT_GENERATED:
        with pytest.raises(ValueError, match="axial_pos_shape"):
            _generated(plain, kind)
    else:
        assert torch.equal(_generated(tiled, kind), _generated(plain, kind))
    if kind in NOT_CHECKPOINTED:
        with pytest.raises(ValueError, match="checkpointing"):
            plain.activation_checkpointing_enable()
        return
    for model in (plain, tiled):
        model.activation_checkpointing_enable({"use_reentrant": False})
    assert_same_step(tiled, plain, kind)


def tiled_copy(model: Any) -> Any:
    """A copy of the model, tiled; what is left untiled is in the table, not told here."""
    with _left_untold():
        return tile_model(deepcopy(model), num_shards=3)


def assert_same_step(model: Any, untiled: Any, kind: str) -> None:
    expected = step(untiled, kind)
    with _left_untold():
        found = difference(step(model, kind), expected)
    assert found <= MODEL_FLOAT32, f"{kind}: {found}"


@contextmanager
def _left_untold() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"tile_model: .* (as it is|as they are) in")
        warnings.filterwarnings("ignore", message=r"tile_model: the loss of")
        yield


def _generated(model: Any, kind: str) -> Tensor:
    """What greedy generation appends to the tokens, in evaluation."""
    model.eval()
    with torch.no_grad():
        found = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0, **INPUTS.get(kind, {}))
    model.train()
    return found


def _check_files(model: Any, made: Any, kind: str, found: tuple[Any, ...]) -> None:
    """What save_pretrained writes of the tiled model is the untiled one's."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = made.from_pretrained(folder, dtype=model.dtype, experts_implementation="eager").to(model.dtype).train()
    assert difference(step(loaded, kind), found) <= MODEL_FLOAT32


def _head(model: Any, paths: dict[str, str]) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head and name in paths), None)


def _row(kind: str, name: str, model: nn.Module, paths: dict[str, str]) -> Row:
    head = _head(model, paths)
    routers = {place for place, module in model.named_modules() if isinstance(module, TiledRouter)}
    rest = {place: path for place, path in paths.items() if place != head and place not in routers}
    ways = sorted({path.partition(":")[0] for path in rest.values() if not path.startswith("untiled")})
    reasons = sorted({path.removeprefix("untiled: ") for path in rest.values() if path.startswith("untiled")})
    loss = paths[head] if head is not None else "untiled: it has no head"
    return Row(kind, name, _code(loss), ", ".join(f"`{way}`" for way in ways) or "none", "; ".join(reasons))


def _code(path: str) -> str:
    way, _, reason = path.partition(": ")
    return f"`{way}`" if way.startswith("tiled") and not reason else f"{way}: {reason}"


HEADER = """# Supported models

`tile_model` on the language models of transformers, each built tiny and compared with its untiled self: loss, logits, every
gradient, keys, files; of causal models also generation, checkpointed layers, and LoRA on every linear layer, added before or
after tiling. Written by `python -m tests.models.supported`; do not edit it.

* Loss: `tiled_linear_cross_entropy` where no logits of all tokens are made.
* MLPs: `tiled_mlp` where a probe (or a list) knows the formula, `tiled_experts` where routed experts compute the rows that
  chose them (their routers run through `tile`), `tile` where a module is computed token by token as it is. In training dropout
  between the layers (0 here) leaves an MLP untiled whose layers its decoder layer calls itself.
* Left: what stays as it is, and why. A model may have both.
* Plan: how `plan` knows what a step takes: by formulas; or its layers are measured, where one of each kind runs without
  values; or its whole step is; or why it does not.

"""
COLUMNS = "| Type | Class | Loss | MLPs | Left | Plan |\n| --- | --- | --- | --- | --- | --- |\n"
TITLES = {False: "Causal language models", True: "Images and text, given text"}


def table(found: list[str], images: list[str]) -> str:
    """Return the page of these lines."""
    return HEADER + "\n".join(section(lines, of_images) for lines, of_images in ((found, False), (images, True)))


def section(lines: list[str], images: bool) -> str:
    losses, mlps = counts(lines)
    found = f"Of {len(lines)} types {losses} have their loss tiled and {mlps} MLPs, and `plan` knows {plans(lines)}."
    return f"## {TITLES[images]}\n\n{found}\n\n{COLUMNS}" + "".join(f"{line}\n" for line in lines)


def counts(lines: list[str]) -> tuple[int, int]:
    """How many of the table's lines have a tiled loss, and a tiled MLP."""
    cells = [*map(cells_of, lines)]
    return sum(c[2].startswith(("`tiled_", "tiled_")) for c in cells), sum("`" in c[3] for c in cells)


def plans(lines: list[str]) -> int:
    """How many of the table's lines `plan` reads."""
    return sum(cells_of(line)[-1] in ("formulas", "measured", "whole step") for line in lines)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")]


def table_lines(*, images: bool = False) -> dict[str, str]:
    """The lines of the committed table, by type."""
    text = TABLE.read_text().partition(f"## {TITLES[images]}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return {line.strip("| ").split(" | ")[0].strip(): line for line in lines[1:]}


def main(kinds: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    found: dict[bool, list[str]] = {False: [], True: []}
    for images, mapping in ((False, TEXT), (True, IMAGES)):
        for kind in [kind for kind in kinds or mapping if kind in mapping]:
            row = checked(kind, images=images, saved=not images)
            plan = NOT_TRIED if row.loss == NOT_TRIED else planned(kind, images=images)
            found[images].append(replace(row, plan=plan).line)
            print(found[images][-1], flush=True)
    if not kinds:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(table(found[False], found[True]))


if __name__ == "__main__":
    main(sys.argv[1:])
