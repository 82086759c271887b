"""Tests of the Cocktail Party attack, which separates mixed examples: sources, their scale and sign, whole batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from generators import seeded
from observations import observe_rounds
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import FastICA
from torch import Tensor, nn

from attacker.attacks import AttackSpec, Case, Need, cocktail_party, find_unmet
from attacker.attacks.closed_form.cocktail.attack import join_bias
from attacker.attacks.closed_form.cocktail.components import (
    Unmixing,
    keep_in_range,
    measure_excess,
    run_fast_ica,
    separate,
    whiten,
)
from attacker.attacks.closed_form.cocktail.features import FeatureLayer, find_feature_layer, scale_features
from attacker.attacks.closed_form.cocktail.mixtures import differentiate_images, read_mixtures, scale_images
from attacker.attacks.closed_form.cocktail.published_loss import PublishedLoss, search_published
from attacker.attacks.closed_form.linear.low_rank import factorise
from attacker.attacks.closed_form.linear.refinement import refine_directions
from attacker.attacks.closed_form.observations import observe
from attacker.scoring.metrics import psnr
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.codec import encode

DATA = DataSpec(shape=(3, 16, 16), num_classes=5, mean=(0.4,) * 3, std=(0.25,) * 3)
WIDE = ModelSpec(name="mlp", arguments={"hidden": [192]})


def draw_images(count: int, seed: int = 0) -> Tensor:
    """Return images of random rectangles, some transparent, over a gradient of brightness, (N, 3, 16, 16) in [0, 1]."""
    rng = seeded(seed)
    ramp = torch.linspace(-1, 1, 16).expand(16, 16)
    x = torch.rand(count, 3, 1, 1, generator=rng) + 0.3 * torch.rand(count, 1, 1, 1, generator=rng) * ramp
    for image in x:
        for _ in range(6):
            top, left, height, width = torch.randint(0, 12, (4,), generator=rng).tolist()
            colour, alpha = torch.rand(3, 1, 1, generator=rng), 0.5 + 0.5 * float(torch.rand(1, generator=rng))
            part = image[:, top : top + height + 2, left : left + width + 2]
            part.mul_(1 - alpha).add_(alpha * colour)
    return x.clamp(0, 1)


def make_case(x: Tensor, y: Tensor, *, model: ModelSpec = WIDE, steps: int = 1, change: float = 1.0) -> Case:
    """Return the attack input (case) of one update. change: factor of the gradient of the first layer's bias."""
    batches = list(zip(x.chunk(steps), y.chunk(steps), strict=True))
    (seen,) = observe_rounds([batches], model=model, data=DATA, learning_rate=1e-3).observations
    update = {name: change * u if name == "1.bias" else u for name, u in seen.update.items()}
    return Case((replace(seen, payload=encode(update)),))


def measure(found: Tensor, x: Tensor) -> Tensor:
    """Return the PSNR of each original (N,) to the reconstruction that it is assigned to."""
    pairs = torch.stack([psnr(one.clamp(0, 1).expand_as(x), x) for one in found])
    rows, columns = linear_sum_assignment(-pairs.numpy())
    return pairs[rows, columns]


