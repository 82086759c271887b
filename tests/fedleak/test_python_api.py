"""Tests of the Python API: the documented example, attacks in memory, and attacks on a recording."""

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedleak
from fedsim.data import load as load_data

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The variables of the package docstring's example after it was executed unchanged."""
    (test,) = [one for one in doctest.DocTestFinder(recurse=False).find(fedleak, "fedleak") if one.examples]
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for step in test.examples:
        exec(step.source, names)
    return names


def test_the_documented_example_recovers_the_digit(example: dict[str, Any]) -> None:
    (row,) = example["scores"].rows
    assert (row.success, row.label_success, row.label_true) == (True, True, 0)
    assert row.psnr > 25
    assert isinstance(example["figure"], Figure)
    assert len(example["figure"].axes) == 2


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_search_for_an_update_of_a_network_in_another_precision_computes_in_float32(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(1, 1, 6, 6), torch.tensor([2])
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Sigmoid(), nn.Linear(16, 4)).to(kind)
    loss = nn.CrossEntropyLoss()
    gradient = torch.autograd.grad(loss(model(x.to(kind)), y), model.parameters())
    observation = fedleak.observe(model, loss, gradient, shape=(1, 6, 6))
    assert observation.training.precision == {torch.float16: "float16", torch.bfloat16: "bfloat16"}.get(kind, "float32")
    result = fedleak.attack(observation, "cpl", steps=60)
    (row,) = fedleak.score(result, x, y).rows
    assert row.success, row.psnr
    assert next(model.parameters()).dtype == kind, "the user's model stays as it is"


def test_results_are_short_in_a_terminal_and_pictures_in_a_notebook(example: dict[str, Any]) -> None:
    for shown in (example["result"], example["scores"]):
        assert len(repr(shown)) < 200
        assert shown._repr_png_().startswith(PNG)
        assert '<img src="data:image/png;base64,' in shown._repr_html_()
        assert "<AttackResult" not in shown._repr_html_()


def test_results_can_be_converted_to_pandas(example: dict[str, Any]) -> None:
    result, scores = example["result"].to_pandas(), example["scores"].to_pandas()
    assert result[["example", "label"]].values.tolist() == [[0, 0]]
    assert 0 <= result["confidence"].item() <= 1
    assert scores["psnr"].item() == example["scores"].rows[0].psnr
    assert scores["success"].tolist() == [True]


