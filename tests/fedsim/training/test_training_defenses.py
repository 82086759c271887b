"""Tests of clients with a gradient rule, a defended network or mixed examples: their updates and what is recorded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generators import seed_default
from tiny_experiments import Federate, make_tiny
from torch import Tensor, nn
from torch.func import functional_call

from attacker.replay.metadata import describe_run
from defenses.gradients import GradientSpec
from defenses.networks import take_penalty
from fedsim import models
from fedsim.engine.run import FederationRun
from fedsim.recording import DataSpec, ModelSpec, Recording, Training
from fedsim.training.local import evaluate, train
from fedsim.truth import TruthReader

DATA = DataSpec(shape=(1, 6, 6), num_classes=3, mean=(0.4,), std=(0.5,))
ONE_STEP = Training(learning_rate=0.1, batch_size=4, steps=1)


def make_setting(network: str = "") -> tuple[nn.Module, dict[str, Tensor], tuple[Tensor, Tensor]]:
    model = models.build(ModelSpec(name="mlp", arguments={"hidden": [5]}, network=network), DATA, seed=1)
    rng = torch.Generator().manual_seed(0)
    batch = torch.rand(4, 1, 6, 6, generator=rng), torch.randint(3, (4,), generator=rng)
    return model, {name: p.detach() for name, p in model.named_parameters()}, batch


def trained(network: str, gradient: str, seed: int = 0, mode: str = "eval", **changes: Any) -> dict[str, Tensor]:
    model, weights, batch = make_setting(network)
    training = Training(learning_rate=0.1, batch_size=4, steps=1, mode=mode, **changes)
    with seed_default(seed):
        rule, rng = GradientSpec.parse(gradient).build(), torch.Generator().manual_seed(seed)
        return train(model, weights, [batch], training, DATA, rule=rule, rng=rng).update


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_rule_plain_gives_the_update_without_a_rule_bit_for_bit() -> None:
    model, weights, batch = make_setting()
    assert same(train(model, weights, [batch], ONE_STEP, DATA).update, trained("", "plain"))


def test_noise_requires_a_generator() -> None:
    model, weights, batch = make_setting()
    with pytest.raises(ValueError, match="give rng"):
        train(model, weights, [batch], ONE_STEP, DATA, rule=GradientSpec.parse("dp_sgd").build())
    assert same(trained("", "dp_sgd", seed=1), trained("", "dp_sgd", seed=1))
    assert not same(trained("", "dp_sgd", seed=1), trained("", "dp_sgd", seed=2))


@pytest.mark.parametrize("network", ["precode(3)", "dropout(0.5)"])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_random_block_draws_in_training_in_both_modes_and_not_in_evaluation(network: str, mode: str) -> None:
    assert same(trained(network, "plain", 1, mode), trained(network, "plain", 1, mode))
    assert not same(trained(network, "plain", 1, mode), trained(network, "plain", 2, mode))
    model, weights, (x, y) = make_setting(network)
    results = []
    for seed in (1, 2):
        train(model, weights, [(x, y)], ONE_STEP, DATA)
        torch.manual_seed(seed)
        results.append(evaluate(model, weights, x, y, DATA, ONE_STEP))
    assert results[0] == results[1]


def test_precode_trains_on_the_cross_entropy_and_the_divergence() -> None:
    network = "precode(bottleneck=3, beta=0.5)"
    model, weights, (x, y) = make_setting(network)
    model.train()
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    with seed_default(7):
        logits = functional_call(model, leaves, (DATA.normalise(x),))
    penalty = take_penalty(model)
    assert penalty is not None
    loss = nn.functional.cross_entropy(logits, y) + penalty
    gradient = torch.autograd.grad(loss, list(leaves.values()))
    update = trained(network, "plain", seed=7)
    assert all(torch.allclose(update[name], -0.1 * g, atol=1e-7) for name, g in zip(leaves, gradient, strict=True))
    assert not torch.allclose(update["1.weight"], trained(network.replace("0.5", "0"), "plain", seed=7)["1.weight"], rtol=1e-2)


@pytest.mark.parametrize("gradient", ["dp_sgd(0.5, noise=0)", "fed_cdp(0.1, noise=0)"])
@pytest.mark.parametrize("network", ["precode(bottleneck=3, beta=0.5)", "dropout(0.5)"])
def test_per_example_gradients_work_with_random_blocks(gradient: str, network: str) -> None:
    update = trained(network, gradient)
    assert all(u.isfinite().all() for u in update.values())
    assert not same(update, trained(network, gradient, seed=1))


SETTINGS: dict[str, Any] = {
    "rounds": 10,
    "model": {"name": "mlp", "hidden": [32]},
    "training": {"learning_rate": 0.5, "batch_size": 16, "steps": 8},
}
PATIENT = {"learning_rate": 0.1, "batch_size": 16, "steps": 100}
"""Settings for networks that diverge at the learning rate above."""
MILD: list[dict[str, Any]] = [
    {"gradient": "dp_sgd(4, noise=0.2)"},
    {"gradient": "fed_cdp(2, noise=0.5)"},
    {"gradient": "fed_cdp(2, snr_db=0)"},
    {"gradient": "soteria(0.5)"},
    {"network": "precode(bottleneck=32)", "training": PATIENT},
    {"network": "dropout(0.2)"},
    {"inputs": "mixup(0.4)"},
]


def accuracy(run: FederationRun) -> float:
    return float(json.loads((run.out / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"])


@pytest.mark.parametrize(("training", "least"), [({}, 0.9), ({"training": PATIENT}, 0.94)])
def test_the_federation_learns_without_a_defense(federate: Federate, training: dict[str, Any], least: float) -> None:
    assert least < accuracy(federate(**{**SETTINGS, **training})) < least + 0.05


@pytest.mark.parametrize("change", MILD, ids=lambda change: next(iter(change.values())))
def test_a_mild_setting_stays_within_five_points_of_no_defense(federate: Federate, change: dict[str, Any]) -> None:
    least = 0.94 if "training" in change else 0.9
    assert accuracy(federate(**{**SETTINGS, **change})) > least - 0.03


def test_gradient_rule_network_and_inputs_are_recorded(federate: Federate) -> None:
    run = federate(gradient="dp_sgd(2, noise=0.5)", network="precode(3)", inputs="mixup")
    recording = Recording(run.out / "recording")
    facts = describe_run(recording.manifest)
    assert (facts["gradient"], facts["network"], facts["inputs"]) == ("dp_sgd(2, noise=0.5)", "precode(3)", "mixup()")
    for observation in recording.read_observations():
        assert str(observation.gradient) == facts["gradient"]
        assert str(observation.inputs) == facts["inputs"]
        assert observation.model.network == facts["network"]
        shapes = {name: p.shape for name, p in models.build_layout(observation.model, observation.data).named_parameters()}
        assert {name: u.shape for name, u in observation.update.items()} == shapes
        assert any("bottleneck" in name for name in shapes)


def read_updates(run: FederationRun) -> dict[str, Tensor]:
    return {
        o.key: torch.cat([u.flatten() for u in o.update.values()]) for o in Recording(run.out / "recording").read_observations()
    }


def test_noise_differs_between_rounds_and_clients_and_repeats_with_their_seed(federate: Federate) -> None:
    run = federate("a", gradient="dp_sgd(0.001, noise=1000)")  # almost only noise
    found = read_updates(run)
    assert len(found) == 6
    noise = torch.stack(list(found.values()))
    assert float(noise.std()) == pytest.approx(0.5 * 1.0 / 4, rel=0.05)  # learning rate times 1 over a batch of 4
    assert (torch.corrcoef(noise) - torch.eye(6)).abs().max() < 0.25
    again = read_updates(federate("b", gradient="dp_sgd(0.001, noise=1000)"))
    assert all(torch.equal(u, again[key]) for key, u in found.items())


@pytest.fixture
def other_images(tmp_path: Path) -> str:
    """The name of a data set of random images with the shape of digits, for use as public images."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "other.npz", images=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), labels=rng.integers(0, 3, 40))
    return f"npz:{tmp_path / 'other.npz'}"


