"""Tests that an attack on a secure sum is scored against the examples of all clients in the sum."""

from pathlib import Path

import pytest
import torch
from tiny_experiments import Federate

from attacker.attacks import AttackSpec, Case
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.simulation.gradients import build_gradient
from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from attacker.scoring.oracle import read_true_labels
from attacker.scoring.truth.originals import CaseObservation
from fedsim import models
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.training.local import train
from fedsim.truth import TruthReader

SETTINGS = {"clients": {"count": 3}, "rounds": 2, "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1}}


@pytest.fixture
def run(federate: Federate) -> FederationRun:
    return federate(**SETTINGS)


def test_every_example_of_the_clients_in_a_sum_has_a_row(run: FederationRun) -> None:
    recording = Recording(run.out / "recording")
    spec = AttackSpec(name="dlg", arguments={"steps": 3, "restarts": 1})
    done = Replay(recording=recording, spec=spec, out=run.out / "reconstructions").run()
    assert (done.done, done.failed) == (2, {})
    rows = Scorer(run.out, [run.out / "truth"]).score(done.folder)
    truth = TruthReader(run.out / "truth")
    for number in (1, 2):
        cohort = recording.list_summed(number)
        used = [truth.read_used(number, 1, client).steps[0][0] for client in cohort]
        own = [row for row in rows if row.rounds == (number,)]
        assert [row.client for row in own] == ["sum"] * 3
        assert [(row.batch, row.position, row.index) for row in own] == [(b, 0, i) for b, i in enumerate(used, start=1)]
        assert all(row.psnr is not None for row in own)
        assert len({row.case for row in own}) == 1
    assert {row.secure_aggregation["threshold"] for row in rows} == {2}


def test_the_sum_of_single_steps_is_the_step_on_everyones_examples(run: FederationRun) -> None:
    """Attacks on a sum rely on this: it is the update of one batch with all clients' examples."""
    observation = next(Recording(run.out / "recording").read_observations())
    scorer = Scorer(run.out, [run.out / "truth"])
    _, x, y = scorer.truth.read_originals([CaseObservation(1, 1, observation.cohort)])
    assert observation.num_examples == len(y) == 3
    network = models.build(observation.model, observation.data)
    update = train(network, dict(observation.weights), [(x, y)], observation.training, observation.data).update
    for name, expected in update.items():
        assert torch.allclose(observation.update[name], expected, atol=1e-6)


def test_the_label_oracle_knows_everyones_labels(federate: Federate, tmp_path: Path) -> None:
    run = federate("epochs", clients={"count": 3}, rounds=1, training={"learning_rate": 0.1, "batch_size": 64, "epochs": 2})
    recording, scorer = Recording(run.out / "recording"), Scorer(run.out, [run.out / "truth"])
    row = next(row for row in recording.read_rows() if row.client == "sum")
    known = read_true_labels(scorer, row, recording.list_summed(1))
    _, _, labels = scorer.truth.read_originals([CaseObservation(1, 1, recording.list_summed(1))])
    assert known.tolist() == sorted(labels.tolist())
    assert len(known) == row.num_examples


def test_the_number_of_steps_of_a_sum_is_that_of_each_client(federate: Federate) -> None:
    """Each client takes one step on one batch. Three steps for three clients would divide the gradient by three."""
    training = {"learning_rate": 0.1, "batch_size": 600, "epochs": 1}
    run = federate("epochs", clients={"count": 3}, rounds=1, training=training)
    observation = next(Recording(run.out / "recording").read_observations())
    assert (observation.num_examples or 0) > 600
    attack = AttackSpec(name="dlg").build()
    assert isinstance(attack, GradientMatching)
    (search,) = CaseBatch(attack, [Case((observation,))]).views
    assert (search.sizes, search.steps) == ((observation.num_examples,), 1)
    _, x, y = Scorer(run.out, [run.out / "truth"]).truth.read_originals([CaseObservation(1, 1, observation.cohort)])
    network = models.build(observation.model, observation.data)
    gradient = build_gradient(network, observation.data)(observation.weights, x, y)
    for name, expected in gradient.items():
        assert torch.allclose(search.gradients[name][0], expected, atol=1e-5)
