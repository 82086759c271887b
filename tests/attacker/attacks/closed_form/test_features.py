"""Tests of the closed form (route) `features`: each example is recovered alone, and refusals give their reason."""

from typing import Any

import pytest
import torch
from generators import seeded
from observations import observe_steps
from torch import Tensor, nn

import fedleak
from attacker.attacks import Case, cpl, exact
from attacker.attacks.closed_form.features import find_map_estimate
from attacker.attacks.matching.smooth_images import PIXEL_DEVIATION, build_smooth_spread
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(1, 16, 16), num_classes=12)


def smooth_images(count: int, data: DataSpec = DATA) -> Tensor:
    """Draw images from the smoothness prior."""
    spread = build_smooth_spread(data)
    return (0.5 + spread(torch.randn(count, *data.shape, generator=seeded(5), dtype=torch.float64))).clamp(0, 1).float()


def batch(labels: list[int], **settings: Any) -> tuple[Case, Tensor, Tensor]:
    x, y = smooth_images(len(labels)), torch.tensor(labels)
    return Case((observe_steps((x, y), model=ModelSpec(name="lenet_cpl"), data=DATA, **settings),)), x, y


def squared_errors(found: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of each example to the true one with the same label."""
    order = [found.y.tolist().index(int(label)) for label in y]
    return (found.x[order].clamp(0, 1) - x).square().flatten(1).mean(dim=1)


def test_every_example_of_a_batch_is_recovered_with_its_label() -> None:
    case, x, y = batch([3, 0, 7, 9, 1, 5, 11, 4])
    (found,) = exact(route="features")([case], rng=seeded())
    assert found.route == "features"
    assert sorted(found.y.tolist()) == sorted(y.tolist())
    assert float(squared_errors(found, x, y).max()) < 0.2 * float(x.var())
    assert any("smooth" in note for note in found.notes)
    assert bool(found.confidence.isnan().all()), "answers by features have no curve"


def test_search_that_starts_from_features_has_a_lower_error() -> None:
    case, x, y = batch([3, 0, 7, 9])
    (alone,) = cpl(optimiser="wolfe", tv=1e-5, steps=6)([case], rng=seeded())
    (found,) = cpl(optimiser="wolfe", tv=1e-5, steps=6, features=True)([case], rng=seeded())
    assert found.route == "optimisation from a closed form"
    assert found.loss[-1] < alone.loss[-1]
    assert float(squared_errors(found, x, y).mean()) < 0.3 * float(squared_errors(alone, x, y).mean())


def test_map_estimate_is_the_posterior_mean_for_linear_features() -> None:
    """For linear features and a Gaussian prior, the estimate has a closed form: the posterior mean."""
    data = DataSpec(shape=(1, 4, 4), num_classes=2)
    spread = build_smooth_spread(data)
    matrix = torch.randn(5, 16, generator=seeded(1), dtype=torch.float64)
    x = 0.5 + spread(torch.randn(1, 4, 4, generator=seeded(2), dtype=torch.float64))
    found = find_map_estimate(lambda one: matrix.to(one) @ one.flatten(), matrix @ x.flatten(), spread, data.shape)
    root = torch.stack([spread(e.reshape(1, 4, 4)).flatten() for e in torch.eye(16, dtype=torch.float64)])
    covariance = root @ root.T
    expected = 0.5 + covariance @ matrix.T @ torch.linalg.solve(matrix @ covariance @ matrix.T, matrix @ (x.flatten() - 0.5))
    torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(root, root.T)


def test_smoothness_prior_has_the_stated_deviation_and_keeps_table_rows() -> None:
    drawn = build_smooth_spread(DATA)(torch.randn(200, *DATA.shape, generator=seeded(3), dtype=torch.float64))
    assert float(drawn.std()) == pytest.approx(PIXEL_DEVIATION, rel=0.1)
    neighbours = (drawn[..., 1:] - drawn[..., :-1]).std()
    assert float(neighbours) < 0.5 * PIXEL_DEVIATION
    rows = build_smooth_spread(DataSpec(shape=(7,), num_classes=2))
    assert torch.equal(rows(torch.ones(7)), torch.full((7,), PIXEL_DEVIATION))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"defense": "withhold(['9.*'])"}, "is zero or was not sent"), ({"defense": "gaussian(10.0)"}, "unexplained")],
)
def test_unreadable_features_are_refused_with_the_reason(change: dict[str, Any], words: str) -> None:
    case, _, _ = batch([3, 0], **change)
    with pytest.raises(ValueError, match=words):
        exact(route="features")([case], rng=seeded())


def test_reason_of_a_closed_form_that_was_tried_comes_before_those_of_unsuitable_ones() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(196, 10))
    noise = [torch.randn(tensor.shape, generator=seeded(1)) for tensor in net.parameters()]
    observation = fedleak.observe(net, nn.CrossEntropyLoss(), noise, shape=(1, 16, 16))
    with pytest.raises(ValueError, match=r"^the features found leave .* linear.* cannot invert this network"):
        exact(fallback="none")([Case((observation,))], rng=seeded())
