"""Tests of complete gradient matching attacks on small problems: success, and independence of other cases."""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import make_image_case, observe_steps
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from attacker.attacks import Case, Stop, cpl, dlg, find_unmet, idlg, inverting_gradients
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.initialisation import get_start
from attacker.attacks.matching.priors import NEIGHBOUR_CONTRAST, compute_map_tv_weight
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.simulation.client import build_network
from attacker.scoring.metrics import mse
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.codec import encode


@pytest.mark.parametrize("attack", [cpl(restarts=3), dlg(restarts=3), idlg(restarts=3)], ids=["cpl", "dlg", "idlg"])
def test_one_image_and_its_label_are_recovered(attack) -> None:
    cases, truths, labels = zip(*(make_image_case(i) for i in range(3)), strict=True)
    for found, x, y in zip(attack(cases, rng=seeded()), truths, labels, strict=True):
        assert torch.equal(found.y, y)
        assert mse(found.x, x).item() < 1e-3
        assert found.explained.item() > 0.999
        assert found.confidence.item() > 0.5


def test_inverting_gradients_is_better_than_its_null_and_in_range() -> None:
    case, x, y = make_image_case(1)
    attack = inverting_gradients(steps=400)
    (found,), (null,) = attack([case], rng=seeded()), attack.null()([case], rng=seeded())
    assert torch.equal(found.y, y)
    assert found.x.min() >= 0
    assert found.x.max() <= 1
    assert found.loss[-1] < 0.01 * found.loss[0]
    assert mse(found.x, x).item() < 0.5 * mse(null.x, x).item()


def test_batch_of_table_rows_is_recovered_from_a_wide_layer() -> None:
    data = DataSpec(shape=(12,), num_classes=6)
    x, y = torch.rand(3, 12, generator=seeded(5)), torch.tensor([0, 2, 5])
    observation = observe_steps((x, y), model=ModelSpec(name="mlp", arguments={"hidden": [128]}), data=data)
    (found,) = cpl(init="uniform", restarts=6)([Case((observation,))], rng=seeded())
    assert torch.equal(found.y, y)
    assert torch.cdist(x, found.x).amin(dim=1).max() < 0.05
    assert [slot.position for slot in found.slots] == [0, 1, 2]


def test_answer_does_not_depend_on_the_other_cases() -> None:
    cases = [make_image_case(i)[0] for i in range(4)]
    attack = cpl(steps=1)
    together = attack(cases, rng=seeded(3))
    (alone,) = attack([cases[2]], rng=seeded(3))
    torch.testing.assert_close(together[2].x, alone.x, rtol=1e-3, atol=1e-3)
    (other_seed,) = attack([cases[2]], rng=seeded(4))
    assert (other_seed.x - alone.x).abs().max() > 0.05


def test_cases_with_different_weights_are_recovered() -> None:
    cases, truths, _ = zip(*(make_image_case(i, seed=i) for i in range(3)), strict=True)
    assert not torch.equal(cases[0].observations[0].weights["0.weight"], cases[1].observations[0].weights["0.weight"])
    for found, x in zip(cpl(restarts=4)(cases, rng=seeded()), truths, strict=True):
        assert mse(found.x, x).item() < 1e-3


def test_restarts_do_not_raise_the_loss() -> None:
    cases = [make_image_case(i)[0] for i in range(3)]
    attack = cpl(steps=1).copy_with(stop=Stop(stuck=0.0))
    singles = [attack(cases, rng=seeded())]
    several = attack.copy_with(restarts=4)(cases, rng=seeded())
    for i, found in enumerate(several):
        assert found.restarts == 4
        assert found.iterations == 4 * singles[0][i].iterations
        assert found.loss[-1] <= singles[0][i].loss[-1]


def test_progress_does_not_begin_again_with_a_restart() -> None:
    received: list[tuple[int, int]] = []
    attack = cpl(steps=3, restarts=3).copy_with(stop=Stop(stuck=0.0))
    attack([make_image_case(0)[0]], rng=seeded(), progress=lambda done, most, words: received.append((done, most)))
    done = [one for one, _ in received]
    assert done == sorted(set(done))
    assert {most for _, most in received} == {9}
    assert 6 < done[-1] < 9


