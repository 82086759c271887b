"""Tests of images that independent component analysis separates in the spans of batches, clients and secure sums."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
import torch
from generators import seeded
from observations import make_observation, observe_sums
from torch import Tensor

from attacker.attacks import Case, cohort_spans, spans
from attacker.attacks.multi_round.spans.cohort_attack import list_owners
from attacker.attacks.multi_round.spans.components import (
    EstimatedImages,
    MixedImages,
    add_components,
    append_estimates,
    correlate,
    find_known,
    is_separable,
    mix_images,
    separate_images,
)
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples
from attacker.attacks.multi_round.spans.layer_updates import LayerUpdates, convert_to_examples
from attacker.attacks.multi_round.spans.row_space import RowSpace
from attacker.attacks.multi_round.spans.same_batch import make_factors
from fedsim import data, models
from fedsim.recording import DataSpec, ModelSpec, Training
from fedsim.training.local import train

PHOTOS = data.load("photos", size=32)
DATA, CLIENT_IMAGES = PHOTOS.spec, 4
PAIRS = (("a", "b"), ("a", "c"), ("b", "c"), ("a", "b"), ("a", "c"), ("b", "c"))


def draw_photos(count: int, *, seed: int = 5) -> Tensor:
    """Return photographs (count, 3, 32, 32), whose values are multiples of 1/255."""
    rows = torch.randperm(len(PHOTOS.train), generator=seeded(seed))[:count]
    return PHOTOS.train[rows.numpy()][0]


def join_ones(x: Tensor) -> Tensor:
    """Return the vectors [x, 1] (N, F) of examples."""
    flat = DATA.normalise(x.double()).flatten(1)
    return torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)


def mix(x: Tensor) -> MixedImages:
    """Return the span of examples, without rows."""
    basis = torch.linalg.qr(join_ones(x).T).Q.T
    turned = torch.linalg.qr(torch.randn(len(x), len(x), generator=seeded(1), dtype=torch.float64)).Q @ basis
    return mix_images(make_factors(turned[:, :0].T, turned, turned[:0, 0]), (0,), None)


def measure_psnr(found: Tensor, x: Tensor) -> Tensor:
    """Return the PSNR (N,) in dB of the answer nearest to each of N images, at most 200; -inf without an answer."""
    if not len(found):
        return torch.full((len(x),), -torch.inf)
    errors = (found.clamp(0, 1)[:, None].double() - x[None].double()).square().flatten(2).mean(dim=2)
    return -10 * errors.amin(dim=0).clamp(min=1e-20).log10()


def make_sums(cohorts: Sequence[tuple[str, ...]], x: Tensor, *, steps: int = 2, hidden: int = 64) -> Case:
    """Return secure sums of clients a, b, ..., each with CLIENT_IMAGES of the images x, which it uses in every round."""
    model = ModelSpec(name="mlp", arguments={"hidden": [hidden]})

    def draw_batches(number: int, name: str) -> list[tuple[Tensor, Tensor]]:
        first = CLIENT_IMAGES * (ord(name) - ord("a"))
        rows = first + torch.randperm(CLIENT_IMAGES, generator=seeded(100 * number + first))
        return [(x[part], part % DATA.num_classes) for part in rows.split(CLIENT_IMAGES // steps)]

    rounds = [{name: draw_batches(number, name) for name in cohort} for number, cohort in enumerate(cohorts, start=1)]
    return observe_sums(rounds, model=model, data=DATA, seed=2, learning_rate=0.02)


def test_estimates_are_the_images_of_a_span_with_their_sign_and_scale() -> None:
    x = draw_photos(6)
    exact, found = separate_images(mix(x), torch.zeros(0, prod(DATA.shape) + 1, dtype=torch.float64), DATA, seeded())
    assert len(exact) == 0
    assert len(found) == 6
    assert torch.equal(found[:, -1], torch.ones(6, dtype=torch.float64))
    assert float(measure_psnr(convert_to_examples(found, DATA), x).median()) > 20


def test_known_images_are_not_estimated_again() -> None:
    x = draw_photos(6)
    _, found = separate_images(mix(x), -3 * join_ones(x[:4]), DATA, seeded())
    assert len(found) == 2
    near = measure_psnr(convert_to_examples(found, DATA), x)
    assert bool((near[:4] < 20).all())
    assert bool((near[4:] > 15).all())


def test_correlation_ignores_factors_and_tells_images_apart() -> None:
    x = join_ones(draw_photos(4))
    found = correlate(x, x * torch.tensor([[2.0], [-0.1], [1e6], [-1e-6]]), DATA)
    torch.testing.assert_close(found.diagonal(), torch.ones(4, dtype=torch.float64))
    assert float((found - torch.eye(4)).max()) < 0.5


def test_copies_of_an_image_are_one_estimate_in_all_of_their_updates() -> None:
    """Image 0 is in both spans; of the others each is in one. The span of all five images has nothing new."""
    x = draw_photos(5)
    nothing = RecoveredExamples(torch.zeros(0, prod(DATA.shape) + 1, dtype=torch.float64), torch.zeros(0), ())
    space = RowSpace(join_ones(x[:1]), torch.ones(1, 1), torch.ones(1), 1.0, saturated=False)
    updates = LayerUpdates([space, space], {}, DATA)
    parts = [replace(mix(x[:3]), holders=(0,)), replace(mix(x[[0, 3, 4]]), holders=(1,))]
    found, estimates = add_components(nothing, parts, updates, seeded())
    assert isinstance(estimates, EstimatedImages)
    assert len(found.vectors) == 0
    assert sorted(estimates.holders) == [(0,), (0,), (0, 1), (1,), (1,)]
    shared = convert_to_examples(estimates.vectors[[own == (0, 1) for own in estimates.holders]], DATA)
    assert measure_psnr(shared, x).argmax() == 0
    whole = replace(mix(x), holders=(0,))
    covered = add_components(nothing, [parts[0], replace(mix(x[:4]), holders=(0,))], updates, seeded())[1]
    assert len(covered.holders) == 4
    assert len(add_components(nothing, [parts[0], whole], updates, seeded())[1].holders) == 5


def test_estimates_rank_before_examples_with_large_errors() -> None:
    vectors = torch.tensor([[1.0, 10.0], [2.0, 1e6], [3.0, 1e6]])
    found = RecoveredExamples(vectors, torch.tensor([50.0, 0.0, torch.inf]), ((0,), (1,), (2,)))
    joined = append_estimates(found, EstimatedImages(torch.tensor([[4.0, 1.0]]), ((3, 4),)))
    assert joined.vectors[:, 0].tolist() == [2.0, 3.0, 4.0, 1.0]
    assert joined.clearance.tolist() == [0.0, torch.inf, 0.0, 50.0]
    assert joined.holders == ((1,), (2,), (3, 4), (0,))


def test_only_precise_examples_without_doubt_are_known() -> None:
    vectors = torch.tensor([[1.0, 1e6], [1.0, 1e6], [1.0, 10.0]])
    found = RecoveredExamples(vectors, torch.tensor([torch.inf, 0.0, torch.inf]), ((), (), ()))
    assert find_known(found).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("shape", "rank", "separable"), [((3, 32, 32), 64, True), ((3, 32, 32), 65, False), ((1, 8, 8), 5, False)]
)
def test_spans_are_separated_if_they_are_small_for_the_images(shape: tuple[int, ...], rank: int, separable: bool) -> None:
    assert is_separable(rank, DataSpec(shape=shape, num_classes=2)) == separable
    assert not is_separable(2, DataSpec(shape=(3000,), num_classes=2))
    assert not is_separable(2, DataSpec(shape=(1, 1, 3000), num_classes=2))


@pytest.mark.parametrize(
    ("gap", "complete", "saturated", "whole"),
    [(1.1, True, False, True), (1.1, False, False, False), (5.0, False, False, True), (5.0, True, True, False)],
)
def test_spaces_with_dimensions_hidden_by_noise_are_not_separated(
    gap: float, complete: bool, saturated: bool, whole: bool
) -> None:
    space = RowSpace(torch.ones(1, 4), torch.ones(3, 1), torch.ones(3), gap, saturated=saturated, complete=complete)
    assert space.is_whole == whole


def test_components_open_clients_that_lone_rows_do_not() -> None:
    """Behind a narrow layer few neurons are turned on by one image alone. More are certain, and all of these are right."""
    x = draw_photos(12, seed=3)
    case = make_sums(PAIRS, x, hidden=40)
    (before,) = cohort_spans(components=False)([case], rng=seeded())
    (after,) = cohort_spans()([case], rng=seeded())
    exact = [measure_psnr(one.x, x) > 60 for one in (before, after)]
    assert int(exact[1].sum()) > int(exact[0].sum())
    assert float((measure_psnr(after.x, x) > 20).float().mean()) >= 0.9
    certain = after.confidence > 0.9
    assert int(certain.sum()) > int((before.confidence > 0.9).sum())
    assert float(measure_psnr(x, after.x[certain]).min()) > 60
    names = ["abc"[i // CLIENT_IMAGES] for i in range(12)]
    errors = (after.x[:, None] - x[None]).abs().flatten(2).amax(dim=2)
    for i in certain.nonzero()[:, 0].tolist():
        assert list_owners(after)[i] in ("", names[int(errors[i].argmin())])


def test_estimates_are_undecided_and_need_no_eight_bits() -> None:
    """Images off the grid of 1/255 are estimated as well, but no zeros of ReLU make an estimate certain."""
    x = (draw_photos(8) + 0.4 / 255 * torch.rand(8, *DATA.shape, generator=seeded(4))).clamp(0, 1)
    case = make_sums((("a", "b"),) * 2, x)
    (before,) = cohort_spans(components=False)([case], rng=seeded())
    (found,) = cohort_spans()([case], rng=seeded())
    assert int((found.confidence > 0.9).sum()) == int((before.confidence > 0.9).sum())
    assert float((measure_psnr(found.x, x) > 15).float().mean()) > float((measure_psnr(before.x, x) > 15).float().mean())
    assert set(list_owners(found)) == {""}


def test_batches_behind_noise_are_estimated() -> None:
    x, model, training = (
        draw_photos(8),
        ModelSpec(name="mlp", arguments={"hidden": [64]}),
        Training(learning_rate=0.02, batch_size=8, steps=1),
    )
    network = models.build(model, DATA, seed=2)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    update = train(network, weights, [(x, torch.arange(8))], training, DATA).update
    noisy = {name: u + 1e-2 * u.std() * torch.randn(u.shape, generator=seeded(6)) for name, u in update.items()}
    case = Case((make_observation(noisy, weights, model=model, data=DATA, training=training, num_examples=8),))
    (found,) = spans()([case], rng=seeded())
    assert bool(found.confidence.isnan().all())
    assert float((measure_psnr(found.x, x) > 18).float().mean()) >= 0.5
    assert any("estimated by independent component analysis" in note for note in found.notes)
