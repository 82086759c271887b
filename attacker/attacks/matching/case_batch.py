"""The loss function of a search over a batch of cases (observations that are attacked together), and the data they share."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.func import grad_and_value, vjp, vmap

from attacker.attacks.base import Case
from attacker.attacks.gradients.hardware import get_fast_dtype
from attacker.attacks.gradients.products import squared_norm
from attacker.attacks.labels.observed import read_labels
from attacker.attacks.linking import Links, build_unlinked, repeat_links
from attacker.attacks.matching.feature_matching import (
    can_match_features,
    can_match_spans,
    measure_feature_mismatch,
    measure_span_mismatch,
    recover_spans,
    solve_targets,
)
from attacker.attacks.matching.initialisation import solid
from attacker.attacks.matching.parametrisation import LatentSpace
from attacker.attacks.matching.parts import MatchingParts
from attacker.attacks.matching.priors import (
    MAX_NOISE_RATIO,
    NEIGHBOUR_CONTRAST,
    check_denoiser,
    compute_consensus,
    compute_map_tv_weight,
    measure_noise,
    total_variation,
)
from attacker.attacks.matching.problem import ProblemRow, View, map_problems
from attacker.attacks.matching.rounds_in_order import RoundsInOrder
from attacker.attacks.matching.warm_starts import Held
from attacker.attacks.simulation import local_epochs
from attacker.attacks.simulation.client import build_network
from attacker.attacks.simulation.draws import Draws, find_draws
from attacker.attacks.simulation.gradients import predict
from fedsim import models
from fedsim.recording.observation import Observation

NOISE_SEED = 0
"""Seed of the noise that is added before denoising (`DenoiserTerm.noise`). The seed is no secret, and equal for all searches."""
NOISE_SHIFT = 997
"""Total shift of the noise over a whole search, in multiples of the number of noise values. In each step, a value is at another
pixel."""

PLAIN_GREY = 0.5
"""Value of all pixels of a plain image, whose loss is compared with that of a search (`Stop.stall`)."""


class CaseBatch:
    """The loss function of a search over a batch of cases that agree in model, data, training, defense and number of examples.

    A problem is one search: one restart of one case. Many are searched at once, each with a latent vector, a row of the
    matrix z that `evaluate` takes; `decode` turns a latent vector into examples and labels.
    count:     number V of examples that are searched for per case, including their copies for the local epochs.
    links:     for each case, which of these examples is at which position of each observation.
    epochs:    number of local epochs, each of which has its own copies of the examples; 1 if the epochs share them.
    views:     the observations: the o-th entry stacks the o-th observation (usually round) of all cases.
    smoothing: weight of the total variation in the loss, (cases,).
    enough:    losses (cases,) at or below which a search has converged. stuck: final losses (cases,) above which a search is
               restarted, if a restart is left.
    least:     losses (cases,) up to which a search is not given up because its loss is high; the test `Stop.stall` ignores them.
    floor:     expected losses (cases,) of the true examples, as far as known noise causes them.
    in_order:  evaluates all rounds of a client in order, simulating the state that its defense keeps between rounds; None to
               compare the simulated and the observed gradient of each round separately.
    told_statistics: indices of the views whose clients returned statistics of batch norm, which the loss then includes; empty if
               the objective leaves them out, and for a null (the search without the gradient).
    held:      known examples x (cases, V, *shape) and mask (cases, V) of those that are known; None if no case has any.
    coarse:    data type of large convolutions at the beginning of a search (`Search.coarse`); None for the data type of the
               weights, which is always used with `in_order`.
    draws:     variables of the client's random draws, which end the latent vectors; None without them.
    told:      whether the loss uses logits of the true examples from an oracle (information that no server has).
    """

    def __init__(self, attack: MatchingParts, cases: Sequence[Case]) -> None:
        self.attack, self.cases = attack, cases
        first = cases[0].observations[0]
        self.data, self.loss = first.data, first.training.loss
        self.told = bool(attack.labels.agreement and attack.sees_gradient) and all(
            case.known_logits is not None for case in cases
        )
        self.model: nn.Module = build_network(first).to(attack.device)
        self.epochs = attack.simulation.count_epochs(first.training)
        self.links = [repeat_links(case.links or _build_unlinked(case), self.epochs) for case in cases]
        self.count = self.links[0].examples
        joint = attack.labels.rule is None and cases[0].known_labels is None
        self.space = LatentSpace(
            attack.parametrisation, self.data, self.count, joint=joint, surrogate=attack.simulation.surrogate
        )
        if attack.prior.denoiser is not None:
            check_denoiser(attack.prior.denoiser.denoise, torch.full((1, *self.data.shape), 0.5, device=attack.device))
        self.draws = self._find_draws(first)
        self.held = self._stack_held()
        self.views = [self._build_view(o) for o in range(len(cases[0].observations))]
        self.defended = any(view.defended for view in self.views)
        self.in_order = RoundsInOrder(self.views) if attack.simulation.in_order and len(self.views) > 1 else None
        self.coarse = get_fast_dtype(attack.device) if attack.search.coarse and self.in_order is None else None
        self.smoothing = self._compute_smoothing()
        told = [o for o, view in enumerate(self.views) if "statistics" in view.rows]
        self.told_statistics = told if attack.sees_gradient else []
        self._set_thresholds()

    def _find_draws(self, first: Observation) -> Draws | None:
        """Return the variables of the client's random draws, and make them a part of latent vectors (`LatentSpace.drawn`).

        None if the attack does not search for draws (`Simulation.draws`) or does not know the defense (`knows_defense`), or if
        the client declares no defense that draws. If the attack knows the defense and searches for draws, raises ValueError for
        cases of several observations, and as `find_draws` does.
        """
        simulation = self.attack.simulation
        if not (simulation.draws and simulation.knows_defense):
            return None
        if len(self.cases[0].observations) > 1:
            count = len(self.cases[0].observations)
            raise ValueError(
                f"draws=true searches for random numbers that a client drew for one update, and here {count} updates are "
                "attacked together; set draws=false"
            )
        own = dict(self.model.named_parameters())
        found = find_draws(first, self.model, {name: first.weights[name].to(self.attack.device) for name in own})
        self.space.drawn = None if found is None else found.start()
        return found

    def _build_view(self, o: int) -> View:
        attack = self.attack
        return View(
            [case.observations[o] for case in self.cases],
            torch.stack([links.places[o] for links in self.links]),
            torch.tensor([attack.objective.get_weight(links, o) for links in self.links]),
            self.count,
            model=self.model,
            objective=attack.objective,
            simulation=attack.simulation,
            device=attack.device,
            compiled=attack.search.compiled,
            draws=self.draws,
        )

    def _stack_held(self) -> Held | None:
        known = [self.attack.held.get(case.key) for case in self.cases]
        if not any(known):
            return None
        nothing = Held(torch.zeros(self.count // self.epochs, *self.data.shape), torch.zeros(self.count // self.epochs) > 0)
        each = [nothing if one is None else one for one in known]  # separate examples of local epochs are held alike
        x = torch.stack([one.x.float().repeat(self.epochs, *(1,) * len(self.data.shape)) for one in each])
        mask = torch.stack([one.mask.repeat(self.epochs) for one in each])
        return Held(x.to(self.attack.device), mask.to(self.attack.device))

    def _set_thresholds(self) -> None:
        """Set three thresholds of the loss, (cases,): `enough`, `stuck` and `least`; and `floor`, see the class.

        A search has converged once its loss is at most `enough`. A search is restarted if its final loss is above `stuck` and a
        restart is left. It is given up because of a high loss (see `Stop.hopeless`) only while its loss is above `least`. The
        test `Stop.stall` ignores `least`.
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
        their `gamma`. If the prior is `denoised`, the power of the noise is known and distances are squared, a term that grows
        with this power is added (`compute_map_tv_weight`). If distances are cosines, `Prior.tv_of_noise` times the ratio of noise
        to signal in the gradient's power is added, multiplied by the number of examples if `Prior.summed` is set.

        A null (the search without the gradient) has the weight `Prior.tv` if the distance is bounded, so that the loss of a zero
        gradient is 1. If the distance is not bounded, the null's weight is 1 if the attack's weight is above 0, since without a
        gradient the weight does not change the minimum, and else 0.
        """
        prior, distance = self.attack.prior, self.attack.objective.distance
        gamma = torch.stack([view.rows["gamma"] for view in self.views])
        if not self.data.is_image:
            return torch.zeros_like(gamma[0])
        denoised = prior.denoised and distance.squares and any(view.noisy for view in self.views)
        if not self.attack.sees_gradient:
            return torch.full_like(gamma[0], prior.tv if distance.bounded else float(denoised or prior.tv > 0))
        weight = prior.tv * _average(gamma, torch.stack([view.worst for view in self.views]))
        if prior.tv_of_noise and distance.bounded:
            powers = [(view.power, vmap(squared_norm)(view.rows["observed"])) for view in self.views]
            ratios = [noise / (power - noise).maximum(noise / MAX_NOISE_RATIO).clamp(min=1e-30) for noise, power in powers]
            examples = self.count if prior.summed else 1
            weight = weight + prior.tv_of_noise * examples * _average(gamma, torch.stack(ratios))
        if denoised:
            variance = torch.stack([view.power / view.coordinates for view in self.views])
            weight = weight + compute_map_tv_weight(_average(gamma, variance), self.count * self.data.size)
        return weight

    def _compute_unit(self) -> Tensor:
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

    def solve_features(self, cases: Sequence[int], labels: Tensor, rngs: Sequence[Generator]) -> ProblemRow | None:
        """Return the features that the examples of each problem should have, or their spans, and the weight of this loss term.

        Features are inputs of a layer near the output. They are recovered from the gradient of the first observation. The result
        is the dict that `solve_targets` or `recover_spans` returns, with `weight` (P,), the weight of the term, in place of
        `trust`. None if the objective has no such term, if its weight is 0 and the features are not injected into the decoder
        either, if the gradient does not show the features, if labels are optimised, or for a null.
        cases, labels: as for `build_problem`. rngs: one generator for each problem.
        """
        view, term = self.views[0], self.attack.objective.features
        if term is None or not self.attack.sees_gradient or self.space.joint:
            return None
        if not term.weight and not (term.injected and self.space.decoder.inject):
            return None
        gaussian = term.layer == "gaussian"
        if not (can_match_spans(view) if gaussian else can_match_features(view)):
            return None
        places = view.rows["places"][list(cases)]
        found = (recover_spans if gaussian else solve_targets)(view, cases, labels.gather(1, places), rngs)
        found["weight"] = term.weight * view.worst[list(cases)] * found.pop("trust").to(view.worst)
        return {name: t.to(self.attack.device) for name, t in found.items()}

    def inject_features(self, z: Tensor, cases: Sequence[int], features: ProblemRow | None) -> Tensor:
        """Return latents z (P, D) with the directions of recovered features, for a decoder that takes them (`Decoder.inject`).

        If only a span of an example's features is known, the first direction of the span is taken: the direction of the mean
        features of the examples with this label. Without features, or if the objective does not inject them, the result is z.
        cases, features: as for `build_problem`.
        """
        term = self.attack.objective.features
        if features is None or term is None or not term.injected:
            return z
        known = features["bases"][..., 0] if "bases" in features else features["targets"]
        placed = known.new_zeros(len(z), self.count, known.shape[2])
        placed.scatter_(1, self.views[0].rows["places"][list(cases)][:, :, None].expand_as(known), known)
        return self.space.inject(z, placed)

    def build_problem(
        self,
        cases: Sequence[int],
        z: Tensor,
        labels: Tensor,
        logits: Tensor | None = None,
        features: ProblemRow | None = None,
    ) -> ProblemRow:
        """Return the data that `evaluate` needs for one problem (search) of each of these cases, one row per problem.

        cases: indices of the cases.
        z: the starting latents (P, D), at which the gain of a defense is computed (`_compute_gain`). labels: (P, V).
        logits: logits of the true examples, which no server knows, (P, V, K); None if they are not given. features: from
        `solve_features`.
        """
        rows = torch.tensor(cases, device=z.device)
        every = list(cases) == list(range(len(self.cases)))  # then gradients, which may be large, are not copied
        views = {str(o): view.rows if every else _select(view.rows, rows) for o, view in enumerate(self.views)}
        problem: ProblemRow = {"labels": labels, "views": views}
        if self.held is not None:
            problem |= {"held": self.held.x[rows], "is_held": self.held.mask[rows]}
        if logits is not None:
            problem["logits"] = logits.to(z)
        if self.smoothing.any():
            problem["smoothing"] = self.smoothing[rows]
        if self.told_statistics:
            worst = torch.stack([view.worst for view in self.views]).mean(0)
            problem["statistics"] = self.attack.objective.batch_norm * worst[rows]
        if features is not None:
            problem["features"] = features
        if self.attack.prior.in_units_of_loss:
            problem["unit"] = self._compute_unit()[rows]
        if (term := self.attack.prior.denoiser) is not None and term.noise:
            noise = torch.randn(self.count * self.data.size, generator=Generator().manual_seed(NOISE_SEED))
            problem["noise"] = (term.noise * noise).to(z.device).expand(len(cases), -1)
        if consistency := self.attack.search.consistency:
            problem["group"] = {"case": rows, "weight": consistency.weight * self._compute_unit()[rows]}
        problem["gain"] = vmap(self._compute_gain, randomness="different")(z, problem)
        return problem

    def encode_plain(self, labels: Tensor, rngs: Sequence[Generator]) -> Tensor | None:
        """Return the latents (P, D) of grey images, for problems with labels (P, V); None for data that are not images."""
        if not self.data.is_image:
            return None
        grey = solid(PLAIN_GREY)
        return self.space.encode([grey(self.data, own, g) for own, g in zip(labels, rngs, strict=True)], rngs, self.attack.device)

    def decode(self, z: Tensor, problem: ProblemRow) -> tuple[Tensor, Tensor]:
        """Return examples x (V, *shape) and labels y (V,), or soft labels (V, K), of a latent vector (D,).

        Known examples (`held`) replace those of the latent. With several latents (P, D), the results have a first axis P.
        """
        x, y = self.space.decode(z, problem["labels"])
        return (_put_held(x, problem["held"], problem["is_held"]) if "held" in problem else x), y

    def decode_case(self, i: int, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples x (V, *shape) and labels y of the latent z (D,) of case i as `decode` does; x is not normalised.

        Known examples replace those of z. Copies of examples for local epochs are not merged, see `decode_answer`. labels: (V,),
        not used if soft labels are part of z.
        """
        x, y = self.space.decode(z, labels)
        return (x if self.held is None else _put_held(x, self.held.x[i], self.held.mask[i])), y

    def decode_answer(self, i: int, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples x and labels y of the latent z (D,) of case i in the form of the attack's answer.

        If local epochs have separate copies of the examples, these are matched across epochs and averaged (`merge_epochs`). An
        enhancer of the attack is applied to the examples.
        """
        x, y = local_epochs.merge_epochs(*self.decode_case(i, z, labels), self.epochs)
        return (x if self.attack.enhancer is None else self.attack.enhancer(x.detach(), y)), y

    def evaluate(self, z: Tensor, per_problem: ProblemRow, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return two tensors: first the gradient of the loss by z, (P, D), then the loss, (P,).

        With `Search.consistency`, the gradient includes the gradient of the consistency term; the loss leaves this term out.
        per_problem: as `build_problem` returns it. share: share of the search's steps done, in [0, 1]; below `Search.coarse`,
        convolutions may have reduced precision.
        """
        own = {name: value for name, value in per_problem.items() if name not in ("views", "group")}
        precision = self.coarse if share < self.attack.search.coarse else None
        slope, loss = torch.zeros_like(z), torch.zeros_like(z[:, 0])
        if (
            self.attack.prior.belief
            or self.attack.labels.agreement
            or self.epochs > 1
            or own.keys() & {"smoothing", "statistics", "features", "unit"}
        ):
            terms = partial(self._compute_prior_terms, share=share)
            slope, loss = map_problems(grad_and_value(terms), z, per_problem)
        if self.attack.sees_gradient and self.in_order is not None:
            more_slope, more_loss = self.in_order.evaluate(z, per_problem, self.decode)
            slope, loss = slope + more_slope, loss + more_loss
        elif self.attack.sees_gradient:
            for o, view in enumerate(self.views):
                more_slope, more_loss = view.evaluate(z, per_problem["views"][str(o)], self.decode, own, precision)
                slope, loss = slope + more_slope, loss + more_loss
        if "group" in per_problem:
            slope = slope + self._differentiate_consistency(z, per_problem)
        return slope.to(z), loss.to(z)  # a network with weights of several dtypes gives the loss the widest of them

    def _compute_prior_terms(self, z: Tensor, problem: ProblemRow, *, share: float) -> Tensor:
        """Return the sum of one problem's loss terms other than the gradient distance, a 0-d tensor.

        The terms are the priors, the mismatches of batch norm's statistics and of features, the difference between the examples
        of local epochs, and the disagreement of predictions and labels. share: share of the search's steps done, in [0, 1].
        """
        x, y = self.decode(z, problem)
        belief = self.attack.prior.belief
        value = torch.zeros((), dtype=x.dtype, device=x.device) if belief is None else problem["gain"] * belief(x)
        if "smoothing" in problem:
            value = value + problem["gain"] * problem["smoothing"] * total_variation(x)
        if "unit" in problem:
            value = value + problem["gain"] * problem["unit"] * self._measure_prior(z, x, problem, share)
        if "statistics" in problem:
            mismatch = [self.views[o].measure_statistics(problem["views"][str(o)], x) for o in self.told_statistics]
            value = value + problem["gain"] * problem["statistics"] * torch.stack(mismatch).sum()
        if "features" in problem:
            value = value + problem["gain"] * problem["features"]["weight"] * self._measure_features(problem, x)
        if self.epochs > 1:
            value = value + self.attack.simulation.order_invariant * local_epochs.measure_disagreement(x, self.epochs)
        if self.attack.labels.agreement:
            value = value + problem["gain"] * self.attack.labels.agreement * self._measure_disagreement(problem, x, y)
        return value

    def _differentiate_consistency(self, z: Tensor, per_problem: ProblemRow) -> Tensor:
        """Return the gradient by z (P, D) of the weighted mean squared difference of each candidate from its case's consensus.

        The consensus counts as constant. Searches of the case that have ended no longer take part in it.
        """
        consistency, group = self.attack.search.consistency, per_problem["group"]
        assert consistency is not None
        x, differentiate = vjp(lambda z: self.decode(z, per_problem)[0], z)  # type: ignore[misc]
        apart = x - compute_consensus(x, group["case"], registered=consistency.registered)
        weight = 2 * per_problem["gain"] * group["weight"] / x[0].numel()
        slope: Tensor = differentiate(weight.view(-1, *(1,) * (x.ndim - 1)) * apart)[0]
        return slope

    def _measure_prior(self, z: Tensor, x: Tensor, problem: ProblemRow, share: float) -> Tensor:
        """Return the sum of the terms of latents and denoiser of one problem's prior, each times its weight, 0-d.

        The weights are relative to the result of `_compute_unit`, by which the caller multiplies the sum.
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
        view, row, told = self.views[0], problem["views"]["0"], problem["features"]
        state = {**row.get("buffers", view.buffers), **row.get("weights", view.weights)}
        x = x[row["places"]]
        if "bases" in told:
            return measure_span_mismatch(view, state, x, told["bases"])
        return measure_feature_mismatch(view, state, x, told["targets"], told["averages"])

    def _measure_disagreement(self, problem: ProblemRow, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of squared differences between predicted probabilities and labels of the candidate's examples, 0-d.

        Predictions are made with the weights of the first observation. If the logits of the true examples, which no server knows,
        are given to the attack, the result is the sum of squared differences between these logits and the candidate's logits.
        """
        view, row = self.views[0], problem["views"]["0"]
        weights, buffers = row.get("weights", view.weights), row.get("buffers", view.buffers)
        logits = predict(self.model, self.data, self.loss, weights, x, buffers)
        made, aim = models.predict_probabilities(logits), _one_hot(y, self.data.num_classes)
        if "logits" in problem:
            made, aim = logits, problem["logits"]
        return (made - aim).square().sum()

    def _compute_gain(self, z: Tensor, problem: ProblemRow) -> Tensor:
        """Return the ratio of the squared norms of the simulated gradient before and after the defense, at the start z, 0-d.

        The distances and priors in the loss are multiplied by this ratio, so that a search does not stall because clipping made
        all values small. It is 1 without a known defense, if nothing is left after the defense, for distances that are not
        squared, and for a null (the search without the gradient).
        """
        if not (self.defended and self.attack.objective.distance.squares and self.attack.sees_gradient):
            return torch.ones_like(z[0])
        guess = self.decode(z, problem)
        pairs = [view.compute_powers(problem["views"][str(o)], *guess, z) for o, view in enumerate(self.views)]
        gain = torch.stack([before for before, _ in pairs]).sum() / torch.stack([after for _, after in pairs]).sum()
        return torch.where((gain > 0) & gain.isfinite(), gain, 1)

    def find_labels(self, i: int, rng: Generator) -> Tensor:
        """Return the labels (V,) that the search for case i uses.

        For a null (the search without the gradient), they are random. If soft labels are optimised with the examples, they are
        zeros, which the loss does not use. Otherwise they are the first of these that exist: the true labels, if they were given
        to the attack; the labels in the case's links (which match examples across rounds); the labels that a label rule infers
        from the gradient.
        """
        attack, links, known = self.attack, self.links[i], self.cases[i].known_labels
        if not attack.sees_gradient:
            return torch.randint(self.data.num_classes, (self.count,), generator=rng).to(attack.device)
        if attack.labels.rule is None and known is None:
            return torch.zeros(self.count, dtype=torch.long, device=attack.device)
        if known is None and links.labels is not None:
            return links.labels.to(attack.device)
        if known is None:
            rule = attack.labels.rule
            assert rule is not None
            told = [read_labels(rule, view, i, self.model, rng) for view in self.views]
        else:
            told = list(torch.split(known, [len(places) // self.epochs for places in links.places]))
        found = torch.zeros(self.count, dtype=torch.long)
        for places, labels in zip(reversed(links.places), reversed(told), strict=True):
            found[places] = labels.cpu().repeat(self.epochs)
        return found.to(attack.device)


def _put_held(x: Tensor, held: Tensor, mask: Tensor) -> Tensor:
    """Return examples x (..., V, *shape) with those marked in `mask` (..., V) replaced by the known ones, `held`."""
    return torch.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), held.to(x), x)


def _average(weights: Tensor, values: Tensor) -> Tensor:
    """Return the weighted mean over the first axis: the sum of weights * values divided by the sum of weights."""
    return (weights * values).sum(0) / weights.sum(0)


def _select(nested: ProblemRow, rows: Tensor) -> ProblemRow:
    return {name: _select(t, rows) if isinstance(t, dict) else t[rows] for name, t in nested.items()}


def _one_hot(y: Tensor, num_classes: int) -> Tensor:
    if y.ndim == 2:
        return y
    return (y[:, None] == torch.arange(num_classes, device=y.device)).float()  # one_hot reads values, which vmap does not allow


def _build_unlinked(case: Case) -> Links:
    return build_unlinked([observation.num_examples or 0 for observation in case.observations])
