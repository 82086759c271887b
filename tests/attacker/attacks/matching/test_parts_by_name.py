"""Tests that the parts of CPL can be selected by name, also on the command line."""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import make_image_case, observe_steps

from attacker.attacks import AttackSpec, Case, GradientMatching, Need, cpl
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.names import DISTANCES, OPTIMISERS, get_distance, get_optimiser
from attacker.attacks.matching.objectives import absolute, cosine, euclidean
from attacker.attacks.matching.priors import Prior
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.optimisers.first_order import SGD, Adagrad, Adam
from attacker.attacks.optimisers.lbfgs import LBFGS
from attacker.scoring.metrics import mse
from fedsim.recording import DataSpec, ModelSpec

A = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
B = {"b": torch.tensor(0.0), "w": torch.tensor([0.0, -2.0])}


def test_absolute_distance_by_hand() -> None:
    assert absolute(A, B).item() == 3 + 4 + 2
    assert absolute.worst(B).item() == 2
    assert absolute(A, A).item() == 0
    assert not absolute.squares


def test_names_select_their_parts() -> None:
    assert [get_distance(name) for name in DISTANCES] == [euclidean, cosine, absolute]
    assert get_optimiser("lbfgs") == LBFGS()
    assert get_optimiser("wolfe") == LBFGS(line_search=True)
    assert isinstance(get_optimiser("adam"), Adam)
    assert isinstance(get_optimiser("momentum"), SGD)
    assert get_optimiser("adagrad", 0.25) == Adagrad(learning_rate=0.25)


def test_defaults_are_those_of_the_paper() -> None:
    attack = cpl()
    assert attack.objective.distance is euclidean
    assert attack.search.optimiser == LBFGS(learning_rate=1.0, history=100, period=20, line_search=False)
    assert (attack.labels.agreement, attack.parametrisation.boxed, attack.search.restarts, attack.search.steps) == (
        0,
        False,
        1,
        300,
    )
    assert (attack.prior, attack.simulation) == (Prior(map_tv=1.0), Simulation())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimiser": "newton"}, "unknown optimiser 'newton'. Known: lbfgs, wolfe, adam, momentum, adagrad"),
        ({"distance": "entropy"}, "unknown distance 'entropy'. Known: euclidean, cosine, absolute"),
        ({"label_rule": "guess"}, "unknown label rule 'guess'"),
        ({"learning_rate": -1.0}, "learning_rate must be a number that is not negative"),
        ({"patience": 0}, "patience must be a whole number above 0"),
        ({"local_steps": "one"}, "unknown local_steps 'one'. Known: one_batch, simulated"),
        ({"boxed": "yes"}, "boxed must be true or false"),
        (
            {"init": "insider", "auxiliary": __file__, "label_rule": "joint"},
            "init 'insider' .* label_rule 'joint' .*; choose another label_rule: .*inferred, or another init",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AttackSpec(name="cpl", arguments=arguments)


def test_specification_prints_its_arguments_and_builds_the_attack() -> None:
    spec = AttackSpec(name="cpl", arguments={"optimiser": "adam", "distance": "cosine", "learning_rate": 0.05})
    assert str(spec) == "cpl(distance='cosine', learning_rate=0.05, optimiser='adam')"
    attack = spec.build()
    assert isinstance(attack, GradientMatching)
    assert attack.objective.distance is cosine
    assert attack.search.optimiser == Adam(learning_rate=0.05, decay_at=())


def test_patience_is_converted_to_evaluations_of_the_gradient() -> None:
    for name in OPTIMISERS:
        attack = cpl(optimiser=name, patience=3)
        assert attack.search.stop.patience * attack.search.optimiser.period == 60


def test_searching_for_labels_needs_no_linear_head() -> None:
    assert Need.LINEAR_HEAD in cpl().needs
    assert Need.LINEAR_HEAD not in cpl(label_rule="joint").needs


def test_tv_is_relative_to_the_loss_of_a_zero_gradient_and_needs_images() -> None:
    case, _, _ = make_image_case(1)
    power = sum((t / 0.1).square().sum() for t in case.observations[0].update.values())
    for name, worst in (("euclidean", power), ("cosine", 1.0)):
        (weight,) = CaseBatch(cpl(tv=0.3, distance=name), [case]).scales.smoothing
        assert weight.item() == pytest.approx(0.3 * float(worst), rel=1e-4)
    assert Need.IMAGE_PRIOR in cpl(tv=0.3).needs
    assert Need.IMAGE_PRIOR not in cpl().needs


def test_simulated_local_steps_lower_the_error() -> None:
    """The learning rate is so large that three epochs on an image are not approximated by one gradient."""
    x = (0.5 + 0.4 * torch.sin(torch.arange(64.0) / 9)).reshape(1, 1, 8, 8)
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    batch = (x, torch.tensor([1]))
    seen = observe_steps(batch, batch, batch, model=ModelSpec(name="lenet_dlg"), data=data, learning_rate=0.02)
    case = Case((replace(seen, num_examples=1, training=replace(seen.training, steps=None, epochs=3)),))
    errors = {}
    for name in ("one_batch", "simulated"):
        (found,) = cpl(optimiser="wolfe", local_steps=name, steps=60)([case], rng=seeded())
        errors[name] = mse(found.x, x).item()
    assert errors["simulated"] < 1e-3
    assert errors["one_batch"] > 10 * errors["simulated"]


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_lowers_the_loss(name: str) -> None:
    case, _, _ = make_image_case(1)
    (found,) = cpl(optimiser=name, steps=3 if get_optimiser(name).period > 1 else 60)([case], rng=seeded())
    assert found.loss[-1] < 0.6 * found.loss[0]


@pytest.mark.parametrize("name", DISTANCES)
def test_every_distance_lowers_the_error(name: str) -> None:
    case, x, y = make_image_case(1)
    (found,) = cpl(optimiser="wolfe", distance=name, steps=20)([case], rng=seeded())
    (start,) = cpl(steps=1, learning_rate=1e-9)([case], rng=seeded())
    assert torch.equal(found.y, y)
    assert mse(found.x, x).item() < (0.5 if name == "absolute" else 0.1) * mse(start.x, x).item()


def test_line_search_recovers_every_image() -> None:
    cases, truths, _ = zip(*(make_image_case(i) for i in range(8)), strict=True)
    for found, x in zip(cpl(optimiser="wolfe")(cases, rng=seeded()), truths, strict=True):
        assert mse(found.x, x).item() < 1e-3


def test_plain_search_leaves_the_range_and_boxed_search_lowers_the_loss() -> None:
    case, _, _ = make_image_case(1)
    (free,) = cpl(init="random", steps=1)([case], rng=seeded())
    (boxed,) = cpl(init="random", steps=1, boxed=True, optimiser="wolfe")([case], rng=seeded())
    assert free.x.min() < 0 or free.x.max() > 1
    assert boxed.loss[-1] <= boxed.loss[0]