def test_missing_packages_are_named_with_advice(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for shown in (example["result"], example["scores"]):
        with pytest.raises(ImportError, match="pip install pandas"):
            shown.to_pandas()
        with pytest.raises(ImportError, match="pip install matplotlib"):
            shown.plot()


def test_import_is_lazy() -> None:
    code = "import sys, fedleak; assert not {'torch', 'attacker'} & sys.modules.keys(); assert 'attack' in dir(fedleak)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="observe"):
        _ = fedleak.obsrve


class Odd(nn.Module):
    """A user's network with batch norm and a buffer that is not part of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.top = nn.Linear(4 * 64, 3)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.sigmoid(self.norm(self.stem(x)) * self.scale).flatten(1))


def observe_gradient(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Any:
    loss = nn.CrossEntropyLoss(reduction=options.pop("reduction", "mean"))
    gradient = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    return fedleak.observe(model, loss, gradient, shape=x.shape[1:], num_examples=len(x), **options)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    x, y = load_data("digits").train[[0, 1, 2]]
    return x, y % 3


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_simulating_the_client_of_an_observation_gives_its_gradient(batch: tuple[Tensor, Tensor], mode: str) -> None:
    from attacker.attacks.simulation.client import build_network, get_buffers
    from attacker.attacks.simulation.gradients import build_gradient

    torch.manual_seed(0)
    model = Odd().train(mode == "train")
    observation = observe_gradient(model, *batch)
    network = build_network(observation)
    buffers, _ = get_buffers(network, [observation])
    simulated = build_gradient(network, observation.data)(observation.weights, *batch, buffers)
    for name, update in observation.update.items():
        torch.testing.assert_close(-update, simulated[name], rtol=1e-4, atol=1e-6)
    assert set(observation.update) == dict(model.named_parameters()).keys()
    assert observation.data.num_classes == 3


def test_model_and_gradient_are_copies(batch: tuple[Tensor, Tensor]) -> None:
    model = Odd().eval()
    observation = observe_gradient(model, *batch)
    before = {name: w.clone() for name, w in observation.weights.items()}
    with torch.no_grad():
        for w in model.parameters():
            w.zero_()
    assert all(torch.equal(w, before[name]) for name, w in observation.weights.items())
    assert all(p.grad is None for p in observation.model.module.parameters())


def test_a_sum_over_the_batch_is_observed_as_its_mean(batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = Odd().eval()
    mean, total = observe_gradient(model, *batch), observe_gradient(model, *batch, reduction="sum")
    for name, update in mean.update.items():
        torch.testing.assert_close(total.update[name], update, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": nn.MSELoss()}, "loss must be"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "label_smoothing=0.1"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, "reduction=.none.*use .mean. or .sum."),
        ({"gradient": [torch.zeros(3)]}, "1 tensors, and the model has 2"),
        ({"gradient": [torch.zeros(3, 64), None]}, "if the loss does not depend on it, give zeros"),
        ({"gradient": [torch.zeros(3, 64), torch.zeros(4)]}, r"1.bias has shape \(4,\)"),
        ({"gradient": [torch.zeros(3, 64), torch.full((3,), torch.nan)]}, "NaN or infinity"),
        ({"gradient": {"weight": torch.zeros(3)}}, "different names"),
        ({"shape": (1, 9, 9)}, r"fails on an input of shape \(1, 1, 9, 9\)"),
        ({"num_examples": 0}, "num_examples"),
    ],
)
def test_arguments_that_contradict_the_model_are_refused(change: dict[str, Any], words: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    given: dict[str, Any] = {"loss": "cross_entropy", "gradient": [torch.zeros(3, 64), torch.zeros(3)], "shape": (1, 8, 8)}
    with pytest.raises(ValueError, match=words):
        fedleak.observe(model, **{**given, **change})


def test_the_null_of_an_observation_never_sees_the_gradient(batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    first, second = observe_gradient(model, *batch), observe_gradient(model, batch[0].flip(-1), batch[1])
    one, other = (fedleak.attack(seen, "dlg", null=True, steps=3) for seen in (first, second))
    assert torch.equal(one.x, other.x)
    scored = fedleak.score(one, *batch)
    assert all(row.null for row in scored.rows)
    assert len(scored.rows) == 3


def test_an_attack_that_cannot_be_used_says_why(batch: tuple[Tensor, Tensor]) -> None:
    observation = observe_gradient(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), *batch)
    with pytest.raises(ValueError, match="the attack idlg cannot be used on these observations: it works for one example only"):
        fedleak.attack(observation, "idlg")
    with pytest.raises(ValueError, match="unknown name 'cpll'"):
        fedleak.attack(observation, "cpll")
    with pytest.raises(ValueError, match="give x and y"):
        fedleak.score(fedleak.attack(observation, "dlg", steps=1))
    with pytest.raises(ValueError, match="got values from 0 to 255; divide 8-bit images by 255"):
        fedleak.score(fedleak.attack(observation, "dlg", steps=1), 255 * (batch[0] > 0.5), batch[1])


EXPERIMENT = {
    "rounds": 1,
    "model": {"name": "mlp", "hidden": [8]},
    "data": "digits",
    "clients": {"count": 3},
    "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
}


def test_an_unknown_engine_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown engine 'foo'; write one of ray, local, deployment"):
        fedleak.run(EXPERIMENT, tmp_path / "run", engine="foo")


def test_a_federation_is_run_attacked_scored_and_reported_from_python(tmp_path: Path) -> None:
    recording = fedleak.run(EXPERIMENT, tmp_path / "run", client_seed=1)
    result = fedleak.attack(recording, "exact", route="layers")
    assert (len(result.reconstructions), result.x.shape, len(result.y)) == (3, (3, 1, 8, 8), 3)
    fedleak.attack(recording, "exact", null=True, route="layers")
    table = fedleak.score(fedleak.load(tmp_path / "run"))
    (summary,) = table.summaries
    assert summary.success.value == 1
    assert "recovered" in repr(table)
    assert len(table.plot().axes) == 6
    table.to_csv(tmp_path / "rows.csv")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(table.rows)
    assert {row.null for row in fedleak.score(result).rows} == {False}
    assert fedleak.report(recording).read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match="x and y must be left out for a recording"):
        fedleak.score(recording, torch.zeros(1), torch.zeros(1))
