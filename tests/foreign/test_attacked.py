"""Tests of attacks on recordings of third-party apps: the simulated gradient is the observed one, and searches make progress."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import join_lines, run_attacker
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from attacker.attacks import AttackSpec, Case
from attacker.attacks.simulation.client import build_network, convert_to_gradient, get_buffers
from attacker.attacks.simulation.gradients import build_gradient
from attacker.reconstruction import Reconstruction
from attacker.replay.replay import Replay
from fedsim.client import update_mod
from fedsim.models import building
from fedsim.recording import Observation, Training

QUICKSTART = Path(__file__).with_name("quickstart")
MODS: dict[str, tuple[Any, ...]] = {"weights": (), "mod": (update_mod(),)}
ATTACK = {"signed": False, "tv": 0.03, "steps": 12}


def compare_gradients(o: Observation, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient at an example as attacks compute it, and the observed one, each as one vector."""
    network = build_network(o)
    buffers, _ = get_buffers(network, [o])
    names = [name for name, _ in network.named_parameters()]
    weights = {name: o.weights[name] for name in names}
    guessed = build_gradient(network, o.data)(weights, x, y, buffers)
    observed = convert_to_gradient({name: o.update[name] for name in names}, weights, o.training, 1)
    return torch.cat([guessed[n].flatten() for n in names]), torch.cat([observed[n].flatten() for n in names])


@pytest.mark.parametrize("wire", MODS)
def test_at_the_true_example_the_simulated_gradient_is_the_observed_one(app: Any, wire: str) -> None:
    """The two differ by rounding of float32 weights only, whereas the gradient at an inverted image is far off."""
    app.run(app.record(), rounds=1, mods=MODS[wire])
    for o in app.observations():
        x, y = app.example(app.matched(o)[0])
        guessed, observed = compare_gradients(o, x, y)
        assert (guessed - observed).norm() < 1e-4 * observed.norm()
        wrong, _ = compare_gradients(o, 1 - x, y)
        assert (wrong - observed).norm() > 0.1 * observed.norm()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_network_with_batch_norm_is_simulated_in_either_mode(app: Any, mode: str) -> None:
    """The recorded training mode decides between statistics of the batch and those that the server sent."""
    training = Training(learning_rate=0.05, batch_size=1, steps=1, mode=mode, buffers="shared")
    app.run(app.record(net="NormedNet", training=training), net="NormedNet", mode=mode == "train")
    for o in app.observations(rounds=[2] if mode == "train" else [1]):
        client, _ = app.matched(o, net="NormedNet", mode=mode == "train")
        guessed, observed = compare_gradients(o, *app.example(client))
        assert (guessed - observed).norm() < 1e-3 * observed.norm()


@pytest.mark.parametrize("wire", MODS)
@pytest.mark.parametrize(
    "attack", [AttackSpec(name="inverting_gradients", arguments=ATTACK), AttackSpec(name="cpl", arguments={"steps": 3})]
)
def test_a_few_steps_lower_the_loss_and_find_the_label(app: Any, wire: str, attack: AttackSpec) -> None:
    app.run(app.record(), rounds=1, mods=MODS[wire])
    cases = [Case((o,)) for o in app.observations()]
    found = attack.build()(cases, rng=torch.Generator().manual_seed(0))
    for case, one in zip(cases, found, strict=True):
        _, y = app.example(app.matched(case.observations[0])[0])
        assert one.y.tolist() == y.tolist()
        assert float(one.loss[-1]) < 0.9 * float(one.loss[0])


def test_a_second_replay_of_a_third_partys_recording_skips_finished_cases(app: Any) -> None:
    app.run(app.record(FedAvg(fraction_evaluate=0.0)), rounds=2)
    spec = AttackSpec(name="inverting_gradients", arguments={**ATTACK, "steps": 2})
    replay = Replay(recording=app.recording, spec=spec, out=app.folder / "reconstructions", rounds=frozenset({2}))
    assert (replay.run().done, replay.run().skipped) == (3, 3)
    for path in replay.folder.glob("*.safetensors"):
        assert Reconstruction.read(path).x.shape == (1, 3, 32, 32)


def test_the_command_line_imports_the_network_only_if_the_option_model_names_it(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs in the app's folder, and its modules have not been imported before."""
    app.run(app.record(), rounds=1, mods=MODS["mod"])
    monkeypatch.setattr(building, "_ADMITTED", {})
    monkeypatch.delenv("FEDLEAK_CODE")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(QUICKSTART)])
    monkeypatch.delitem(sys.modules, "task")
    monkeypatch.chdir(QUICKSTART)
    call = ["replay", str(app.folder), "--attack", "cpl", "--set", "steps=1", "--no-null", "--device", "cpu", "--json"]
    refused = run_attacker(*call)
    assert refused.exit_code == 2
    output = join_lines(refused.stderr)
    assert "imported only with your permission: if you trust it, repeat the command with --model task:Net" in output
    assert "task" not in sys.modules
    done = run_attacker(*call, "--model", "task:Net")
    assert done.exit_code == 0, done.stderr
    assert [part["done"] for part in json.loads(done.stdout)] == [3]


def test_without_truth_there_are_no_scores_but_a_report_with_images(app: Any) -> None:
    app.run(app.record(), rounds=1)
    Replay(
        recording=app.recording,
        spec=AttackSpec(name="inverting_gradients", arguments={**ATTACK, "steps": 2}),
        out=app.folder / "reconstructions",
    ).run()
    unscored = run_attacker("score", app.folder)
    assert unscored.exit_code == 2
    assert "has no folder truth" in join_lines(unscored.stderr)
    shown = run_attacker("report", app.folder)
    assert shown.exit_code == 0, shown.stderr
    assert (app.folder / "report.html").read_text().count("data:image/png") >= 3
