"""Tests of features recovered by tensors: moments against Hermite polynomials, and known features behind known weights."""

from itertools import permutations

import pytest
import torch
from torch import Generator, Tensor

from attacker.attacks.gradients.tensor_features import (
    compute_first_moment,
    compute_fourth_moment,
    compute_second_moment,
    find_span,
    recover_features,
    separate_directions,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def test_moments_along_one_direction_are_hermite_polynomials() -> None:
    """He_p(v) contracted p times with a unit vector u is the polynomial He_p(u . v)."""
    g, v, u = draw(50, seed=1), draw(50, 3, seed=2), torch.nn.functional.normalize(draw(3, seed=3), dim=0)
    h = v @ u
    moments = (compute_first_moment(g, v), compute_second_moment(g, v), compute_fourth_moment(g, v, u))
    for moment, polynomial in zip(moments, (h, h**2 - 1, h**4 - 6 * h**2 + 3), strict=True):
        while moment.ndim:
            moment = moment @ u
        assert float(moment) == pytest.approx(float((g * polynomial).mean()), rel=1e-9)


def test_the_fourth_moment_is_symmetric() -> None:
    g, v, u = draw(40, seed=1), draw(40, 3, seed=2), torch.nn.functional.normalize(draw(3, seed=3), dim=0)
    moment = compute_fourth_moment(g, v, u)
    for order in permutations(range(3)):
        torch.testing.assert_close(moment.permute(order), moment)


def test_directions_of_several_examples_are_separated() -> None:
    """With very many neurons."""
    w = draw(200_000, 5, seed=1)
    z = torch.tensor([[1.0, 0, 0, 0, 0], [0.28, 0.96, 0, 0, 0]], dtype=torch.float64)
    g = torch.relu(w @ z.T) @ torch.tensor([0.7, 0.4], dtype=torch.float64)
    span = find_span(g, w, 2)
    assert float((z - z @ span @ span.T).norm(dim=1).max()) < 0.1
    found = separate_directions(g, w, span, rng=Generator().manual_seed(0))
    assert float((found @ z.T).abs().max(dim=0).values.min()) > 0.98


class Batch:
    """Known features z (N, F) with labels, and the gradient of a last layer behind a Gaussian layer and ReLU."""

    def __init__(self, labels: list[int], *, neurons: int, features: int = 32, noise: float = 0.0) -> None:
        self.y, self.w = torch.tensor(labels), draw(neurons, features, seed=1)
        self.z = draw(len(labels), features, seed=2) + draw(features, seed=3)
        hidden = (self.z @ self.w.T).relu()
        logits = hidden @ draw(10, neurons, seed=4).T / neurons**0.5 / features
        slopes = (logits.softmax(dim=1) - torch.nn.functional.one_hot(self.y, 10)) / len(labels)
        self.gradient, self.bias = slopes.T @ hidden, slopes.sum(dim=0)
        self.gradient = self.gradient + noise * self.gradient.std() * draw(*self.gradient.shape, seed=5)

    def measure_errors(self) -> tuple[Tensor, Tensor]:
        """Return the norm of what is outside its basis of each feature vector of norm 1, (N,), and the agreement, (N,)."""
        rng = Generator().manual_seed(0)
        found = recover_features(self.gradient, self.bias, self.y, weight=3 * self.w, rng=rng)
        unit = torch.nn.functional.normalize(self.z, dim=1)
        inside = torch.einsum("nfr,nf->nr", found.bases, unit).square().sum(dim=1)
        return (1 - inside).clamp(min=0).sqrt(), found.agreement


@pytest.mark.parametrize("neurons", [2048, 8192])
def test_error_is_flat_in_the_batch_size_and_falls_with_the_root_of_the_neurons(neurons: int) -> None:
    errors = [float(Batch(labels, neurons=neurons).measure_errors()[0].mean()) for labels in ([3], [3, 5], [*range(8)])]
    expected = 1.2 * (32 / neurons) ** 0.5
    assert all(0.6 * expected < error < 1.6 * expected for error in errors), errors


def test_noise_raises_the_error_and_lowers_the_agreement() -> None:
    (clean, agreed), (noisy, disagreed) = (Batch([3, 5], neurons=2048, noise=noise).measure_errors() for noise in (0, 8))
    assert float(clean.mean()) < 0.25 < 0.4 < float(noisy.mean())
    assert float(disagreed.mean()) < 0.7 < 0.9 < float(agreed.mean())


def test_examples_of_one_label_share_a_span_or_are_separated_by_very_many_neurons() -> None:
    shared = Batch([3, 3, 5], neurons=8192)
    found = recover_features(shared.gradient, shared.bias, shared.y, weight=shared.w, rng=Generator().manual_seed(0))
    assert found.bases.shape == (3, 32, 2)
    assert torch.equal(found.bases[0], found.bases[1])
    torch.testing.assert_close(found.bases[0].T @ found.bases[0], torch.eye(2, dtype=torch.float64))
    assert not found.bases[2, :, 1].any()
    errors, _ = shared.measure_errors()
    alone = torch.nn.functional.normalize(shared.z, dim=1)
    mean = torch.nn.functional.normalize(shared.z[:2].mean(dim=0), dim=0)
    assert float(errors[:2].mean()) < float((1 - (alone[:2] @ mean).square()).sqrt().mean())
    apart = Batch([3, 3], neurons=200_000, features=5)
    found = recover_features(apart.gradient, apart.bias, apart.y, weight=apart.w, rng=Generator().manual_seed(0))
    assert not found.bases[:, :, 1].any()
    assert not torch.equal(found.bases[0], found.bases[1])


def test_without_a_bias_probabilities_are_taken_as_equal() -> None:
    batch = Batch([3, 5, 7], neurons=8192)
    found = recover_features(batch.gradient, None, batch.y, weight=batch.w, rng=Generator().manual_seed(0))
    cosine = torch.einsum("nfr,nf->nr", found.bases, torch.nn.functional.normalize(batch.z, dim=1))[:, 0]
    assert float(cosine.min()) > 0.95  # positive: the derivative by an example's own logit is negative


@pytest.mark.parametrize("labels", [[3], [3, 5, 7]])
def test_bias_entries_that_were_not_sent_count_as_unknown(labels: list[int]) -> None:
    """Only the largest entry of the bias gradient is left, which alone would say that the prediction is certain."""
    batch = Batch(labels, neurons=8192)
    clean, _ = batch.measure_errors()
    batch.bias = torch.where(batch.bias.abs() == batch.bias.abs().max(), batch.bias, 0)
    errors, agreed = batch.measure_errors()
    assert float(errors.max()) < float(clean.max()) + 0.05
    assert float(agreed.min()) > 0.9
