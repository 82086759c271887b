"""Tests of a client's random draws as variables: what they simulate, and what a search with them finds."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from generators import seed_default
from observations import observe_steps
from torch import Tensor

from attacker.attacks import Case, inverting_gradients
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.simulation.draws import Draws
from defenses.inputs import InputsSpec, to_one_hot
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(1, 8, 8), num_classes=4)
LABELS = torch.tensor([1, 3])

pytestmark = pytest.mark.usefixtures("one_thread")


def draw_images() -> Tensor:
    return torch.rand(2, *DATA.shape, generator=torch.Generator().manual_seed(0))


def drop_features(*, p: float = 0.6) -> Case:
    with seed_default(5):  # the client's masks
        network = ModelSpec(name="mlp", arguments={"hidden": [30]}, network=f"dropout({p})")
        return Case((observe_steps((draw_images(), LABELS), model=network, data=DATA),), known_labels=LABELS)


def mix_examples(matrix: Tensor, inputs: str = "mixup") -> Case:
    """Return the case of a client that trains on mixtures with this matrix (N, N)."""
    x, y = (matrix @ draw_images().flatten(1)).reshape(2, *DATA.shape), matrix @ to_one_hot(LABELS, 4)
    seen = observe_steps((x, y), model=ModelSpec(name="lenet_dlg"), data=DATA)
    return Case((replace(seen, inputs=InputsSpec.parse(inputs)),), known_labels=LABELS)


def measure_error(case: Case, drawn: Callable[[Draws, CaseBatch], Tensor]) -> float:
    """Return the relative error of the simulated gradient at the true examples, with draws as `drawn` says."""
    batch = CaseBatch(inverting_gradients(draws=True), [case])
    assert batch.draws is not None
    assert batch.space.drawn is not None
    z = torch.cat([draw_images().flatten(), drawn(batch.draws, batch)])
    (view,) = batch.views
    row = view.get_case(0)
    made = view.simulate(row, *batch.decode(z, {"labels": LABELS}), z)
    error = torch.stack([(made[name] - g).square().sum() for name, g in row["observed"].items()]).sum()
    return float((error / torch.stack([g.square().sum() for g in row["observed"].values()]).sum()).sqrt())


def test_true_mixture_explains_the_update_and_the_start_does_not() -> None:
    matrix = torch.tensor([[0.3, 0.7], [0.9, 0.1]])
    case = mix_examples(matrix)
    assert measure_error(case, lambda draws, batch: matrix.log().flatten()) < 1e-4
    assert measure_error(case, lambda draws, batch: matrix.T.log().flatten()) > 1e-2
    assert measure_error(case, lambda draws, batch: draws.start()) > 1e-2


def test_true_masks_explain_the_update_and_the_start_is_without_dropout() -> None:
    case = drop_features()
    (one,) = case.observations
    with seed_default(5):
        masks = torch.nn.functional.dropout(torch.ones(2, 30), 0.6) > 0
    assert measure_error(case, lambda draws, batch: torch.where(masks, 40.0, -40.0).flatten()) < 1e-4
    unmasked = measure_error(case, lambda draws, batch: draws.start())
    assert unmasked > 0.1
    batch = CaseBatch(inverting_gradients(draws=True), [case])
    plain = CaseBatch(inverting_gradients(), [case]).views[0]
    z = torch.cat([draw_images().flatten(), batch.draws.start()])
    (view,) = batch.views
    expected, found = (v.simulate(v.get_case(0), draw_images(), LABELS, z) for v in (plain, view))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-4)
    assert batch.draws.masks == {"3.dropout": (30, 0.6)}
    assert one.model.network


def test_search_with_draws_finds_more() -> None:
    """The masks are found with the images: the error of these falls, and a null ignores what was sent."""
    case = drop_features(p=0.7)
    errors = []
    for draws in (False, True):
        (found,) = inverting_gradients(steps=300, give_up=0.0, tv=0.0, draws=draws)([case], rng=torch.Generator().manual_seed(0))
        errors.append(float((found.x - draw_images()).square().mean()))
    assert errors[1] < 0.7 * errors[0]
    (seen,) = case.observations
    other = drop_features(p=0.7)
    other = Case(
        (
            replace(
                other.observations[0], payload=observe_steps((draw_images() ** 2, LABELS), model=seen.model, data=DATA).payload
            ),
        )
    )
    nulls = [
        inverting_gradients(steps=3, draws=True).null()([one], rng=torch.Generator().manual_seed(0))[0].x
        for one in (replace(case, known_labels=None), other)
    ]
    assert torch.equal(nulls[0], nulls[1])


def test_draws_that_cannot_be_searched_are_refused() -> None:
    plain = Case((observe_steps((draw_images(), LABELS), model=ModelSpec(name="lenet_dlg"), data=DATA),))
    assert CaseBatch(inverting_gradients(draws=True), [plain]).draws is None
    flipped = mix_examples(torch.eye(2), "instahide(k=2)")
    with pytest.raises(ValueError, match="only with flips=0 and without public images"):
        CaseBatch(inverting_gradients(draws=True), [flipped])
    assert CaseBatch(inverting_gradients(draws=True), [mix_examples(torch.eye(2), "instahide(k=2, flips=0)")]).draws
    twice = observe_steps(*[(draw_images(), LABELS)] * 2, model=ModelSpec(name="mlp", network="dropout(0.5)"), data=DATA)
    with pytest.raises(ValueError, match="took several steps for its 4 examples"):
        CaseBatch(inverting_gradients(draws=True), [Case((twice,))])
    with pytest.raises(ValueError, match="a client drew in one local step, and needs local_steps=one_batch"):
        Simulation(draws=True, local_steps="simulated")
