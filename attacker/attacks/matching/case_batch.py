"""The loss function of a search over a batch of cases (observations that are attacked together), and the data they share."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor
from torch.func import grad_and_value, vjp, vmap

from attacker.attacks.cases import Case
from attacker.attacks.gradients.hardware import get_fast_dtype
from attacker.attacks.labels.observed import read_labels, read_order
from attacker.attacks.labels.rules import infer_labels
from attacker.attacks.labels.step_labels import InferredOrder
from attacker.attacks.linking import build_unlinked, repeat_links
from attacker.attacks.matching.feature_matching import can_match_features, can_match_spans, recover_spans, solve_targets
from attacker.attacks.matching.initialisation import solid
from attacker.attacks.matching.loss.evaluation import ViewEvaluation
from attacker.attacks.matching.loss.problems import ProblemRow, map_problems, select_rows
from attacker.attacks.matching.loss.rounds_in_order import RoundsInOrder
from attacker.attacks.matching.loss.scales import LossScales
from attacker.attacks.matching.loss.terms import LossTerms
from attacker.attacks.matching.loss.view import View
from attacker.attacks.matching.parametrisation import LatentSpace
from attacker.attacks.matching.priors import check_denoiser, compute_consensus
from attacker.attacks.matching.settings import MatchingSettings
from attacker.attacks.matching.warm_starts import HeldExamples
from attacker.attacks.simulation.client import build_network
from attacker.attacks.simulation.draws import Draws, find_draws
from attacker.attacks.simulation.local_steps import merge_epochs
from attacker.attacks.simulation.step_orders import StepOrder
from fedsim.recording.observation import Observation

NOISE_SEED = 0
"""Seed of the noise that is added before denoising (`DenoiserTerm.noise`). The seed is no secret, and equal for all searches."""
PLAIN_GREY = 0.5
"""Value of all pixels of a plain image, whose loss is compared with that of a search (`Stop.stall`)."""


class CaseBatch:
    """The loss function of a search over a batch of cases that agree in model, data, training, defense and number of examples.

    A problem is one search: one restart of one case. Many are searched at once, each with a latent vector, a row of the
    matrix z that `evaluate` takes; `decode` turns a latent vector into examples and labels.
    steps_each: number of local steps that each evaluation of the loss simulates if `Simulation.local_steps` is "auto"; 1 for all
               other settings. A search makes as many times fewer iterations.
    ordered_steps: number of local steps whose order of examples a polish searches for, see `Simulation.count_ordered_steps`; 1 if
               it does not.
    in_inferred_order: whether local steps are simulated in orders that were inferred from the updates (`set_orders`).
    count:     number V of examples that are searched for per case, including their copies for the local epochs.
    links:     for each case, which of these examples is at which position of each observation.
    epochs:    number of local epochs, each of which has its own copies of the examples; 1 if the epochs share them.
    views:     the observations: the o-th entry stacks the o-th observation (usually round) of all cases.
    evaluations: for each view, the function that evaluates its part of the loss. other_terms: the other terms of the loss.
    scales:    weights and thresholds of the loss.
    in_order:  evaluates all rounds of a client in order, simulating the state that its defense keeps between rounds; None to
               compare the simulated and the observed gradient of each round separately.
    views_with_statistics: indices of the views whose clients returned statistics of batch norm, which the loss then includes;
               empty if the objective leaves them out, and for a null.
    held:      known examples x (cases, V, *shape) and mask (cases, V) of those that are known; None if no case has any.
    coarse:    data type of large convolutions at the beginning of a search (`Search.coarse`); None for the data type of the
               weights, which is always used with `in_order`.
    draws:     variables of the client's random draws, which end the latent vectors; None without them.
    compares_logits: whether the loss uses logits of the true examples from an oracle (information that no server has).
    """

    def __init__(self, attack: MatchingSettings, cases: Sequence[Case]) -> None:
        observations = cases[0].observations
        first, self.model = observations[0], build_network(observations[0]).to(attack.device)
        prior = attack.prior.adapt_to(first) if attack.simulation.knows_defense else attack.prior
        self.steps_each = attack.simulation.count_simulated_steps(observations, self.model)
        self.ordered_steps = attack.simulation.count_ordered_steps(observations, self.model)
        attack = replace(attack, simulation=attack.simulation.adapt_to(observations, self.model), prior=prior)
        self.attack, self.cases = attack, cases
        self.in_inferred_order = False
        self.data = first.data
        self.compares_logits = bool(attack.labels.agreement and attack.sees_gradient) and all(
            case.known_logits is not None for case in cases
        )
        self.epochs = attack.simulation.count_epochs(first.training)
        unlinked = [build_unlinked([observation.num_examples or 0 for observation in case.observations]) for case in cases]
        self.links = [repeat_links(case.links or none, self.epochs) for case, none in zip(cases, unlinked, strict=True)]
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
        self.evaluations = [ViewEvaluation(view, to_compile=attack.search.compiled) for view in self.views]
        self.scales = LossScales(attack, self.views, self.count)
        with_statistics = [o for o, view in enumerate(self.views) if "statistics" in view.rows]
        self.views_with_statistics = with_statistics if attack.sees_gradient else []
        self.other_terms = LossTerms(attack, self.views, self.space, self.epochs, self.views_with_statistics)

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
        names = dict(self.model.named_parameters())
        draws = find_draws(first, self.model, {name: first.weights[name].to(self.attack.device) for name in names})
        self.space.drawn = None if draws is None else draws.start()
        return draws

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
            draws=self.draws,
        )

    def _stack_held(self) -> HeldExamples | None:
        known = [self.attack.held.get(case.key) for case in self.cases]
        if not any(known):
            return None
        none_known = HeldExamples(
            torch.zeros(self.count // self.epochs, *self.data.shape), torch.zeros(self.count // self.epochs) > 0
        )
        # Separate examples of local epochs are held alike.
        each = [none_known if examples is None else examples for examples in known]
        x = torch.stack([examples.x.float().repeat(self.epochs, *(1,) * len(self.data.shape)) for examples in each])
        mask = torch.stack([examples.mask.repeat(self.epochs) for examples in each])
        return HeldExamples(x.to(self.attack.device), mask.to(self.attack.device))

    @property
    def simulates_parts(self) -> bool:
        """Return whether local steps are simulated of which each is on a part of the client's examples."""
        parts = any(size < view.count for view in self.views for size in view.sizes)
        return self.attack.simulation.local_steps == "simulated" and parts

    def set_orders(self, orders: Sequence[Sequence[StepOrder]]) -> None:
        """Simulate the local steps of clients with these orders of their examples, one for each case and observation."""
        self.in_inferred_order = True
        for o, view in enumerate(self.views):
            view.set_order([case_orders[o] for case_orders in orders])

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
        recovered = (recover_spans if gaussian else solve_targets)(view, cases, labels.gather(1, places), rngs)
        recovered["weight"] = term.weight * view.worst[list(cases)] * recovered.pop("trust").to(view.worst)
        return {name: t.to(self.attack.device) for name, t in recovered.items()}

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
        self, cases: Sequence[int], z: Tensor, labels: Tensor, logits: Tensor | None = None, features: ProblemRow | None = None
    ) -> ProblemRow:
        """Return the data that `evaluate` needs for one problem (search) of each of these cases, one row per problem.

        cases: indices of the cases.
        z: the starting latents (P, D), at which the gain of a defense is computed (`_compute_gain`). labels: (P, V).
        logits: logits of the true examples, which no server knows, (P, V, K); None if they are not given. features: from
        `solve_features`.
        """
        rows = torch.tensor(cases, device=z.device)
        every = list(cases) == list(range(len(self.cases)))  # then gradients, which may be large, are not copied
        views = {str(o): view.rows if every else select_rows(view.rows, rows) for o, view in enumerate(self.views)}
        problem: ProblemRow = {"labels": labels, "views": views}
        if self.held is not None:
            problem |= {"held": self.held.x[rows], "is_held": self.held.mask[rows]}
        if logits is not None:
            problem["logits"] = logits.to(z)
        if self.scales.smoothing.any():
            problem |= {"smoothing": self.scales.smoothing[rows], "map_smoothing": self.scales.map_smoothing[rows]}
        if self.views_with_statistics:
            worst = torch.stack([view.worst for view in self.views]).mean(0)
            problem["statistics"] = self.attack.objective.batch_norm * worst[rows]
        if features is not None:
            problem["features"] = features
        if self.attack.prior.in_units_of_loss:
            problem["unit"] = self.scales.compute_unit()[rows]
        if (term := self.attack.prior.denoiser) is not None and term.noise:
            noise = torch.randn(self.count * self.data.size, generator=Generator().manual_seed(NOISE_SEED))
            problem["noise"] = (term.noise * noise).to(z.device).expand(len(cases), -1)
        if consistency := self.attack.search.consistency:
            problem["group"] = {"case": rows, "weight": consistency.weight * self.scales.compute_unit()[rows]}
        problem["gain"] = vmap(self._compute_gain, randomness="different")(z, problem)
        return problem

    def encode_plain(self, labels: Tensor, rngs: Sequence[Generator]) -> Tensor | None:
        """Return the latents (P, D) of grey images, for problems with labels (P, V); None for data that are not images."""
        if not self.data.is_image:
            return None
        grey = solid(PLAIN_GREY)
        return self.space.encode(
            [grey(self.data, label, g) for label, g in zip(labels, rngs, strict=True)], rngs, self.attack.device
        )

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

    def measure_distance(self, i: int, z: Tensor, labels: Tensor) -> float:
        """Return the distance of the gradients for the latent z (D,) of case i, added over observations by their weights.

        labels: as in `decode_case`.
        """
        x, y = self.decode_case(i, z, labels)
        rows = [view.get_case(i) for view in self.views]
        distances = [row["gamma"] * view.compute_distance(row, x, y, z) for view, row in zip(self.views, rows, strict=True)]
        return float(torch.stack(distances).sum())

    def measure_relative_distance(self, i: int, z: Tensor, labels: Tensor) -> float:
        """Return `measure_distance`, relative to that of zero gradients."""
        worst = torch.stack([view.rows["gamma"][i] * view.worst[i] for view in self.views]).sum()
        return self.measure_distance(i, z, labels) / float(worst)

    def decode_answer(self, i: int, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples x and labels y of the latent z (D,) of case i in the form of the attack's answer.

        If local epochs have separate copies of the examples, these are matched across epochs and averaged (`merge_epochs`). An
        enhancer of the attack is applied to the examples.
        """
        x, y = merge_epochs(*self.decode_case(i, z, labels), self.epochs)
        return (x if self.attack.enhancer is None else self.attack.enhancer(x.detach(), y)), y

    def evaluate(self, z: Tensor, per_problem: ProblemRow, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return two tensors: first the gradient of the loss by z, (P, D), then the loss, (P,).

        With `Search.consistency`, the gradient includes the gradient of the consistency term; the loss leaves this term out.
        per_problem: as `build_problem` returns it. share: share of the search's steps done, in [0, 1]; below `Search.coarse`,
        convolutions may have reduced precision.
        """
        shared = {name: value for name, value in per_problem.items() if name not in ("views", "group")}
        precision = self.coarse if share < self.attack.search.coarse else None
        slope, loss = torch.zeros_like(z), torch.zeros_like(z[:, 0])
        if (
            self.attack.prior.belief
            or self.attack.labels.agreement
            or self.epochs > 1
            or shared.keys() & {"smoothing", "statistics", "features", "unit"}
        ):
            terms = partial(self.other_terms, decode=self.decode, share=share)
            slope, loss = map_problems(grad_and_value(terms), z, per_problem)
        if self.attack.sees_gradient and self.in_order is not None:
            more_slope, more_loss = self.in_order.evaluate(z, per_problem, self.decode)
            slope, loss = slope + more_slope, loss + more_loss
        elif self.attack.sees_gradient:
            for o, evaluate in enumerate(self.evaluations):
                more_slope, more_loss = evaluate(z, per_problem["views"][str(o)], self.decode, shared, precision)
                slope, loss = slope + more_slope, loss + more_loss
        if "group" in per_problem:
            slope = slope + self._differentiate_consistency(z, per_problem)
        return slope.to(z), loss.to(z)  # a network with weights of several dtypes gives the loss the widest of them

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

    def _compute_gain(self, z: Tensor, problem: ProblemRow) -> Tensor:
        """Return the ratio of the squared norms of the simulated gradient before and after the defense, at the start z, 0-d.

        The distances and priors in the loss are multiplied by this ratio, so that a search does not stall because clipping made
        all values small. It is 1 without a known defense, if nothing is left after the defense, for distances that are not
        squared, and for a null.
        """
        if not (self.defended and self.attack.objective.distance.squares and self.attack.sees_gradient):
            return torch.ones_like(z[0])
        guess = self.decode(z, problem)
        pairs = [view.compute_powers(problem["views"][str(o)], *guess, z) for o, view in enumerate(self.views)]
        gain = torch.stack([before for before, _ in pairs]).sum() / torch.stack([after for _, after in pairs]).sum()
        return torch.where((gain > 0) & gain.isfinite(), gain, 1)

    def find_labels(self, i: int, rng: Generator, *, simulated: bool = True) -> Tensor:
        """Return the labels (V,) that the search for case i uses. simulated: as in `read_labels`.

        For a null, they are random. If soft labels are optimised with the examples, they are zeros, which the loss does not use.
        Otherwise they are the first of these that exist: the true labels, if they were given to the attack; the labels in the
        case's links (which match examples across rounds); the labels that a label rule infers from the gradient.
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
            labels_by_view = [read_labels(rule, view, i, self.model, rng, simulated=simulated) for view in self.views]
        else:
            labels_by_view = list(torch.split(known, [len(places) // self.epochs for places in links.places]))
        merged = torch.zeros(self.count, dtype=torch.long)
        for places, labels in zip(reversed(links.places), reversed(labels_by_view), strict=True):
            merged[places] = labels.cpu().repeat(self.epochs)
        return merged.to(attack.device)

    def infer_order(self, i: int, rng: Generator) -> InferredOrder | None:
        """Return the order in which the client of case i used its examples, for cases of one observation; None if unknown."""
        known = self.cases[i].known_labels if self.cases[i].known_labels is not None else self.links[i].labels
        rule = self.attack.labels.rule
        if known is None and rule is None:
            return None
        return read_order(rule or infer_labels, self.views[0], i, self.model, rng, known)


def _put_held(x: Tensor, held: Tensor, mask: Tensor) -> Tensor:
    """Return examples x (..., V, *shape) with those marked in `mask` (..., V) replaced by the known ones, `held`."""
    return torch.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), held.to(x), x)