def make_mixtures(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return 6 independent sparse sources (6, 2000), and 10 mixtures of them."""
    rng = np.random.default_rng(seed)
    sources = torch.tensor(rng.laplace(size=(6, 2000)))
    return sources, torch.tensor(rng.normal(size=(10, 6))) @ sources


def correlate(found: Tensor, sources: Tensor) -> Tensor:
    """Return the largest absolute correlation of each source with a component."""
    return torch.corrcoef(torch.cat([sources, found.double()]))[: len(sources), len(sources) :].abs().amax(dim=1)


def test_sources_agree_with_fast_ica_of_scikit_learn() -> None:
    sources, mixed = make_mixtures()
    _, z = whiten(mixed, 6)
    torch.testing.assert_close(z @ z.T / z.shape[1], torch.eye(6, dtype=z.dtype))
    oracle = FastICA(6, whiten="unit-variance", random_state=0, max_iter=1000).fit_transform(mixed.T.numpy()).T
    first, both = run_fast_ica(z.float(), seeded()), separate(z, seeded())
    assert correlate(torch.tensor(oracle), sources).min() > 0.99
    assert correlate(first @ z.float(), torch.tensor(oracle)).min() > 0.999
    assert correlate(both.matrix @ z.float(), sources).min() > correlate(first @ z.float(), sources).min()


def test_components_do_not_depend_on_the_order_and_scale_of_mixtures() -> None:
    sources, mixed = make_mixtures(1)
    changed = mixed.flip(0) * torch.linspace(-2, 3, 10)[:, None]
    for one in (mixed, changed):
        _, z = whiten(one, 6)
        assert correlate(separate(z, seeded()).matrix @ z.float(), sources).min() > 0.99


def test_pixels_outside_the_range_are_an_excess_for_any_factor() -> None:
    x = draw_images(2)
    x[1, 0, 0, 0] = 1.5
    vectors = torch.cat([DATA.normalise(x).flatten(1), torch.ones(2, 1)], dim=1)
    for factor in (1.0, -3.0):
        inside, outside = measure_excess(factor * vectors, DATA).tolist()
        assert inside == pytest.approx(0, abs=1e-10)
        assert outside == pytest.approx(0.25 / 768, rel=1e-3)


def test_range_of_pixels_corrects_an_unmixing_that_leaves_it() -> None:
    x = draw_images(4)
    vectors = torch.cat([DATA.normalise(x).flatten(1), torch.ones(4, 1)], dim=1).double()
    differences = differentiate_images(vectors[:, :-1], DATA)
    wrong = torch.eye(4) + 0.3 * torch.randn(4, 4, generator=seeded())
    kept = keep_in_range(Unmixing(wrong, 1.5), differences, vectors, DATA)
    before, after = (measure_excess(w @ vectors.float(), DATA) for w in (wrong, kept.matrix))
    assert float(after.mean()) < 0.1 * float(before.mean())
    errors = [float(measure(scale_images(w.double() @ vectors, DATA).float(), x).mean()) for w in (wrong, kept.matrix)]
    assert errors[1] > errors[0] + 3  # dB
    assert kept.loss == 1.5


def test_the_last_entry_fixes_scale_and_sign() -> None:
    x = draw_images(3)
    vectors = torch.cat([DATA.normalise(x).flatten(1), torch.ones(3, 1)], dim=1).double()
    factors = torch.tensor([[2.0], [-0.1], [-7.0]])
    torch.testing.assert_close(scale_images(factors * vectors, DATA).float(), x)
    flipped = scale_images(vectors * torch.cat([torch.ones(768), -torch.ones(1)]), DATA).float()
    torch.testing.assert_close(flipped, 0.8 - x)  # mirrored at the mean of the data: no sign is guessed from the image


def test_differences_of_neighbours_do_not_depend_on_the_brightness() -> None:
    x = draw_images(2)
    one, other = (differentiate_images(DATA.normalise(v).flatten(1), DATA) for v in (x, x + 0.3))
    torch.testing.assert_close(one, other)
    assert one.shape == (2, 2 * 3 * 15 * 16)


def test_batch_of_sixteen_is_recovered_far_better_than_by_the_null() -> None:
    x, y = draw_images(16), torch.arange(16) % 5
    case = make_case(x, y)
    null = AttackSpec(name="cocktail_party", null=True).build()([case], rng=seeded())[0]
    plain = cocktail_party(refine=False)([case], rng=seeded())[0]
    found = cocktail_party()([case], rng=seeded())[0]
    assert measure(plain.x, x).median() > measure(null.x, x).median() + 10
    assert measure(found.x, x).min() > 60
    assert found.route == "separated, refined by zeros"
    assert found.y[((found.x[None] - x[:, None]).flatten(2).norm(dim=2)).argmin(dim=1)].tolist() == y.tolist()


def test_negated_bias_gradient_prevents_the_recovery() -> None:
    x, y = draw_images(16), torch.arange(16) % 5
    flipped = cocktail_party(refine=False)([make_case(x, y, change=-1.0)], rng=seeded())[0]
    grey = torch.full_like(x, 0.5)
    assert measure(flipped.x, x).median() < measure(grey, x).median() + 3


def test_sums_of_local_steps_are_separated_as_well() -> None:
    x, y = draw_images(16, seed=3), torch.arange(16) % 5
    found = cocktail_party(refine=False)([make_case(x, y, steps=2)], rng=seeded())[0]
    assert len(found.x) == 16
    assert measure(found.x, x).median() > measure(torch.full_like(x, 0.5), x).median() + 8


def test_equal_examples_and_noise_give_an_answer_without_high_confidence() -> None:
    x, y = draw_images(16), torch.arange(16) % 5
    x[1] = x[0]
    twice = cocktail_party()([make_case(x, y)], rng=seeded())[0]
    assert twice.x.shape == x.shape
    assert bool((twice.x[-1] == 0.5).all())
    assert any("15 of 16 examples could be separated" in note for note in twice.notes)
    seen = make_case(x, y).observations[0]
    noisy = {name: u + 0.1 * u.std() * torch.randn(u.shape, generator=seeded()) for name, u in seen.update.items()}
    found = cocktail_party()([Case((replace(seen, payload=encode(noisy)),))], rng=seeded())[0]
    assert bool(torch.isfinite(found.x).all())
    assert not bool((found.confidence > 0.9).any())


def test_zeros_of_the_gradient_make_approximate_directions_exact() -> None:
    x, y = draw_images(12, seed=1), torch.arange(12) % 5
    case = make_case(x, y)
    seen = case.observations[0]
    rows = torch.cat([seen.update["1.weight"], seen.update["1.bias"][:, None]], dim=1).double()
    forward = torch.cat([seen.weights["1.weight"], seen.weights["1.bias"][:, None]], dim=1).double()
    factors = factorise(rows, 12)
    true = torch.cat([DATA.normalise(x).flatten(1), torch.ones(12, 1)], dim=1).double()
    near = true + 0.03 * torch.randn(12, 12, generator=seeded(), dtype=torch.float64) @ true
    found = refine_directions(factors, near @ factors.basis.T, forward @ factors.basis.T, factors.basis[:, -1])
    vectors = torch.linalg.inv(found.directions.q) @ factors.basis
    assert bool(found.replaced.all())
    assert measure(scale_images(near, DATA).float(), x).max() < 50
    assert measure(scale_images(vectors, DATA).float(), x).min() > 70


class RectifiedFeatures(nn.Module):
    """Convolutions with ReLU before a linear layer of 128 neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc1, self.fc2 = nn.Linear(1024, 128), nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(torch.relu(self.fc1(self.before(x))))
        return logits


def rectified() -> nn.Module:
    return RectifiedFeatures()


def test_features_behind_convolutions_are_separated_and_inverted() -> None:
    models.admit(name := f"{__name__}:{rectified.__name__}")
    x, y = draw_images(8, seed=4), torch.arange(8) % 5
    case = make_case(x, y, model=ModelSpec(name=name))
    observed, attack = observe([case]), cocktail_party()
    layer = find_feature_layer(observed)
    assert layer == FeatureLayer("fc1.weight", "fc1.bias")
    mixtures = read_mixtures(join_bias(layer, observed.gradient), 8)
    found = attack._separate(mixtures, observed, layer, seeded(), data=None)
    state = {name: w.float() for name, w in observed.get_weights(0).items()}
    network = observed.model.get_submodule("before")
    own = {name.removeprefix("before."): w for name, w in state.items() if name.startswith("before.")}
    true = torch.func.functional_call(network, own, (DATA.normalise(x),)).double()
    features = scale_features(found.vectors, biased=True)
    alike = torch.nn.functional.cosine_similarity(features[:, None], true[None], dim=2)
    assert alike.amax(dim=0).min() > 0.999
    assert sorted(alike.argmax(dim=0).tolist()) == list(range(8))  # in any order, each once
    assert torch.nn.functional.cosine_similarity(scale_features(-found.vectors, biased=True), features).min() > 0.999
    inverted = attack([case], rng=seeded())[0]
    assert inverted.route == "separated, refined by zeros, features inverted"
    assert measure(inverted.x, x).mean() > measure(torch.full_like(x, 0.5), x).mean() + 3


def test_the_published_loss_prefers_the_sources_and_its_search_lowers_it() -> None:
    x = draw_images(6).flatten(1).double()
    u, _, v = torch.linalg.svd(x - x.mean(dim=1, keepdim=True), full_matrices=False)
    sources = u @ v * x.shape[1] ** 0.5  # the nearest uncorrelated images
    turn = torch.linalg.qr(torch.randn(6, 6, generator=seeded(), dtype=torch.float64))[0]
    loss = PublishedLoss((turn.T @ sources).float(), torch.zeros(6, 1), DATA)
    true, start, flipped = (float(loss.compute(w.float()[None])) for w in (turn, torch.eye(6), -turn))
    assert true < start - 0.1
    assert flipped == pytest.approx(true, rel=1e-4)  # the loss cannot tell an image from its negative
    short, long = (search_published(loss, steps=n, restarts=2, rng=seeded()).loss for n in (1, 1500))
    assert long < short - 0.05


def test_inseparable_batch_unknown_criterion_and_table_rows_are_refused() -> None:
    narrow = ModelSpec(name="mlp", arguments={"hidden": [8]})
    x, y = draw_images(12), torch.arange(12) % 5
    with pytest.raises(
        ValueError, match="12 examples, but this attack separates at most 8 by the gradient of a layer of 8 neurons"
    ):
        cocktail_party()([make_case(x, y, model=narrow)], rng=seeded())
    with pytest.raises(ValueError, match="unknown criterion 'best'"):
        cocktail_party(criterion="best")
    models.admit(name := f"{__name__}:{rectified.__name__}")
    behind = make_case(draw_images(4), torch.arange(4), model=ModelSpec(name=name))
    with pytest.raises(ValueError, match=r"criterion=published needs .* set criterion=likelihood"):
        cocktail_party(criterion="published", steps=1, inversion_steps=1)([behind], rng=seeded())
    rows = replace(make_case(x, y).observations[0], data=DataSpec(shape=(7,), num_classes=5))
    assert Need.IMAGES.value in find_unmet(cocktail_party(), Case((rows,)))
