"""Tests of the audit's checks of buffers that clients send: batch-norm statistics, label histograms, and others."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federations import federate
from torch import Tensor, nn

from attacker.audit import Finding, PassedCheck
from attacker.audit.findings import CheckResult
from attacker.audit.setting_checks import BUFFERS_RULE, STATISTICS_RULE, check_settings
from fedsim import models
from fedsim.recording import ModelSpec, Recording

MODEL = f"{__name__}:Counting"
START = {
    "norm.running_mean": torch.zeros(4),
    "norm.running_var": torch.ones(4),
    "own.running_mean": torch.zeros(3),
    "seen": torch.full((10,), 0.4),
    "temperature": torch.tensor(1.5),
}
COUNTS = torch.tensor([3.0, 0, 0, 1, 0, 0, 0, 0, 0, 0])


class Own(nn.Module):
    """A module that is no batch norm, with a buffer of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Counting(nn.Sequential):
    """A network with a batch norm layer and buffers of its own."""

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        size = torch.Size(shape).numel()
        self.add_module("flat", nn.Flatten())
        self.add_module("hidden", nn.Linear(size, 4))
        self.add_module("norm", nn.BatchNorm1d(4))
        self.add_module("own", Own())
        self.add_module("head", nn.Linear(4, num_classes))
        self.register_buffer("seen", torch.zeros(num_classes))
        self.register_buffer("temperature", torch.tensor(1.5))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(federate(tmp_path_factory.mktemp("runs") / "buffers", batch_size=4) / "recording")


@pytest.fixture
def foreign(recording: Recording, tmp_path: Path) -> Recording:
    """The recording as that of an app which records itself: without an experiment."""
    (tmp_path / "recording").symlink_to(recording.folder)
    return Recording(tmp_path / "recording")


def check(recording: Recording, changes: Mapping[str, Tensor], *, built: bool = True) -> dict[str, CheckResult]:
    """Return the results on buffers by rule, if the second client's buffers change by `changes` and the first one's do not."""
    if built:
        models.admit(MODEL)
    model = ModelSpec(name=MODEL if built else "unknown.module:network")
    first, second = (recording.read_observation(row) for row in recording.read_rows())
    after = {name: tensor + changes.get(name, 0) for name, tensor in START.items()}
    observations = [
        replace(first, model=model, buffers=START, buffers_after=START),
        replace(second, model=model, buffers=START, buffers_after=after),
    ]
    results = list(check_settings(recording, observations))
    return {one.rule: one for one in results if one.rule in (STATISTICS_RULE, BUFFERS_RULE)}


def test_buffers_that_never_change_are_no_finding(recording: Recording) -> None:
    assert all(isinstance(one, PassedCheck) for one in check(recording, {}).values())


@pytest.mark.parametrize("built", [True, False])
def test_batch_norm_statistics_are_named_without_other_buffers(recording: Recording, built: bool) -> None:
    found = check(recording, {"norm.running_mean": torch.ones(4)}, built=built)
    statistics = found[STATISTICS_RULE]
    assert isinstance(statistics, Finding)
    assert statistics.evidence.startswith("1 of 2 updates come with changed values of 1 buffer (norm.running_mean)")
    assert isinstance(found[BUFFERS_RULE], PassedCheck)


def test_other_buffers_that_change_are_no_batch_norm_statistics(recording: Recording) -> None:
    found = check(recording, {"temperature": torch.tensor(0.1), "own.running_mean": torch.ones(3)})
    assert isinstance(found[STATISTICS_RULE], PassedCheck)
    other = found[BUFFERS_RULE]
    assert isinstance(other, Finding)
    assert other.grade == "low"
    assert "(own.running_mean, temperature)" in other.evidence


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_a_label_histogram_is_named(recording: Recording, rounding: float) -> None:
    other = check(recording, {"seen": COUNTS + rounding})[BUFFERS_RULE]
    assert isinstance(other, Finding)
    assert other.grade == "moderate"
    assert "The change of seen is the label histogram in 1 of 2 updates" in other.evidence
    assert "from label 0 on: 3, 0, 0, 1, 0, 0, 0, 0, 0, 0." in other.evidence


@pytest.mark.parametrize("change", [COUNTS + 0.1, 2 * COUNTS, COUNTS - torch.eye(10)[2] + torch.eye(10)[4]])
def test_other_changes_of_a_vector_are_no_histogram(recording: Recording, change: Tensor) -> None:
    """These are fractions, a wrong sum of examples, and a negative number."""
    other = check(recording, {"seen": change})[BUFFERS_RULE]
    assert isinstance(other, Finding)
    assert (other.grade, "histogram" in other.evidence) == ("low", False)


def test_advice_suits_who_made_the_recording(recording: Recording, foreign: Recording) -> None:
    own, app = (check(one, {"norm.running_mean": torch.ones(4)})[STATISTICS_RULE] for one in (recording, foreign))
    assert isinstance(own, Finding)
    assert isinstance(app, Finding)
    assert "training.buffers" in own.advice
    assert "training" not in app.advice
    assert "parameters only (net.named_parameters()) and not the whole state_dict" in app.advice


def test_a_buffer_that_the_server_did_not_send_counts_as_changed(recording: Recording) -> None:
    first = recording.read_observation(recording.read_rows()[0])
    results = list(check_settings(recording, [replace(first, buffers_after={"seen": COUNTS})]))
    assert [one.rule for one in results if isinstance(one, Finding)] == [BUFFERS_RULE]