def test_search_by_cosine_restarts_above_the_stuck_threshold() -> None:
    case, _, _ = make_image_case(0)
    far = inverting_gradients(steps=1, restarts=3).copy_with(stop=Stop(stuck=1e-4, patience=5))
    near = far.copy_with(stop=Stop(stuck=0.9, patience=5))
    assert far([case], rng=seeded())[0].restarts == 3
    assert near([case], rng=seeded())[0].restarts == 1


def test_known_labels_replace_the_search_for_labels() -> None:
    case, x, y = make_image_case(2)
    (found,) = dlg(restarts=3)([replace(case, known_labels=y)], rng=seeded())
    assert found.oracles == ("labels",)
    assert torch.equal(found.y, y)
    assert mse(found.x, x).item() < 1e-3


def test_some_search_needs_no_second_start() -> None:
    cases = [make_image_case(i)[0] for i in range(3)]
    found = cpl(restarts=5)(cases, rng=seeded())
    assert min(f.restarts for f in found) == 1


def test_clipped_update_is_recovered_only_with_knowledge_of_the_clipping() -> None:
    cases, truths, labels = zip(*(make_image_case(i, defense="clip(0.01)") for i in (0, 2)), strict=True)
    knowing = cpl(restarts=4)(cases, rng=seeded())
    ignoring = cpl(steps=40, knows_defense=False)(cases, rng=seeded())
    for known, ignored, x, y in zip(knowing, ignoring, truths, labels, strict=True):
        assert torch.equal(known.y, y)
        assert mse(known.x, x).item() < 5e-3
        assert mse(ignored.x, x).item() > 0.05


def test_known_noise_is_not_taken_for_a_stuck_search() -> None:
    case, x, _ = make_image_case(0, defense="gaussian(0.002)")
    (knowing,) = cpl(restarts=2)([case], rng=seeded())
    (ignoring,) = cpl(restarts=2, knows_defense=False)([case], rng=seeded())
    coordinates, variance = sum(w.numel() for w in case.observations[0].weights.values()), torch.tensor((0.002 / 0.1) ** 2)
    assert knowing.loss[-1] <= coordinates * variance + 2 * NEIGHBOUR_CONTRAST * compute_map_tv_weight(variance, x.numel())
    assert (knowing.restarts, ignoring.restarts) == (1, 2)
    assert mse(knowing.x, x).item() < 0.5 * mse(ignoring.x, x).item()


def test_examples_of_several_steps_are_recovered_as_one_batch() -> None:
    data = DataSpec(shape=(12,), num_classes=6)
    x, y = torch.rand(2, 12, generator=seeded(5)), torch.tensor([1, 4])
    model = ModelSpec(name="mlp", arguments={"hidden": [128]})
    observation = observe_steps((x[:1], y[:1]), (x[1:], y[1:]), model=model, data=data, learning_rate=1e-4)
    (found,) = cpl(init="uniform", restarts=6)([Case((observation,))], rng=seeded())
    assert torch.cdist(x, found.x).amin(dim=1).max() < 0.1
    assert [(slot.batch, slot.position) for slot in found.slots] == [(1, 0), (2, 0)]


def test_known_labels_are_used_and_listed_as_an_oracle() -> None:
    case, _, y = make_image_case(1)
    with_labels = replace(case, known_labels=(y + 1) % 4)
    (found,) = cpl(steps=2)([with_labels], rng=seeded())
    assert found.oracles == ("labels",)
    assert torch.equal(found.y, (y + 1) % 4)
    assert cpl(steps=2).null()([with_labels], rng=seeded())[0].oracles == ()
    assert cpl(steps=2)([case], rng=seeded())[0].oracles == ()


