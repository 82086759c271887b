"""The terms of a search's loss other than the distance of gradients: priors, statistics, features, local epochs and labels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacker.attacks.matching.feature_matching import measure_feature_mismatch, measure_span_mismatch
from attacker.attacks.matching.loss.problems import Decode, ProblemRow
from attacker.attacks.matching.loss.view import View
from attacker.attacks.matching.parametrisation import LatentSpace
from attacker.attacks.matching.priors import measure_noise
from attacker.attacks.matching.settings import MatchingSettings
from attacker.attacks.simulation.gradients import predict
from attacker.attacks.simulation.local_steps import measure_disagreement
from fedsim import models

NOISE_SHIFT = 997
"""Total shift of the noise over a whole search, in multiples of the number of noise values. In each step, a value is at another
pixel."""


class LossTerms:
    """The sum of the terms of a problem's loss other than the distance of gradients.

    space: the latent space. epochs: number of local epochs, each of which has its own copies of the examples; 1 if the epochs
    share them.
    views_with_statistics: indices of the views whose clients returned statistics of batch norm that the loss includes.
    """

    def __init__(
        self,
        attack: MatchingSettings,
        views: Sequence[View],
        space: LatentSpace,
        epochs: int,
        views_with_statistics: Sequence[int],
    ) -> None:
        self.attack, self.views, self.space = attack, views, space
        self.epochs, self.views_with_statistics = epochs, views_with_statistics

    def __call__(self, z: Tensor, problem: ProblemRow, *, decode: Decode, share: float) -> Tensor:
        """Return the sum of one problem's loss terms other than the gradient distance, a 0-d tensor.

        The terms are the priors, the mismatches of batch norm's statistics and of features, the difference between the examples
        of local epochs, and the disagreement of predictions and labels.
        decode: function that maps z to examples and labels. share: share of the search's steps done, in [0, 1].
        """
        x, y = decode(z, problem)
        belief = self.attack.prior.belief
        value = torch.zeros((), dtype=x.dtype, device=x.device) if belief is None else problem["gain"] * belief(x)
        if "smoothing" in problem:
            variation = self.attack.prior.variation
            weight = problem["smoothing"] + variation.compute_excess(share) * (problem["smoothing"] - problem["map_smoothing"])
            value = value + problem["gain"] * weight * variation.measure(x)
        if "unit" in problem:
            value = value + problem["gain"] * problem["unit"] * self._measure_prior(z, x, problem, share)
        if "statistics" in problem:
            mismatch = [self.views[o].measure_statistics(problem["views"][str(o)], x) for o in self.views_with_statistics]
            value = value + problem["gain"] * problem["statistics"] * torch.stack(mismatch).sum()
        if "features" in problem:
            value = value + problem["gain"] * problem["features"]["weight"] * self._measure_features(problem, x)
        if self.epochs > 1:
            value = value + self.attack.simulation.order_invariant * measure_disagreement(x, self.epochs)
        if self.attack.labels.agreement:
            value = value + problem["gain"] * self.attack.labels.agreement * self._measure_disagreement(problem, x, y)
        return value

    def _measure_prior(self, z: Tensor, x: Tensor, problem: ProblemRow, share: float) -> Tensor:
        """Return the sum of the terms of latents and denoiser of one problem's prior, each times its weight, 0-d.

        The weights are relative to the result of `LossScales.compute_unit`, by which the caller multiplies the sum.
        share: share of the search's steps done, in [0, 1]; the noise added before denoising falls to 0 as `share` rises to 1.
        """
        prior = self.attack.prior
        value, term = prior.latent * self.space.measure_latents(z), prior.denoiser
        if term is None:
            return value
        noise = None
        if "noise" in problem:  # the same values in each step, at other places
            moved = problem["noise"].roll(round(NOISE_SHIFT * share * x.numel()))
            noise = (1 - share) * moved.reshape(x.shape)
        return value + term.weight * measure_noise(x, term.denoise, noise)

    def _measure_features(self, problem: ProblemRow, x: Tensor) -> Tensor:
        """Return how much the features of the first observation's examples differ from their targets, 0-d."""
        view, row, targets = self.views[0], problem["views"]["0"], problem["features"]
        state = {**row.get("buffers", view.buffers), **row.get("weights", view.weights)}
        x = x[row["places"]]
        if "bases" in targets:
            return measure_span_mismatch(view, state, x, targets["bases"])
        return measure_feature_mismatch(view, state, x, targets["targets"], targets["averages"])

    def _measure_disagreement(self, problem: ProblemRow, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of squared differences between predicted probabilities and labels of the candidate's examples, 0-d.

        Predictions are made with the weights of the first observation. If the logits of the true examples, which no server knows,
        are given to the attack, the result is the sum of squared differences between these logits and the candidate's logits.
        """
        view, row = self.views[0], problem["views"]["0"]
        weights, buffers = row.get("weights", view.weights), row.get("buffers", view.buffers)
        logits = predict(view.model, view.data, view.training.loss, weights, x, buffers)
        predicted, target = models.predict_probabilities(logits), _encode_one_hot(y, view.data.num_classes)
        if "logits" in problem:
            predicted, target = logits, problem["logits"]
        return (predicted - target).square().sum()


def _encode_one_hot(y: Tensor, num_classes: int) -> Tensor:
    if y.ndim == 2:
        return y
    return (y[:, None] == torch.arange(num_classes, device=y.device)).float()  # one_hot reads values, which vmap does not allow
