"""Tests of the second search, by L-BFGS, from the best result of the first (`Polish`)."""

from dataclasses import replace

import pytest
import torch
from checkpoint_memory import DictMemory
from generators import seeded
from observations import make_image_case, observe_steps
from torch import Tensor

from attacker.attacks import Case, inverting_gradients
from attacker.attacks.base import estimate_effort
from attacker.attacks.matching.matching_run import MatchingRun
from attacker.attacks.matching.priors import total_variation
from attacker.attacks.papers.agic import agic
from attacker.scoring.metrics import mse
from fedsim.recording import DataSpec, ModelSpec, Observation


@pytest.mark.parametrize("defense", ["", "top_k(0.3)"])
def test_polish_finds_better_images_with_as_many_evaluations(defense: str) -> None:
    cases, truths, _ = zip(*(make_image_case(i, defense=defense) for i in range(3)), strict=True)
    alone = inverting_gradients(steps=300, polish=0.0)(cases, rng=seeded())
    polished = inverting_gradients(steps=300, polish=0.4)(cases, rng=seeded())
    for plain, better, x in zip(alone, polished, truths, strict=True):
        assert plain.evaluations == 300
        assert better.evaluations <= 300
        assert mse(better.x, x) < 0.1 * mse(plain.x, x)


def test_polish_of_a_batch_keeps_labels_and_box() -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    x, y = torch.rand(3, 1, 8, 8, generator=seeded(2)).round(), torch.tensor([2, 0, 3])
    case = Case((observe_steps((x, y), model=ModelSpec(name="lenet_dlg"), data=data),))
    (found,) = inverting_gradients(steps=100, polish=0.4)([case], rng=seeded())
    assert found.y.sort().values.tolist() == [0, 2, 3]
    assert found.x.min() >= 0
    assert found.x.max() <= 1


@pytest.mark.parametrize(
    ("share", "steps", "iterations"), [(0.0, 100, 0), (0.1, 100, 0), (0.4, 100, 2), (0.4, 49, 0), (0.4, 50, 1), (0.99, 60, 2)]
)
def test_evaluations_are_shared_between_both_searches(share: float, steps: int, iterations: int) -> None:
    run = MatchingRun(inverting_gradients(steps=steps, polish=share), [make_image_case()[0]], seeded(), None)
    assert run.polishing == iterations
    assert run.steps == steps - 20 * iterations
    assert estimate_effort(run.attack).evaluations == steps


def test_weight_of_total_variation_falls_to_a_tenth() -> None:
    case, x, y = make_image_case()
    settings = inverting_gradients(tv=0.3, colour=False).build_polish(5)
    run = MatchingRun(settings, [case], seeded(), None)
    z = torch.rand_like(x).reshape(1, -1)
    problem = run.batch.build_problem([0], z, y[None])
    first, later, last = (run.batch.evaluate(z, problem, share)[1] for share in (0.0, 0.5, 1.0))
    size = 0.3 * run.batch.views[0].worst * total_variation(z.view_as(x))
    assert (first - last).item() == pytest.approx(0.9 * size.item(), rel=1e-3)
    assert later.item() == pytest.approx(last.item(), rel=1e-6)


def test_each_tensor_counts_equally_in_the_distance() -> None:
    """The distance of a gradient of zeros is the number of tensors, up to the floor of the units."""
    case, _, _ = make_image_case()
    run = MatchingRun(inverting_gradients().build_polish(5), [case], seeded(), None)
    observed = run.batch.views[0].rows["observed"]
    powers = torch.stack([g[0].square().mean() for g in observed.values()])
    assert powers.max() / powers.min() < 2


@pytest.mark.parametrize(("network", "defense"), [("", "gaussian(0.001)"), ("dropout(0.3)", "")])
def test_there_is_no_polish_where_true_examples_do_not_explain_the_gradient(network: str, defense: str) -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    model = ModelSpec(name="lenet_dlg", network=network)
    seen = observe_steps((torch.rand(1, 1, 8, 8, generator=seeded()), torch.tensor([1])), model=model, data=data, defense=defense)
    run = MatchingRun(inverting_gradients(steps=100), [Case((seen,))], seeded(), None)
    assert (run.polishing, run.steps) == (0, 100)


def test_polish_is_dropped_if_the_gradient_stays_unexplained() -> None:
    """Two large local steps are taken for one, so that no image explains the update; L-BFGS would fit the difference."""
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    batch = torch.rand(2, 1, 8, 8, generator=seeded(3)), torch.tensor([1, 2])
    seen = observe_steps(batch, batch, model=ModelSpec(name="lenet_dlg"), data=data, learning_rate=30.0)
    settings = {"give_up": 0.0, "local_steps": "one_batch"}
    (alone,) = inverting_gradients(steps=60, polish=0.0, **settings)([Case((seen,))], rng=seeded())
    (polished,) = inverting_gradients(steps=100, polish=0.4, **settings)([Case((seen,))], rng=seeded())
    assert torch.equal(polished.x, alone.x)
    assert (polished.iterations, polished.evaluations) == (62, 100)


