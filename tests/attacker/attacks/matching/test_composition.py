"""Tests of the parts of gradient matching, and of the common meaning of `tv`, the weight of total variation."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from observations import observe_steps
from torch import Tensor

from attacker.attacks import Case, cpl, dlg, inverting_gradients, presets, rog
from attacker.attacks.linking import Links
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.objectives import Objective, absolute, cosine, euclidean
from attacker.attacks.matching.priors import Prior, total_variation
from attacker.attacks.matching.settings import COMPONENT_NAMES, Labels, MatchingSettings, Search
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.papers.agic import agic
from attacker.attacks.simulation.client import build_network
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training

LENET = ModelSpec(name="lenet_dlg")


def test_parts_are_frozen_and_have_at_most_seven_fields() -> None:
    attack = cpl()
    for part in COMPONENT_NAMES:
        own = getattr(attack, part)
        assert len(fields(own)) <= 7
        with pytest.raises(FrozenInstanceError):
            setattr(own, fields(own)[0].name, None)


def test_fields_of_parts_have_unique_names_and_can_be_changed_by_name() -> None:
    names = [one.name for part in COMPONENT_NAMES for one in fields(getattr(cpl(), part))] + [
        one.name for one in fields(MatchingSettings)
    ]
    assert len(names) == len(set(names))
    changed = cpl().copy_with(steps=3, later=1.0, tv=0.5, name="own", optimiser=Adam())
    assert (changed.search.steps, changed.objective.later, changed.prior.tv, changed.name) == (3, 1.0, 0.5, "own")
    assert changed.search.optimiser == Adam()
    assert changed.parametrisation == cpl().parametrisation
    assert cpl().copy_with(prior=Prior(tv=0.1), map_tv=1.0).prior == Prior(tv=0.1, map_tv=1.0)
    with pytest.raises(TypeError, match="stepz"):
        cpl().copy_with(stepz=3)


def test_robust_loss_grows_logarithmically() -> None:
    distance = torch.tensor([0.0, 1e-4, 1.0, 100.0])
    assert torch.equal(Objective().apply_robust_loss(distance), distance)
    found = Objective(robust=0.1).apply_robust_loss(distance)
    assert found[0] == 0
    assert float(found[1]) == pytest.approx(1e-4, rel=1e-3)
    assert float(found[3]) == pytest.approx(0.1 * torch.log1p(torch.tensor(1000.0)).item())


def test_rounds_after_the_first_epoch_have_less_weight() -> None:
    def weigh(*epochs: int) -> list[float]:
        links = Links((torch.tensor([0]),) * 4, torch.ones(1), None, epochs)
        return [Objective(later=0.2).get_weight(links, o) for o in range(4)]

    assert weigh(1, 2, 1, 3) == [1.0, 0.2, 1.0, 0.2]
    assert weigh(5, 5, 5, 5) == weigh() == [1.0] * 4


def test_the_loss_of_a_zero_gradient_is_its_distance_to_the_observed_one() -> None:
    observed = {"a": torch.tensor([3.0, -4.0]), "b": torch.tensor([[1.0]])}
    zero = {name: torch.zeros_like(g) for name, g in observed.items()}
    for distance in (euclidean, cosine, absolute):
        assert float(distance.worst(observed)) == pytest.approx(float(distance(zero, observed)))
        assert float(distance(observed, observed)) == pytest.approx(0, abs=1e-6)
        doubled = {name: 2 * g for name, g in observed.items()}
        assert (float(distance.worst(doubled)) == float(distance.worst(observed))) == distance.bounded


def test_contradictory_simulation_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="set local_steps=simulated"):
        Simulation(order_invariant=0.1)
    with pytest.raises(ValueError, match="set local_steps=one_batch"):
        Simulation(surrogate=True, local_steps="simulated")
    epochs = Training(learning_rate=0.1, batch_size=1, epochs=3)
    assert Simulation().count_epochs(epochs) == 1
    assert Simulation(local_steps="simulated", order_invariant=0.1).count_epochs(epochs) == 3


@pytest.mark.parametrize(
    ("epochs", "defense", "used"), [(1, "", False), (2, "", True), (2, "sign()", False), (2, "top_k(0.1)", True)]
)
def test_surrogate_weights_are_for_several_steps_whose_sizes_are_sent(epochs: int, defense: str, used: bool) -> None:
    data = DataSpec(shape=(3, 16, 16), num_classes=4)
    x, y = torch.rand(1, *data.shape), torch.tensor([1])
    seen = observe_steps(*[(x, y)] * epochs, model=LENET, data=data, defense=defense)
    seen = replace(seen, training=replace(seen.training, steps=None, epochs=epochs))
    assert Simulation(surrogate=True).adapt_to((seen,), build_network(seen)) == Simulation(surrogate=used)
    batch = CaseBatch(rog(steps=2), [Case((seen,), known_labels=y)])
    assert batch.attack.simulation.surrogate is used


@pytest.mark.parametrize(
    ("epochs", "batch_size", "settings", "steps"),
    [
        ((3,), 2, {}, 3),
        ((3, 1), 2, {}, 3),
        ((10,), 2, {}, 10),
        ((11,), 2, {}, 1),
        ((1,), 2, {}, 1),
        ((3,), 1, {}, 1),
        ((3,), 2, {"defense": "sign()"}, 1),
        ((3,), 2, {"defense": "top_k(0.1)"}, 3),
        ((3,), 2, {"network": "dropout(0.3)"}, 1),
        ((3,), 2, {"draws": True}, 1),
        ((3, 3), 2, {"in_order": True}, 1),
    ],
)
def test_auto_simulates_local_steps_whose_examples_are_known(
    epochs: tuple[int, ...], batch_size: int, settings: dict[str, Any], steps: int
) -> None:
    """They are known if each step is on all examples of the client, and if nothing else is random."""
    model = ModelSpec(name=LENET.name, network=settings.pop("network", ""))
    data, defense = DataSpec(shape=(3, 16, 16), num_classes=4), settings.pop("defense", "")
    batch = torch.rand(2, *data.shape), torch.tensor([1, 2])
    seen = [observe_steps(*[batch] * count, model=model, data=data, defense=defense) for count in epochs]
    seen = [
        replace(one, num_examples=2, training=replace(one.training, steps=None, epochs=count, batch_size=batch_size))
        for one, count in zip(seen, epochs, strict=True)
    ]
    auto, network = Simulation(local_steps="auto", surrogate=not settings, **settings), build_network(seen[0])
    assert auto.count_simulated_steps(seen, network) == steps
    adapted = auto.adapt_to(seen, network)
    assert adapted.local_steps == ("simulated" if steps > 1 else "one_batch")
    assert not (adapted.surrogate and steps > 1)
    assert Simulation(local_steps="simulated").count_simulated_steps(seen, network) == 1


def test_search_without_a_start_or_float32_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Search(restarts=0)
    with pytest.raises(ValueError, match="got 1"):
        Search(coarse=1.0)


def test_dlg_searches_for_labels_and_cpl_infers_them() -> None:
    assert dlg().labels == Labels(rule=None)
    assert cpl().labels.rule is not None


def test_custom_belief_is_added_unscaled() -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    x, y = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1])
    case = Case((observe_steps((x, y), model=LENET, data=data),))
    plain, other = (loss_at(attack, case, x, y) for attack in (cpl(), cpl().copy_with(belief=lambda x: 3 * x.sum())))
    assert float(other - plain) == pytest.approx(3 * float(x.sum()), rel=1e-4)


@pytest.mark.parametrize("term", ["belief", "agreement"])
def test_a_term_keeps_its_weight_if_clipping_shortens_the_gradient(term: str) -> None:
    """The loss is divided by the factor of the clipping; the terms must be too, as a MAP estimate needs their ratio."""
    data, weight = DataSpec(shape=(1, 8, 8), num_classes=4), 1e-4
    x, y = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1])
    case = Case((observe_steps((x, y), model=LENET, data=data, defense="clip(0.01)"),))
    if term == "belief":
        attack, value = cpl(denoised=False).copy_with(belief=lambda x: weight * x.sum()), x.sum()
    else:
        attack, model = cpl(denoised=False, agreement=weight), models.build(LENET, data)
        logits = torch.func.functional_call(model, dict(case.observations[0].weights), data.normalise(x))
        value = (logits.softmax(dim=1) - torch.nn.functional.one_hot(y, 4)).square().sum()
    batch, z = CaseBatch(attack, [case]), x.flatten()[None]
    problem = batch.build_problem([0], z, y[None])
    gain = float(problem["gain"][0])
    assert gain > 10
    assert float(batch.evaluate(z, problem)[1][0]) / gain == pytest.approx(weight * float(value), rel=1e-2)


def loss_at(attack: MatchingSettings, case: Case, x: Tensor, y: Tensor) -> Tensor:
    batch, z = CaseBatch(attack, [case]), x.flatten()[None]
    return batch.evaluate(z, batch.build_problem([0], z, y[None]))[1][0]


@pytest.mark.parametrize(
    ("steps", "local_steps", "is_free"), [(1, "one_batch", False), (2, "one_batch", True), (2, "simulated", False)]
)
def test_only_steps_treated_as_one_leave_the_size_of_quantised_tensors_free(steps: int, local_steps: Any, is_free: bool) -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    x, y = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1])
    seen = observe_steps(*[(x, y)] * steps, model=LENET, data=data, defense="uniform(3)")
    seen = replace(seen, num_examples=1, training=replace(seen.training, steps=None, epochs=steps))
    faster = replace(seen, training=replace(seen.training, learning_rate=1.4 * seen.training.learning_rate))
    attack = cpl(distance="cosine", tv=0.0, local_steps=local_steps)
    loss, of_faster = (float(loss_at(attack, Case((one,)), x, y)) for one in (seen, faster))
    assert (of_faster == pytest.approx(loss, rel=1e-3)) is is_free
    assert loss > 1e-3 if is_free else loss < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda tv: cpl(tv=tv, distance="cosine"),
        lambda tv: cpl(tv=tv),
        lambda tv: inverting_gradients(tv=tv, colour=False),
        lambda tv: agic(tv=tv, colour=False).matching,
        lambda tv: agic(tv=tv, colour=False, distance="euclidean", optimiser="wolfe").matching,
    ],
    ids=["cpl by cosine", "cpl", "inverting_gradients", "agic", "agic by squares"],
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_tv_means_the_same_in_every_attack(make: Callable[[float], MatchingSettings], rounds: int) -> None:
    """`tv` is relative to the loss of a zero gradient, per unit of total variation of pixels, for any normalisation."""
    data = DataSpec(shape=(3, 8, 8), num_classes=4, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.5))
    x, y = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1])
    seen = tuple(observe_steps((x, y), model=LENET, data=data, seed=seed) for seed in range(rounds))
    case = Case(seen, links=Links((torch.tensor([0]),) * rounds, torch.ones(1), y, tuple(range(1, rounds + 1))))
    guess = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with_tv, without = (loss_at(make(tv), case, guess, y) for tv in (0.5, 0.0))
    batch = CaseBatch(make(0.0), [case])
    weights = [1.0] + [0.1] * (rounds - 1)
    zero = sum(w * float(view.worst) for w, view in zip(weights, batch.views, strict=True)) / sum(weights)
    assert float(with_tv - without) == pytest.approx(0.5 * zero * float(total_variation(guess)), rel=2e-3)


@pytest.mark.parametrize("attack", ["inverting_gradients", "agic"])
@pytest.mark.parametrize("std", [(1.0,), (0.3081,), (0.25, 0.25, 0.25)])
def test_presets_for_normalised_inputs_keep_their_loss(attack: str, std: tuple[float, ...]) -> None:
    """Weights in presets for normalised inputs are converted to pixels, so that the loss stays the same."""
    data = DataSpec(shape=(3, 8, 8), num_classes=4, mean=(0.5,) * len(std), std=std)
    x, y = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1])
    case = Case((observe_steps((x, y), model=LENET, data=data),))
    guess = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    settings, large = presets.get_settings(attack), replace(data, shape=(3, 32, 32))
    for preset, model in (("published", LENET), ("tuned", ModelSpec(name="cnn6"))):
        own = settings[preset] if preset == "published" else settings[preset]["relu"]
        if "tv" not in own:
            continue
        arguments: dict[str, Any] = presets.get_arguments(attack, preset, model, large)
        made = inverting_gradients(**arguments) if attack == "inverting_gradients" else agic(**arguments).matching
        added = loss_at(made, case, guess, y) - loss_at(made.copy_with(tv=0.0), case, guess, y)
        measure = made.prior.variation.measure
        assert (measure is total_variation) == (preset == "published")
        before = own["tv"] * float(measure(data.normalise(guess)))
        assert float(added) == pytest.approx(before, rel=1e-3, abs=2e-7)


def test_presets_and_defaults_of_tv_for_pixels() -> None:
    assert (inverting_gradients().prior.tv, agic().matching.prior.tv, cpl().prior.tv) == (1e-3, 1e-3, 0.0)
    images = DataSpec(shape=(3, 32, 32), num_classes=10)
    for attack in ("cpl", "inverting_gradients", "agic"):
        raw = presets.get_settings(attack)["tuned"]["relu"]
        assert presets.get_arguments(attack, "tuned", ModelSpec(name="cnn6"), images) == raw
    halved = DataSpec(shape=(3, 32, 32), num_classes=10, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert presets.get_arguments("inverting_gradients", "tuned", ModelSpec(name="cnn6"), halved)["tv"] == 0.006


def test_prior_weight_of_nulls() -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    case = Case((observe_steps((torch.rand(1, 1, 8, 8), torch.tensor([1])), model=LENET, data=data),))
    weights = [
        CaseBatch(attack.null(), [case]).scales.smoothing.item()
        for attack in (inverting_gradients(tv=0.25), cpl(tv=0.25, distance="cosine"), cpl(tv=0.25), cpl())
    ]
    assert weights == [0.25, 0.25, 1.0, 0.0]
