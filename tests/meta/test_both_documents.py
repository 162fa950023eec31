"""What documents, notebooks and scripts show runs as it stands, on a CPU, and comes to what they say."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import pytest

from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.documents import EXAMPLES, ROOT, blocks, cells, pages, run, script
from tests.ranks import Ranks
from tests.tiny_model import write_tiny_folder

pytest.importorskip("transformers")
PAGES = [path for path in pages() if blocks(path.read_text(encoding="utf-8"))]
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model, as a user has one."""
    return str(write_tiny_folder(tmp_path_factory.mktemp("example") / "model"))


@pytest.fixture(autouse=True)
def _as_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, and with JAX's usual promotion, which optax relies on."""
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    with jax.numpy_dtype_promotion("standard"):
        yield
    plt.close("all")


@pytest.mark.deep
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_runs(page: Path) -> None:
    run(page, blocks(page.read_text(encoding="utf-8")))


@pytest.mark.deep
def test_a_page_that_does_not_run_is_noticed() -> None:
    parts = ["x = 1", "<!-- not run: wants a GPU -->", "1 / 0", "assert x == 2"]
    page = "# Page\n\n" + "\n\n".join(part if part[0] == "<" else f"```python\n{part}\n```" for part in parts) + "\n"
    assert [code for _, code in blocks(page)] == ["x = 1\n", "assert x == 2\n"]
    with pytest.raises(AssertionError):
        run(ROOT / "page.md", blocks(page))


@pytest.mark.deep
def test_the_notebook_of_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    (notebook,) = (path for path in NOTEBOOKS if "torch" in path.name)
    found = run(notebook, cells(notebook.read_text(encoding="utf-8")))
    assert found["kept"]["tiled"] == [0] * len(found["lengths"])
    for tokens, size in zip(found["lengths"], found["kept"]["plain"], strict=True):
        assert size >= 3 * 4 * tokens * found["inner"]
    for losses in (found["tiled_losses"], found["block_losses"]):
        assert losses == pytest.approx(found["plain_losses"], rel=DEMO_LOSS_RTOL)
    assert shown(notebook) == (numberless(capsys.readouterr().out), len(plt.get_fignums()))


@pytest.mark.deep
def test_the_notebook_of_jax(capsys: pytest.CaptureFixture[str]) -> None:
    (notebook,) = (path for path in NOTEBOOKS if "jax" in path.name)
    found = run(notebook, cells(notebook.read_text(encoding="utf-8")))
    plain, tiled = (found["temporary"][name] for name in ("plain", "tiled"))
    assert tiled[-1] < plain[-1] / 4
    assert plain[-1] - plain[0] > 8 * (tiled[-1] - tiled[0])
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    assert shown(notebook) == (numberless(capsys.readouterr().out), len(plt.get_fignums()))


def numberless(text: str) -> str:
    """What is printed, but for digits, which depend on the machine."""
    return re.sub(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?", "N", text)


def shown(notebook: Path) -> tuple[str, int]:
    """What the committed notebook shows as printed, and its number of pictures."""
    found = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in found for output in cell["outputs"]]
    printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    return numberless(printed), sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.deep
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_a_notebook_is_committed_with_its_outputs(notebook: Path) -> None:
    found = json.loads(notebook.read_text(encoding="utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.get("name") == "stderr" for cell in code for output in cell["outputs"])
    assert shown(notebook)[1] >= 2
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])


@pytest.mark.deep
def test_trainer(model: str) -> None:
    before, after = script("trainer_torch").main(["--model", model, "--tokens", "32", "--steps", "2"])
    assert after < before


@pytest.mark.deep
def test_policy_gradients_agree_in_their_first_step_and_then_improve() -> None:
    """The ratio is 1 at first, so that the objective is the mean advantage of as many tokens of either sign: 0."""
    for stem in ("policy_gradient_torch", "policy_gradient_jax"):
        first, second = script(stem).main(["--tokens", "32"])
        assert first == pytest.approx(0, abs=DEMO_LOSS_RTOL)
        assert second < first


@pytest.mark.deep
def test_preferences_improve() -> None:
    """The policy is the reference at first, so that DPO begins at log 2."""
    for stem in ("preference_torch", "preference_jax"):
        first, second = script(stem).main(["--tokens", "32"])
        assert first == pytest.approx(math.log(2), rel=DEMO_LOSS_RTOL)
        assert second < first


@pytest.mark.deep
def test_a_student_learns_from_its_teacher() -> None:
    for stem in ("distillation_torch", "distillation_jax"):
        for kind in ("forward_kl", "jsd"):
            losses = script(stem).main(["--tokens", "32", "--kind", kind])
            assert losses == sorted(losses, reverse=True)


@pytest.mark.deep
def test_the_entropy_of_a_completion_leaves_out_the_prompt() -> None:
    """Its rows have entropies, but no log-probabilities."""
    page = ROOT / "docs/recipes/reinforcement_learning.md"
    found = run(page, blocks(page.read_text(encoding="utf-8"))[:2])
    result, counted = found["result"], found["counted"].numpy()
    entropies = result.entropy.detach().numpy()
    assert not result.log_probs.detach().numpy()[~counted].any()
    assert entropies.min() > 0
    assert found["entropy"].item() == pytest.approx(entropies[counted].mean(), rel=DEMO_LOSS_RTOL)


@pytest.mark.deep
@pytest.mark.ranks
def test_a_long_context_on_two_ranks_is_that_of_one(pools: dict[int, Ranks], model: str) -> None:
    one, two = (pools[count].run("tests.meta.ranks_torch_examples:long_context", model=model) for count in (1, 2))
    assert two[0] == two[1]
    assert two[0] == pytest.approx(one[0], rel=DEMO_LOSS_RTOL)
    assert one[0][1] < one[0][0]


@pytest.mark.deep
def test_a_long_context_in_jax(model: str) -> None:
    first, second = script("long_context_jax").main(["--model", model, "--tokens", "64", "--devices", "2"])
    assert second < first
