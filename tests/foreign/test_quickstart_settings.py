"""Tests of the quickstart app with the settings of Flower's template: ten clients, batches of 32, momentum 0.9, one epoch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg

from attacker.attacks import AttackSpec
from attacker.attacks.simulation.client import build_network, convert_to_gradient, find_schedule
from attacker.attacks.simulation.gradients import build_gradient
from attacker.attacks.simulation.local_steps import build_stepped_gradient
from attacker.reconstruction import Reconstruction
from attacker.replay.replay import Replay
from fedsim.recording import Training

CLIENTS, RATE = 10, 0.05
TEMPLATE = Training(learning_rate=RATE, batch_size=32, epochs=1, momentum=0.9, mode="train")
ONE_STEP = Training(learning_rate=RATE, batch_size=1, steps=1, momentum=0.9, mode="train")


def run(app: Any, training: Training, **client: Any) -> list[Any]:
    """Run one round and return its observations."""
    app.run(app.record(FedAvg(fraction_evaluate=0.0), training=training), clients=CLIENTS, rounds=1, momentum=0.9, **client)
    return list(app.recording.read_observations())


def test_an_epoch_with_momentum_is_simulated_step_by_step(app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the true examples in their order, simulated steps give the observed update; one step on all examples is far from it.

    Each client has 72 examples, two full batches and a short one, which the app reads from a file.
    """
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (900, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 900)
    np.savez(tmp_path / "examples.npz", images=pixels, labels=labels)
    monkeypatch.setenv("QUICKSTART_DATA", str(tmp_path / "examples.npz"))
    for observation in run(app, TEMPLATE, batch_size=32, limit=None)[:1]:
        sizes, steps = find_schedule(observation)
        model = build_network(observation)
        weights = dict(observation.weights)
        observed = convert_to_gradient(observation.update, weights, observation.training, steps)
        one = build_gradient(model, observation.data)
        errors = []
        for client in range(CLIENTS):
            x, y = app.example(client, CLIENTS, limit=None)
            guesses = build_stepped_gradient(one, observation.training, sizes)(weights, x, y), one(weights, x, y)
            errors.append([measure_relative_error(guess, observed) for guess in guesses])
        simulated, together = min(errors)
        assert (sizes, steps) == ((32, 32, 8), 3)
        assert simulated < 1e-2 * together < 1e-2


def measure_relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    off = torch.cat([(found[name] - g).flatten() for name, g in expected.items()]).norm()
    return float(off / torch.cat([g.flatten() for g in expected.values()]).norm())


def test_one_step_on_one_example_is_one_image_whatever_the_client_reports(app: Any) -> None:
    """Clients report the size of their whole data set, but the attack searches for one image and finds its label."""
    observations = run(app, ONE_STEP, batch_size=1, limit=None, steps=1)
    assert all(row.reported is not None and row.reported > 1 for row in app.recording.read_rows())
    assert [o.num_examples for o in observations] == [1] * CLIENTS
    spec = AttackSpec(name="inverting_gradients", arguments={"steps": 3})
    clients = frozenset(o.client for o in observations[:2])
    replayed = Replay(recording=app.recording, spec=spec, out=app.folder / "reconstructions", clients=clients).run()
    assert replayed.done == 2
    labels = {int(app.example(client, CLIENTS, limit=1)[1]) for client in range(CLIENTS)}
    for path in replayed.folder.glob("*.safetensors"):
        found = Reconstruction.read(path)
        assert (len(found.x), set(found.y.tolist()) <= labels) == (1, True)