@pytest.mark.parametrize("inputs", ["mixup(1.0)", "instahide(k=4)", "instahide(k=4, public=STRANGERS)"])
def test_mixed_examples_change_the_update_and_not_the_truth(federate: Federate, other_images: str, inputs: str) -> None:
    plain, mixed = federate("plain"), federate("mixed", inputs=inputs.replace("STRANGERS", repr(other_images)))
    one, other = read_updates(plain), read_updates(mixed)
    assert one.keys() == other.keys()
    assert all(not torch.allclose(one[key], other[key], rtol=0.01) for key in one)
    for o in Recording(plain.out / "recording").read_observations():
        used = [TruthReader(run.out / "truth").read_used(o.round, 1, o.client) for run in (plain, mixed)]
        assert used[0] == used[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient": "soteria(layer='9')"}, "'9' is not a linear layer of this model. Known: 1, 3"),
        (
            {
                "gradient": "dp_sgd",
                "model": "resnet20_4",
                "training": {"learning_rate": 1, "batch_size": 2, "steps": 1, "mode": "train"},
            },
            "set training.mode to 'eval'",
        ),
        ({"inputs": "instahide(k=4, public='digits')"}, "public = 'digits' is the data set that the clients train on"),
        ({"inputs": "instahide(k=4, public='photos(size=32)')"}, r"have shape \(3, 32, 32\), but the clients' have \(1, 8, 8\)"),
        ({"inputs": "instahide(k=4, public='phtos')"}, "unknown name 'phtos'.*'photos'"),
        ({"inputs": "instahide(k=4, public='photos | digits')"}, "does not name one data set"),
    ],
)
def test_defenses_that_contradict_model_or_data_are_refused_before_any_work(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    run = FederationRun(experiment=make_tiny(**changes), out=tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match=words):
        run.check()
    assert not run.out.exists()