def test_known_logits_attract_the_answer_and_are_listed_as_an_oracle() -> None:
    case, _, _ = make_image_case(1)
    observation = case.observations[0]
    model, data = build_network(observation), observation.data
    pull = cpl(steps=40, agreement=1e3).copy_with(optimiser=Adam(learning_rate=0.05))  # so large that the gradient hardly matters
    logits = torch.linspace(-1, 1, data.num_classes)[None]
    (found,) = pull([replace(case, known_logits=logits)], rng=seeded())
    (plain,) = pull([case], rng=seeded())

    def away(x) -> float:
        with torch.no_grad():
            made = functional_call(model, dict(observation.weights), (data.normalise(x),))
        return float((made - logits).norm())

    assert away(found.x) < 0.5 * away(plain.x)
    assert (found.oracles, plain.oracles) == (("logits",), ())
    without = pull.copy_with(agreement=0.0)([replace(case, known_logits=logits)], rng=seeded())
    assert without[0].oracles == ()  # the logits were not used
    assert pull.null()([replace(case, known_logits=logits)], rng=seeded())[0].oracles == ()


def test_unmet_needs_are_stated_in_words() -> None:
    case, _, _ = make_image_case(0)
    assert find_unmet(idlg(), case) == []
    two = Case((replace(case.observations[0], num_examples=2),))
    assert find_unmet(idlg(), two) == ["it works for one example only"]
    unknown = Case((replace(case.observations[0], num_examples=None),))
    assert "reported no number" in find_unmet(cpl(), unknown)[0]


def test_batches_of_unequal_size_are_counted_as_two_steps() -> None:
    """Batches of 4 and 2: the server does not know which one was short, but it prescribed two steps."""
    data = DataSpec(shape=(12,), num_classes=6)
    x, y = torch.rand(6, 12, generator=seeded(5)), torch.tensor([0, 1, 2, 3, 4, 5])
    model = ModelSpec(name="mlp", arguments={"hidden": [16]})
    observation = observe_steps((x[:4], y[:4]), (x[4:], y[4:]), model=model, data=data, learning_rate=1e-4)
    assert observation.training.count_step_examples(6) is None
    batch = CaseBatch(cpl(), [Case((observation,))])
    weights = {name: w.clone().requires_grad_() for name, w in observation.weights.items()}
    network = models.build(model, data)
    losses = [cross_entropy(functional_call(network, weights, (part,)), own) for part, own in ((x[:4], y[:4]), (x[4:], y[4:]))]
    expected = torch.autograd.grad(sum(losses) / 2, list(weights.values()))
    for (name, _), gradient in zip(weights.items(), expected, strict=True):
        torch.testing.assert_close(batch.views[0].gradients[name][0], gradient, rtol=1e-2, atol=1e-3)


def test_the_null_starts_where_the_attack_starts() -> None:
    case, _, _ = make_image_case(1)
    starts = []

    def watched(data, labels, rng):
        starts.append(get_start("patterned")(data, labels, rng))
        return starts[-1]

    attack = cpl(steps=1).copy_with(init=watched)
    attack([case], rng=seeded()), attack.null()([case], rng=seeded())
    assert torch.equal(starts[0], starts[1])


def test_attack_with_an_image_prior_refuses_table_rows() -> None:
    data = DataSpec(shape=(12,), num_classes=6)
    rows = observe_steps((torch.rand(1, 12), torch.tensor([1])), model=ModelSpec(name="mlp"), data=data)
    assert find_unmet(inverting_gradients(), Case((rows,))) == ["its prior is for images, and these data are table rows"]


@pytest.mark.parametrize("defense", ["", "prune(0.5)", "sign('mean')", "withhold(['*'])"])
def test_zero_update_gets_an_answer_with_low_confidence(defense: str) -> None:
    case, _, _ = make_image_case(0, defense=defense)
    observation = case.observations[0]
    zeros = {name: torch.zeros_like(t) for name, t in observation.update.items()}
    (found,) = cpl(steps=2)([Case((replace(observation, payload=encode(zeros, observation.payload.codec)),))], rng=seeded())
    assert found.explained.item() == 0
    assert found.confidence.item() < 0.05
    assert found.loss.isfinite().all()