def test_there_is_no_polish_with_a_robust_loss() -> None:
    """The scale of the robust loss is that of cosines, and no squared distance is near it."""
    for robust, steps in ((0.0, 60), (0.1, 100)):
        assert MatchingRun(agic(steps=100, robust=robust).matching, [make_image_case()[0]], seeded(), None).steps == steps


def test_null_is_not_polished() -> None:
    cases = [make_image_case(i)[0] for i in range(2)]
    plain = inverting_gradients(steps=60, polish=0.0).null()(cases, rng=seeded())
    polished = inverting_gradients(steps=60, polish=0.4).null()(cases, rng=seeded())
    for a, b in zip(plain, polished, strict=True):
        assert torch.equal(a.x, b.x)
        assert a.evaluations == b.evaluations == 60


def test_searches_that_were_given_up_are_not_polished() -> None:
    cases = [make_image_case(i)[0] for i in range(2)]
    attack = inverting_gradients(steps=1000)
    hopeless = attack.copy_with(stop=replace(attack.search.stop, hopeless=0.0, unexplained=0.0, early=(), stall=None))
    for found in hopeless(cases, rng=seeded()):
        assert found.evaluations == 60  # a tenth of those of Adam
        (note,) = (note for note in found.notes if "given up after" in note)
        assert "after 60 of 600 iterations, because its loss was still above 0% of that at the start" in note


def test_killed_polish_resumes_to_bitwise_equal_images() -> None:
    cases = [make_image_case(i)[0] for i in range(2)]
    attack = inverting_gradients(steps=200)
    memory = DictMemory("polish ")
    with pytest.raises(SystemExit):
        attack(cases, rng=seeded(), memory=memory)
    resumed = attack(cases, rng=seeded(), memory=replace(memory, until=""))
    for a, b in zip(attack(cases, rng=seeded()), resumed, strict=True):
        assert torch.equal(a.x, b.x)
        assert a.evaluations == b.evaluations


def test_progress_never_goes_back() -> None:
    seen: list[tuple[int, int]] = []
    inverting_gradients(steps=100)(
        [make_image_case()[0]], rng=seeded(), progress=lambda done, total, _: seen.append((done, total))
    )
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert len({total for _, total in seen}) == 1
    assert done[-1] <= seen[0][1]


def test_agic_polishes_the_joint_search() -> None:
    case, x, _ = make_image_case()
    settings = {"steps": 300, "signed": False, "closed_forms": False, "tv": 1e-3}
    (alone,), (polished,) = (agic(**settings, polish=share)([case], rng=seeded()) for share in (0.0, 0.4))
    assert mse(polished.x, x) < 0.1 * mse(alone.x, x)


def observe_epochs(epochs: int, x: Tensor, y: Tensor, rate: float = 0.1) -> Observation:
    """Return what the server sees of a client that trains on all its examples at once, for this number of epochs."""
    data = DataSpec(shape=tuple(x.shape[1:]), num_classes=4)
    seen = observe_steps(*[(x, y)] * epochs, model=ModelSpec(name="lenet_dlg"), data=data, learning_rate=rate)
    return replace(seen, training=replace(seen.training, steps=None, epochs=epochs), num_examples=len(y))


@pytest.mark.parametrize("surrogate", [False, True])
def test_search_and_polish_simulate_the_local_steps_on_one_batch(surrogate: bool) -> None:
    _, x, y = make_image_case()
    case = Case((observe_epochs(4, x, y, rate=10.0),))
    settings = {"steps": 800, "give_up": 0.0, "surrogate": surrogate}
    (alone,) = inverting_gradients(**settings, local_steps="one_batch")([case], rng=seeded())
    (simulated,) = inverting_gradients(**settings)([case], rng=seeded())
    assert mse(simulated.x, x) < 0.01 * mse(alone.x, x)
    assert simulated.confidence[0] > 0.9
    assert simulated.evidence["misfit"][0] < -4
    assert simulated.evaluations == 200


def test_null_of_simulated_steps_does_not_read_the_update() -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    found = []
    for seed in (1, 2):
        x = torch.rand(2, *data.shape, generator=seeded(seed))
        case = Case((observe_epochs(3, x, torch.tensor([1, 2])),))
        found += inverting_gradients(steps=300).null()([case], rng=seeded())
    assert torch.equal(found[0].x, found[1].x)
    assert torch.equal(found[0].y, found[1].y)
    assert [one.evaluations for one in found] == [100, 100]


def test_iterations_that_simulate_steps_are_fewer() -> None:
    """Three epochs of one step each are simulated; those of two steps only after the order of examples was searched for."""
    x, y = torch.rand(2, 1, 8, 8, generator=seeded()), torch.tensor([1, 2])
    seen = observe_epochs(3, x, y)
    shuffled = replace(seen, training=replace(seen.training, batch_size=1))
    for observation, counts in ((seen, (6, 0, 300 - 6 * 20)), (shuffled, (3, 2, 900 - 6 * (3 + 2) * 20))):
        run = MatchingRun(inverting_gradients(steps=900), [Case((observation,), known_labels=y)], seeded(), None)
        assert (run.polishing, run.fits, run.steps) == counts


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"at least 0 and below 1, got {share}"):
        inverting_gradients(polish=share)
