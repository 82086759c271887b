"""Tests of the term that compares the features of a search's examples with those that the last layer's gradient determines."""

from dataclasses import replace

import pytest
import torch
from observations import observe_steps
from torch import Generator, Tensor

from attacker.attacks import Case
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.probes import compute_head_inputs
from attacker.attacks.linking import HeadFeatures
from attacker.attacks.matching import feature_matching
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.feature_matching import can_match_features, measure_feature_mismatch, solve_targets
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.papers.matching import inverting_gradients
from attacker.attacks.simulation.client import build_network
from defenses import DefenseSpec
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.codec import encode

DATA = DataSpec(shape=(1, 8, 8), num_classes=6, mean=(0.5,), std=(0.5,))
MODEL = ModelSpec(name="mlp", arguments={"hidden": [48]})


def make_case(labels: list[int], seed: int = 0) -> tuple[Case, Tensor, Tensor]:
    x = torch.rand(len(labels), 1, 8, 8, generator=Generator().manual_seed(seed))
    y = torch.tensor(labels)
    return Case((observe_steps((x, y), model=MODEL, data=DATA, client=f"c{seed}"),)), x, y


def solve(cases: list[Case], labels: Tensor) -> tuple[ObservedGradients, dict[str, Tensor]]:
    first = cases[0].observations[0]
    seen = ObservedGradients([case.observations[0] for case in cases], model=build_network(first), device="cpu")
    rngs = [Generator().manual_seed(i) for i in range(len(cases))]
    return seen, solve_targets(seen, range(len(cases)), labels, rngs)


def test_targets_are_the_features_of_the_true_examples() -> None:
    made = [make_case([4, 0, 2], seed) for seed in (0, 1)]
    seen, found = solve([case for case, _, _ in made], torch.stack([y for _, _, y in made]))
    assert found["trust"].tolist() == [1.0, 1.0]
    for i, (_, x, _) in enumerate(made):
        features, _ = compute_head_inputs(seen.model, seen.data, seen.get_state(i)["weights"], DATA.normalise(x))
        torch.testing.assert_close(found["targets"][i], features, rtol=1e-3, atol=1e-4)
        assert torch.equal(found["averages"][i], torch.eye(3))
        mismatch = [
            float(measure_feature_mismatch(seen, seen.get_state(i)["weights"], guess, found["targets"][i], found["averages"][i]))
            for guess in (x, x.flip(0), torch.rand(x.shape))
        ]
        assert mismatch[0] < 1e-5
        assert min(mismatch[1:]) > 0.01


def test_examples_of_one_label_are_compared_by_their_mean_if_only_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    case, x, y = make_case([1, 1, 3])
    seen, _ = solve([case], y[None])
    weights = seen.get_state(0)["weights"]
    features, _ = compute_head_inputs(seen.model, seen.data, weights, DATA.normalise(x))
    mean = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    read = HeadFeatures(mean @ features, y, torch.tensor([True, True, False]), 0.0, torch.zeros(3))
    monkeypatch.setattr(feature_matching, "read_features", lambda *given, **named: read)
    _, found = solve([case], y[None])
    assert torch.equal(found["averages"][0], mean)
    for order in (x, x[[1, 0, 2]]):
        assert float(measure_feature_mismatch(seen, weights, order, found["targets"][0], found["averages"][0])) < 1e-6


def test_features_that_do_not_explain_the_gradient_are_not_trusted() -> None:
    case, _, y = make_case([4, 0, 2])
    (seen,) = case.observations
    noise = {name: torch.randn(u.shape, generator=Generator().manual_seed(3)) for name, u in seen.update.items()}
    _, found = solve([Case((replace(seen, payload=encode(noise)),))], y[None])
    assert found["trust"].tolist() == [0.0]


def test_loss_is_raised_by_the_weighted_mismatch_and_the_null_is_not() -> None:
    case, x, y = make_case([4, 0, 2])
    seen, goal = solve([case], y[None])
    guess = torch.rand(x.shape, generator=Generator().manual_seed(9))
    mismatch = float(measure_feature_mismatch(seen, seen.get_state(0)["weights"], guess, goal["targets"][0], goal["averages"][0]))
    attack = inverting_gradients(tv=0.0, feature_matching=0.5)
    assert measure_loss(attack, case, guess, y) - measure_loss(inverting_gradients(tv=0.0), case, guess, y) == pytest.approx(
        0.5 * mismatch, rel=1e-3
    )
    assert measure_loss(attack.null(), case, guess, y) == 0


def measure_loss(attack: GradientMatching, case: Case, x: Tensor, y: Tensor) -> float:
    batch = CaseBatch(attack, [case])
    z = x.flatten()[None]
    features = batch.solve_features([0], y[None], [Generator().manual_seed(0)])
    return float(batch.evaluate(z, batch.build_problem([0], z, y[None], features=features))[1][0])


def test_hidden_last_layer_has_no_features() -> None:
    case, _, _ = make_case([4, 0, 2])
    first = case.observations[0]
    assert can_match_features(ObservedGradients([first], model=build_network(first), device="cpu"))
    hidden = replace(first, defenses=DefenseSpec())
    seen = ObservedGradients([hidden], model=build_network(hidden), device="cpu")
    seen.omitted = frozenset({"3.weight"})
    assert not can_match_features(seen)
