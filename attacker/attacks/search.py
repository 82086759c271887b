"""One call of a gradient matching attack: many cases, some of them more than once, searched for all at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from attacker.attacks.base import Case, Progress, generator_for
from attacker.attacks.descent import Problems, descend
from attacker.attacks.labels import Evidence
from attacker.attacks.objectives import Gradient, squared_norm
from attacker.attacks.simulation import (
    as_gradient,
    buffers_of,
    channel_of,
    gradient_of,
    network_of,
    omitted_of,
    schedule,
    through,
    total_step,
)
from attacker.reconstruction import Reconstruction, slots_of
from defenses.channel import Known, transparent
from fedsim import models
from fedsim.wire.observation import Observation

if TYPE_CHECKING:
    from attacker.attacks.matching import GradientMatching


@dataclass
class _Best:
    """The best restart of one case so far, by the attack's own loss."""

    loss: float = float("inf")
    z: Tensor | None = None
    labels: Tensor | None = None
    history: Tensor = field(default_factory=lambda: torch.empty(0))
    iterations: int = 0
    evaluations: int = 0
    restarts: int = 0


class Search:
    """One call of a `GradientMatching`: everything that its cases share, and one `_Best` for each."""

    def __init__(self, attack: "GradientMatching", cases: Sequence[Case], rng: Generator, progress: Progress | None) -> None:
        self.attack, self.cases, self.rng, self.progress = attack, cases, rng, progress
        first = cases[0].observations[0]
        assert first.num_examples is not None
        self.data, self.training, self.count = first.data, first.training, first.num_examples
        self.sizes, self.steps = schedule(first)
        self.joint = attack.labels is None and cases[0].known_labels is None
        self.model: nn.Module = network_of(first).to(attack.device)
        knows = attack.knows_defense
        self.channel = channel_of(first, self.model) if knows else transparent
        self.omitted = omitted_of(first, self.model) if knows else frozenset[str]()
        self.plain = gradient_of(self.model, self.data, self.training.loss)
        self.gradient = gradient_of(self.model, self.data, self.training.loss, first.gradient.build()) if knows else self.plain
        self.defended = self.channel is not transparent or (knows and first.gradient.step is not None)
        self.best = [_Best() for _ in cases]
        self.interrupted: set[int] = set()
        self._observe([case.observations[0] for case in cases])
        self._thresholds()

    def _observe(self, observations: Sequence[Observation]) -> None:
        """Stack what differs between cases; weights that all of them share are kept once."""
        device, order = self.attack.device, dict(self.model.named_parameters())
        weights = [{name: o.weights[name].to(device) for name in order} for o in observations]
        self.shared = all(o.weights is observations[0].weights for o in observations)
        self.weights = weights[0] if self.shared else {name: torch.stack([w[name] for w in weights]) for name in order}
        self.per_case = weights
        self.buffers, self.same_buffers = buffers_of(self.model, observations)
        updates = [{name: o.update[name].to(device) for name in order} for o in observations]
        gradients = [as_gradient(u, w, self.training, self.steps) for u, w in zip(updates, weights, strict=True)]
        self.observed = {name: torch.stack([g[name] for g in gradients]) for name in order}
        self.compared = {name: g for name, g in self.observed.items() if name not in self.omitted}
        self.seen = {name: torch.stack([u[name] for u in updates]) for name in order}
        self.known = vmap(self.channel.learn)(self.seen)

    def _thresholds(self) -> None:
        """(cases,) losses that are enough, and those above which a search is stuck.

        A search that ended at the power of known noise is not stuck. It is no reason to end one before: the examples that fit the
        noise best are nearer to the true ones than those at which the loss first falls to its power. A null has no gradient to go
        by: one start is all.
        """
        stop, objective = self.attack.stop, self.attack.objective
        worst = vmap(objective.worst)(self.compared)
        if not self.attack.sees_gradient:
            self.enough, self.stuck = torch.zeros_like(worst), torch.full_like(worst, float("inf"))
            return
        self.enough = (stop.precision * worst).clamp(min=stop.tolerance)
        self.stuck = (stop.stuck * worst).clamp(min=stop.tolerance)
        if objective.squares:
            self.stuck = self.stuck.maximum(vmap(self.channel.noise)(self.seen) / total_step(self.training, self.steps) ** 2)

    def run(self) -> list[Reconstruction]:
        started = perf_counter()
        for restart in range(self.attack.restarts):
            pending = [i for i, best in enumerate(self.best) if restart == 0 or best.loss > self.stuck[i]]
            if pending and not self.interrupted:  # Ctrl-C ends all restarts
                self._search(pending, restart)
        seconds = (perf_counter() - started) / len(self.cases)
        return [self._reconstruction(i, seconds) for i in range(len(self.cases))]

    def _search(self, pending: list[int], restart: int) -> None:
        """One start for each pending case."""
        attack = self.attack
        rngs = [generator_for(self.rng, self.cases[i], f"start {restart}") for i in pending]
        labels = torch.stack([self._labels(i, generator_for(self.rng, self.cases[i], f"labels {restart}")) for i in pending])
        starts = [attack.init(self.data, y, g) for y, g in zip(labels.cpu(), rngs, strict=True)]
        if attack.first is not None and attack.sees_gradient and restart == 0:
            told = attack.first([self.cases[i] for i in pending])
            starts = [own if better is None else better.to(own) for own, better in zip(starts, told, strict=True)]
        z = torch.stack(starts).flatten(1).to(attack.device)
        if self.joint:
            shape = (self.count * self.data.num_classes,)
            soft = [torch.randn(shape, generator=g) for g in rngs]
            z = torch.cat([z, torch.stack(soft).to(attack.device)], dim=1)
        rows = torch.tensor(pending, device=z.device)
        weights = self.weights if self.shared else {name: w[rows] for name, w in self.weights.items()}
        observed = {name: g[rows] for name, g in self.compared.items()}
        known = {name: t[rows] for name, t in self.known.items()}
        per_problem: dict[str, Any] = {"observed": observed, "known": known, "labels": labels}
        if not self.shared:
            per_problem["weights"] = weights
        if not self.same_buffers:
            per_problem["buffers"] = {name: b[rows] for name, b in self.buffers.items()}
        gain: Tensor = vmap(self._gain, in_dims=(0, 0), randomness="different")(z, per_problem)
        per_problem["gain"] = gain
        problems = Problems(
            evaluate=self._evaluate,
            per_problem=per_problem,
            project=self._project,
            enough=self.enough[rows] * gain,
        )
        found = descend(z, problems, attack.optimiser, attack.steps, attack.stop, progress=self.progress)
        for row, i in enumerate(pending):
            best = self.best[i]
            if found.interrupted[row]:
                self.interrupted.add(i)
            best.iterations += found.iterations[row]
            best.evaluations += found.iterations[row] * attack.optimiser.period
            best.restarts += 1
            loss = found.loss[row] / float(gain[row])
            if best.z is None or loss < best.loss:
                best.loss, best.z, best.history = loss, found.z[row], found.history[row] / gain[row]
                best.labels = labels[row]

    def _evaluate(self, z: Tensor, per_problem: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The gradient with respect to z, (P, D), and the loss, (P,)."""
        dims = (dict.fromkeys(per_problem, 0),)
        of_one = vmap(grad_and_value(self._loss), in_dims=(0, *dims), randomness="different")
        gradient, loss = of_one(z, per_problem)
        return gradient, loss

    def _loss(self, z: Tensor, problem: dict[str, Any]) -> Tensor:
        x, y = self._decode(z, problem["labels"])
        weights, buffers = problem.get("weights", self.weights), problem.get("buffers", self.buffers)
        loss = torch.zeros_like(z[0])
        if self.attack.sees_gradient:
            loss = loss + self.attack.objective.distance(
                self._simulate(weights, buffers, x, y, problem["known"]), problem["observed"]
            )
        if self.attack.agreement:
            predicted = self._probabilities(weights, buffers, x)
            loss = loss + self.attack.agreement * (predicted - _one_hot(y, self.data.num_classes)).square().sum()
        weighed: Tensor = problem["gain"] * loss
        return weighed + self.attack.prior(self.data.normalise(x))

    def _gain(self, z: Tensor, problem: dict[str, Any]) -> Tensor:
        """How much of a simulated gradient's power a defense takes: a search must not stall because a clip made all small.

        It is 1 where no power is left.
        """
        if not self.defended or not self.attack.objective.squares:
            return torch.ones_like(z[0])
        x, y = self._decode(z, problem["labels"])
        weights, buffers = problem.get("weights", self.weights), problem.get("buffers", self.buffers)
        pair = self.plain(weights, x, y, buffers), self._simulate(weights, buffers, x, y, problem["known"])
        before, after = (squared_norm({name: g[name] for name in problem["observed"]}) for g in pair)
        gain = before / after
        return torch.where((gain > 0) & gain.isfinite(), gain, 1)

    def _through(self, gradient: Gradient, weights: Gradient, known: Known) -> Gradient:
        return through(self.channel, known, gradient, weights, self.training, self.steps)

    def _simulate(self, weights: Gradient, buffers: Gradient, x: Tensor, y: Tensor, known: Known) -> Gradient:
        gradient = self.gradient(weights, x, y, buffers)
        return gradient if self.channel is transparent else self._through(gradient, weights, known)

    def _probabilities(self, weights: Gradient, buffers: Gradient, x: Tensor) -> Tensor:
        """(N, K), what the model makes of x."""
        return models.probabilities(functional_call(self.model, {**buffers, **weights}, (self.data.normalise(x),)))

    def _decode(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, *shape), and y: the known labels (N,), or soft ones (N, K) out of the latent."""
        pixels = self.count * self.data.size
        x = z[..., :pixels].reshape(self.count, *self.data.shape)
        if not self.joint:
            return x, labels
        return x, z[..., pixels:].reshape(self.count, self.data.num_classes).softmax(dim=-1)

    def _project(self, z: Tensor) -> Tensor:
        if not self.attack.boxed:
            return z
        pixels = self.count * self.data.size
        return torch.cat([z[:, :pixels].clamp(0, 1), z[:, pixels:]], dim=1)

    def _labels(self, i: int, rng: Generator) -> Tensor:
        """The labels that the search for case i goes by."""
        attack, known = self.attack, self.cases[i].known_labels
        if not attack.sees_gradient:
            return torch.randint(self.data.num_classes, (self.count,), generator=rng).to(attack.device)
        if known is not None:
            return known.to(attack.device)
        if attack.labels is None:
            return torch.zeros(self.count, dtype=torch.long, device=attack.device)
        with torch.no_grad():
            dummy = torch.rand(16, *self.data.shape, generator=rng).to(attack.device)
            guess = self._probabilities(self.per_case[i], self._buffers_of(i), dummy).mean(dim=0)
        weight, bias = models.head(self.model)
        gradient = {name: g[i] for name, g in self.observed.items()}
        return attack.labels(Evidence(gradient, weight, bias, self.count, guess, self.defended))

    def _buffers_of(self, i: int) -> Gradient:
        return self.buffers if self.same_buffers else {name: b[i] for name, b in self.buffers.items()}

    def _reconstruction(self, i: int, seconds: float) -> Reconstruction:
        case, best = self.cases[i], self.best[i]
        assert best.z is not None
        assert best.labels is not None
        x, y = self._decode(best.z, best.labels)
        hard = y.argmax(dim=1) if y.ndim == 2 else y
        observation = case.observations[0]
        return Reconstruction(
            case=case.key,
            x=x.cpu(),
            y=hard.cpu(),
            confidence=torch.full((self.count,), self._confidence(i, x, y)),
            slots=slots_of(observation.round, observation.client, self.sizes, self.count),
            loss=best.history.cpu(),
            iterations=best.iterations,
            evaluations=best.evaluations,
            restarts=best.restarts,
            seconds=seconds,
            route="optimisation" if self.attack.sees_gradient else "prior alone",
            attack=self.attack.name,
            oracles=self.attack.oracles + (("labels",) if case.known_labels is not None and self.attack.sees_gradient else ()),
            seed=self.rng.initial_seed(),
            interrupted=i in self.interrupted,
        )

    def _confidence(self, i: int, x: Tensor, y: Tensor) -> float:
        """The share of the observed gradient's power that the answer explains; 0 without a gradient, or with one of zeros."""
        observed = {name: g[i] for name, g in self.compared.items()}
        if not self.attack.sees_gradient or not squared_norm(observed) > 0:
            return 0.0
        objective = self.attack.objective
        known = {name: t[i] for name, t in self.known.items()}
        distance = objective.distance(self._simulate(self.per_case[i], self._buffers_of(i), x, y, known), observed)
        share = 1 - distance / objective.worst(observed).clamp(min=torch.finfo(distance.dtype).tiny)
        return float(share.nan_to_num(nan=0.0).clamp(0, 1))


def _one_hot(y: Tensor, num_classes: int) -> Tensor:
    if y.ndim == 2:
        return y
    return (y[:, None] == torch.arange(num_classes, device=y.device)).float()  # torch's own looks at values: not under vmap
