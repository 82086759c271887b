"""Weights and thresholds of a search's loss, derived from the distance of the observed gradient from a zero gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from attacker.attacks.matching.loss.view import View
from attacker.attacks.matching.priors import NEIGHBOUR_CONTRAST, compute_map_tv_weight, convert_weight_to_cosine
from attacker.attacks.matching.settings import MatchingSettings
from attacker.attacks.simulation.gradients import squared_norm


class LossScales:
    """Weights and thresholds of the loss of a search, (cases,) each, from the views of all cases.

    smoothing: weight of the total variation in the loss, after the fall of `VariationTerm.continuation`.
    map_smoothing: the part of `smoothing` that belongs to a MAP estimate from known noise, and does not fall during the search.
    enough, stuck: a search has converged once its loss is at most `enough`, and is restarted if its final loss is above `stuck`
               and a restart is left.
    least:     a search is given up because of a high loss (see `Stop.hopeless`) only while its loss is above this; the test
               `Stop.stall` ignores it.
    floor:     expected loss of the true examples, as far as known noise causes it.

    count: number V of examples that are searched for per case, including their copies for the local epochs.
    """

    def __init__(self, attack: MatchingSettings, views: Sequence[View], count: int) -> None:
        self.attack, self.views, self.count = attack, views, count
        self.data = views[0].data
        self.map_smoothing = self._compute_map_smoothing()
        self.smoothing = self._compute_smoothing()
        self._set_thresholds()

    def _set_thresholds(self) -> None:
        """Set three thresholds of the loss, `enough`, `stuck` and `least`; and `floor`, see the class.

        The three are the shares `Stop.precision`, `Stop.stuck` and `Stop.unexplained` of the loss of a zero gradient; `enough`
        and `stuck` are at least `Stop.tolerance`, and `least` is increased by the loss that known noise causes (`floor`). If
        distances are squared, `stuck` is at least the power of the noise, 0 if none is known, plus a term for the total
        variation, since the true examples have about that loss. `enough` is not raised to the power of the noise: the examples at
        the minimum of the loss are nearer to the true ones than those at which the loss first reaches the power of the noise. For
        a null (the same search without the gradient) `enough` is 0 and `stuck` is infinite, so that it is never restarted.
        """
        stop = self.attack.search.stop
        worst = self._sum_over_views([view.worst for view in self.views])
        self.floor = self._compute_floor()
        self.least = stop.unexplained * worst + self.floor
        if not self.attack.sees_gradient:
            self.enough, self.stuck = torch.zeros_like(worst), torch.full_like(worst, float("inf"))
            return
        self.enough = (stop.precision * worst).clamp(min=stop.tolerance)
        self.stuck = (stop.stuck * worst).clamp(min=stop.tolerance)
        if self.attack.objective.distance.squares:
            noise = self._sum_over_views([view.power for view in self.views])
            self.stuck = self.stuck.maximum(noise + 2 * NEIGHBOUR_CONTRAST * self.smoothing)

    def _compute_floor(self) -> Tensor:
        """Return the expected loss of the true examples of each case, (cases,), which is not 0 if the gradient has known noise.

        For squared distances it is the power of the noise, its expected squared norm; for cosines, with power p and the observed
        gradient g, about 1 - sqrt(1 - p / |g|^2). It is 0 for other distances, and for a null (the search without the gradient).
        """
        distance = self.attack.objective.distance
        powers = [view.power for view in self.views]
        if distance.bounded and self.attack.sees_gradient:
            norms = [vmap(squared_norm)(view.rows["observed"]).clamp(min=1e-30) for view in self.views]
            powers = [1 - (1 - power / norm).clamp(min=0).sqrt() for power, norm in zip(powers, norms, strict=True)]
        elif not distance.squares or not self.attack.sees_gradient:
            powers = [torch.zeros_like(power) for power in powers]
        return self._sum_over_views(powers)

    def _compute_smoothing(self) -> Tensor:
        """Return the weight of the total variation for each case, (cases,); 0 for data that are not images.

        It is `Prior.tv` times the distance of the observed gradient from a zero gradient, a mean over observations weighted by
        their `gamma`, plus `map_smoothing`.

        A null (the search without the gradient) has the weight `Prior.tv` if the distance is bounded, so that the loss of a zero
        gradient is 1. If the distance is not bounded, the null's weight is 1 if the attack's weight is above 0, since without a
        gradient the weight does not change the minimum, and else 0.
        """
        prior, distance = self.attack.prior, self.attack.objective.distance
        gamma = torch.stack([view.rows["gamma"] for view in self.views])
        if not self.data.is_image:
            return torch.zeros_like(gamma[0])
        if not self.attack.sees_gradient:
            return torch.full_like(gamma[0], prior.tv if distance.bounded else float(self._is_denoised or prior.tv > 0))
        return prior.tv * _average(gamma, torch.stack([view.worst for view in self.views])) + self.map_smoothing

    @property
    def _is_denoised(self) -> bool:
        distance = self.attack.objective.distance
        known = any(view.noisy for view in self.views) and (distance.squares or distance.bounded)
        return self.data.is_image and self.attack.prior.map_tv > 0 and known

    def _compute_map_smoothing(self) -> Tensor:
        """Return `Prior.map_tv` times the weight of a MAP estimate, averaged over observations, for each case, (cases,).

        It is 0 unless the power of the noise is known, the data are images, and distances are squared or cosines; and for a null.
        """
        gamma = torch.stack([view.rows["gamma"] for view in self.views])
        if not (self._is_denoised and self.attack.sees_gradient):
            return torch.zeros_like(gamma[0])
        return self.attack.prior.map_tv * _average(gamma, torch.stack([self._compute_map_weight(view) for view in self.views]))

    def _compute_map_weight(self, view: View) -> Tensor:
        """Return the weight of the total variation in a MAP estimate from the noise of one observation per case, (cases,)."""
        weight = compute_map_tv_weight(view.power / view.coordinates, self.count * self.data.size)
        if self.attack.objective.distance.squares:
            return weight
        return convert_weight_to_cosine(weight, vmap(squared_norm)(view.rows["observed"]), view.power)

    def compute_unit(self) -> Tensor:
        """Return the unit of the prior's weights for each case, (cases,), by which these weights are multiplied.

        It is the distance of the observed gradient from a zero gradient, a mean over observations weighted by their `gamma`. For
        a null (the search without the gradient) it is 1, except where its total variation has the weight 1 in place of
        `Prior.tv` (`_compute_smoothing`): then it is 1 / `Prior.tv`, so that the ratio of the total variation to other terms of
        the prior stays as in the attack.
        """
        gamma, prior = torch.stack([view.rows["gamma"] for view in self.views]), self.attack.prior
        if self.attack.sees_gradient:
            return _average(gamma, torch.stack([view.worst for view in self.views]))
        scaled = prior.tv > 0 and self.data.is_image and not self.attack.objective.distance.bounded
        return torch.full_like(gamma[0], 1 / prior.tv if scaled else 1.0)

    def _sum_over_views(self, values: Sequence[Tensor]) -> Tensor:
        loss = self.attack.objective.apply_robust_loss
        return torch.stack([view.rows["gamma"] * loss(value) for view, value in zip(self.views, values, strict=True)]).sum(0)


def _average(weights: Tensor, values: Tensor) -> Tensor:
    """Return the weighted mean over the first axis: the sum of weights * values divided by the sum of weights."""
    return (weights * values).sum(0) / weights.sum(0)
