"""Tests of clients that report no number of examples: attacks estimate it from the update and say so in their results."""

import json
from typing import Any

import pytest
import torch
from changed_replies import rewrite
from flwr.app import RecordDict

from attacker.attacks import AttackSpec
from attacker.reconstruction import Reconstruction
from attacker.replay.example_counts import add_estimate, estimate_examples
from attacker.replay.replay import Replay
from fedsim import models
from fedsim.recording import DataSpec, Training

RATE = 0.05


def report_nothing(content: RecordDict) -> None:
    """Make a client report the weight 0.5, which is not a number of examples."""
    content["metrics"]["num-examples"] = 0.5


@pytest.mark.parametrize(
    ("count", "training"),
    [
        (1, {"batch_size": 8, "steps": 1}),
        (4, {"batch_size": 8, "steps": 1}),
        (3, {"batch_size": 1, "epochs": 1}),
        (5, {"batch_size": 2, "epochs": 1, "momentum": 0.9}),
    ],
)
def test_the_rank_of_a_linear_layer_counts_examples(app: Any, count: int, training: dict[str, Any]) -> None:
    stated = Training(learning_rate=RATE, mode="train", **training)
    client = {"batch_size": stated.batch_size, "limit": count, "momentum": stated.momentum, "mods": [rewrite(report_nothing)]}
    app.run(app.record(training=stated), rounds=1, **client)
    for observation in app.observations():
        assert observation.num_examples is None
        found = estimate_examples(observation)
        assert (found.examples, "by the rank of fc1" in found.words) == (count, True), found.words


def test_one_step_on_one_example_needs_no_estimate(app: Any) -> None:
    app.run(app.record(), rounds=1, mods=[rewrite(report_nothing)])
    (observation, *_) = app.observations()
    assert add_estimate(observation)[0].num_examples == 1
    assert "is prescribed" in add_estimate(observation)[1]


def test_results_use_an_estimate_and_name_it(app: Any) -> None:
    training = Training(learning_rate=RATE, batch_size=8, steps=1, mode="train")
    app.run(app.record(training=training), rounds=1, batch_size=8, limit=3, mods=[rewrite(report_nothing)])
    spec = AttackSpec(name="inverting_gradients", arguments={"steps": 2})
    replay = Replay(recording=app.recording, spec=spec, out=app.folder / "reconstructions")
    assert (replay.run().done, replay.run().skipped) == (3, 3)
    for path in replay.folder.glob("*.safetensors"):
        found = Reconstruction.read(path)
        assert len(found.x) == 3
        assert any(note.startswith("3 examples are estimated") and "training.examples" in note for note in found.notes)
    metadata = json.loads((replay.folder / "attack.json").read_text())
    assert {case["num_examples"] for case in metadata["cases"]} == {3}


@pytest.mark.parametrize("attack", ["inverting_gradients", "agic"])
def test_a_null_uses_the_prescribed_number_of_examples(app: Any, attack: str) -> None:
    """A null, the baseline that must not use the update, may not use an estimate from it either."""
    training = Training(learning_rate=RATE, batch_size=8, steps=1, mode="train")
    app.run(app.record(training=training), rounds=1, batch_size=8, limit=3, mods=[rewrite(report_nothing)])
    sizes = {}
    for null in (False, True):
        spec = AttackSpec(name=attack, arguments={"steps": 2}, null=null)
        replay = Replay(recording=app.recording, spec=spec, out=app.folder / "reconstructions")
        replay.run()
        sizes[null] = {len(Reconstruction.read(path).x) for path in replay.folder.glob("*.safetensors")}
    assert sizes == {False: {3}, True: {8}}


def test_dropout_of_any_kind_is_listed_as_not_simulated(app: Any) -> None:
    """Dropout as a function is found like a module. In evaluation mode, only one that ignores the mode counts."""

    class Functional(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(super().forward(x.flatten(1)), training=self.training)

    class Always(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(super().forward(x.flatten(1)))

    data, training = DataSpec(shape=(1, 2, 2), num_classes=3), Training(learning_rate=RATE, batch_size=1, steps=1, mode="train")
    networks = {"functional": Functional(4, 3), "module": torch.nn.Dropout(0.5), "none": torch.nn.Flatten()}
    networks["always"] = Always(4, 3)
    drawn = {name: bool(models.list_unsimulated(network, training, data)) for name, network in networks.items()}
    assert drawn == {"functional": True, "module": True, "none": False, "always": True}
    still = Training(learning_rate=RATE, batch_size=1, steps=1, mode="eval")
    assert [name for name, network in networks.items() if models.list_unsimulated(network, still, data)] == ["always"]


@pytest.mark.parametrize("net", ["Net", "DroppingNet"])
def test_a_limit_of_the_network_is_written_with_the_results(app: Any, net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class DroppingNet(app.task.Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(torch.nn.functional.dropout(x, 0.1, training=self.training))
            return found

    monkeypatch.setattr(app.task, "DroppingNet", DroppingNet, raising=False)
    app.run(app.record(net=net, training=Training(learning_rate=RATE, batch_size=1, steps=1, mode="train")), net=net, rounds=1)
    replay = Replay(
        recording=app.recording,
        spec=AttackSpec(name="inverting_gradients", arguments={"steps": 1}),
        out=app.folder / "reconstructions",
    )
    replay.run()
    limits = json.loads((replay.folder / "attack.json").read_text())["run"]["limits"]
    assert [("dropout" in limit) for limit in limits] == [True] * (net == "DroppingNet")
