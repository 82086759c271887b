"""One call of a gradient matching attack: many cases, some of them more than once, searched for all at once."""

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor, nn
from torch.func import grad_and_value, vmap

from attacker.attacks.base import Case, Look, Memory, Progress, Sight, generator_for
from attacker.attacks.gradients.precision import fast
from attacker.attacks.labels.observed import read_labels
from attacker.attacks.matching.answers import answer, slots
from attacker.attacks.matching.knowledge import gamma_of, links_of, logits_of
from attacker.attacks.matching.priors import CONTRAST, belief_behind_noise, flat, total_variation
from attacker.attacks.matching.problem import Row, View, each
from attacker.attacks.matching.saved_state import Best, bests_as_tensors, bests_of, now_and_then, to_device
from attacker.attacks.matching.warm_starts import Given, placed
from attacker.attacks.optimisers.descent import Problems, best_of, descend
from attacker.attacks.simulation import local_epochs
from attacker.attacks.simulation.client import network_of
from attacker.attacks.simulation.gradients import predict
from attacker.reconstruction import Reconstruction
from fedsim import models

if TYPE_CHECKING:
    from attacker.attacks.matching.gradient_matching import GradientMatching


class Search:
    """One call of a `GradientMatching`: everything that its cases share, and one `Best` for each.

    The latent z of a problem is its examples' pixels, then soft labels where they are searched for, then one number where
    surrogate weights are.
    """

    def __init__(
        self,
        attack: "GradientMatching",
        cases: Sequence[Case],
        rng: Generator,
        progress: Progress | None,
        memory: Memory | None = None,
    ) -> None:
        self.attack, self.cases, self.rng, self.progress, self.memory = attack, cases, rng, progress, memory
        first = cases[0].observations[0]
        self.data, self.loss = first.data, first.training.loss
        self.told = bool(attack.agreement and attack.sees_gradient) and all(case.known_logits is not None for case in cases)
        self.joint = attack.labels is None and cases[0].known_labels is None
        self.model: nn.Module = network_of(first).to(attack.device)
        self.epochs = local_epochs.separate(attack.order_invariant, first.training)
        self.links = [links_of(case, self.epochs) for case in cases]
        self.count = self.links[0].examples
        self.views = [self._view(o) for o in range(len(cases[0].observations))]
        self.defended = any(view.defended for view in self.views)
        self.coarse = fast(attack.device) if attack.coarse else None
        self.best = [Best() for _ in cases]
        self.given = self._given()
        self.interrupted: set[int] = set()
        self.smoothing = self._smoothing()
        self._thresholds()

    def _view(self, o: int) -> View:
        observations = [case.observations[o] for case in self.cases]
        places = torch.stack([links.places[o] for links in self.links])
        gamma = torch.tensor([gamma_of(links, o, self.attack.later) for links in self.links])
        return View(self.attack, self.model, observations, places, gamma, self.count)

    def _thresholds(self) -> None:
        """(cases,) losses that are enough, and those above which a search is stuck.

        A search that ended at the power of known noise is not stuck. It is no reason to end one before: the examples that fit the
        noise best are nearer to the true ones than those at which the loss first falls to its power. A null has no gradient to go
        by: one start is all.
        """
        stop = self.attack.stop
        worst = self._over_views([view.worst for view in self.views])
        if not self.attack.sees_gradient:
            self.enough, self.stuck = torch.zeros_like(worst), torch.full_like(worst, float("inf"))
            return
        self.enough = (stop.precision * worst).clamp(min=stop.tolerance)
        self.stuck = (stop.stuck * worst).clamp(min=stop.tolerance)
        if self.attack.objective.squares:
            noise = self._over_views([view.power for view in self.views])
            self.stuck = self.stuck.maximum(noise + 2 * CONTRAST * self.smoothing)

    def _smoothing(self) -> Tensor:
        """(cases,) the weight of total variation, more of it behind known noise; of a null, 1 where it has that prior."""
        attack, gamma = self.attack, self.views[0].rows["gamma"]
        if not self.data.is_image:
            return torch.zeros_like(gamma)
        denoised = attack.denoised and attack.objective.squares and any(view.noisy for view in self.views)
        if not attack.sees_gradient:
            return torch.full_like(gamma, float(denoised or attack.smooth > 0))
        own = attack.smooth * self._over_views([view.worst for view in self.views])
        if denoised:
            gamma = torch.stack([view.rows["gamma"] for view in self.views])
            variance = torch.stack([view.power / view.coordinates for view in self.views])
            own = own + belief_behind_noise((gamma * variance).sum(0) / gamma.sum(0), self.count * self.data.size)
        return own

    def _over_views(self, values: Sequence[Tensor]) -> Tensor:
        weighed = [view.rows["gamma"] * self.attack.robust_loss(value) for view, value in zip(self.views, values, strict=True)]
        return torch.stack(weighed).sum(0)

    def run(self) -> list[Reconstruction]:
        started = perf_counter()
        for restart in range(self._recalled(), self.attack.restarts + any(start is not None for start in self.given)):
            pending = [i for i in range(len(self.cases)) if self._starts_again(i, restart)]
            if pending and not self.interrupted:  # Ctrl-C ends all restarts
                self._search(pending, restart)
                self._keep(restart)
        seconds = (perf_counter() - started) / len(self.cases)
        return [answer(self, i, seconds) for i in range(len(self.cases))]

    def _given(self) -> Sequence[Given | None]:
        """For each case a start from a closed form, or None."""
        attack = self.attack
        return attack.first(self.cases, self.rng) if attack.first and attack.sees_gradient else [None] * len(self.cases)

    def _starts_again(self, i: int, restart: int) -> bool:
        """Whether case i is searched for once more: always by its own first start, unless the given one has led to the end."""
        given = self.given[i]
        own = restart - (given is not None)
        if own < 0 or restart == 0:
            return True
        least = self.stuck[i] if own or (given is not None and given.alone) else self.enough[i]
        return own < self.attack.restarts and self.best[i].loss > float(least)

    def _search(self, pending: list[int], restart: int) -> None:
        """One start for each pending case."""
        attack = self.attack
        labels = torch.stack([self._labels(i, generator_for(self.rng, self.cases[i], f"labels {restart}")) for i in pending])
        z = self._starts(pending, restart, labels)
        rows = torch.tensor(pending, device=z.device)
        problem: Row = {"labels": labels, "views": {str(o): _select(view.rows, rows) for o, view in enumerate(self.views)}}
        if self.told:
            problem["logits"] = torch.stack([logits_of(self.cases[i], self.links[i], self.epochs) for i in pending]).to(z)
        if self.smoothing.any():
            problem["smoothing"] = self.smoothing[rows]
        problem["gain"] = vmap(self._gain, randomness="different")(z, problem)
        problems = Problems(
            evaluate=self._evaluate,
            per_problem=problem,
            project=self._project,
            enough=self.enough[rows] * problem["gain"],
            anew=attack.coarse if self.coarse else 0.0,
        )
        key, memory = f"restart {restart}", self.memory
        found = descend(
            z,
            problems,
            attack.optimiser,
            attack.steps,
            attack.stop,
            progress=self.progress,
            checkpoint=now_and_then(memory, key, partial(self._show, pending, labels)) if memory else None,
            resume=to_device(memory.recall(key), attack.device) if memory else None,
        )
        for row, i in enumerate(pending):
            best, gain = self.best[i], float(problem["gain"][row])
            if found.interrupted[row]:
                self.interrupted.add(i)
            best.iterations += found.iterations[row]
            best.evaluations += found.iterations[row] * attack.optimiser.period
            best.restarts += 1
            loss = found.loss[row] / gain
            if best.z is None or loss < best.loss:
                best.loss, best.z, best.history = loss, found.z[row], found.history[row] / gain
                best.labels, best.given = labels[row], restart == 0 and self.given[i] is not None

    def _keep(self, restart: int) -> None:
        """Have the memory know what the searches so far came to."""
        if self.memory is not None and not self.interrupted:
            self.memory.keep("best", bests_as_tensors(self.best, restart + 1), drop=f"restart {restart}")

    def _show(self, pending: list[int], labels: Tensor, look: Look, state: Mapping[str, Tensor]) -> None:
        """Show the best so far of what is searched for now."""
        z, loss = best_of(state)
        sights = []
        for row, i in enumerate(pending):
            x, y = self.decode(z[row], {"labels": labels[row]})
            x, y = local_epochs.merged(x, y, self.epochs)
            places = tuple(slot for o in range(len(self.views)) for slot in slots(self, i, o))
            sights.append(Sight(x.cpu(), (y.argmax(dim=1) if y.ndim == 2 else y).cpu(), places, float(loss[row])))
        look(sights, len(state["active.history"]), self.attack.steps)

    def _recalled(self) -> int:
        """The restart to go on with; what those before it came to is taken up."""
        state = self.memory.recall("best") if self.memory else None
        if state is None:
            return 0
        self.best, restarts = bests_of(state, self.attack.device)
        return restarts

    def _starts(self, pending: list[int], restart: int, labels: Tensor) -> Tensor:
        """(P, D), where each search begins."""
        attack, device = self.attack, self.attack.device
        rngs = [generator_for(self.rng, self.cases[i], f"start {restart}") for i in pending]
        starts = [attack.init(self.data, y, g) for y, g in zip(labels.cpu(), rngs, strict=True)]
        if restart == 0:
            known = [None if self.joint else one for one in labels.cpu()]
            told = zip(starts, [self.given[i] for i in pending], known, strict=True)
            starts = [own if given is None else placed(given, own, y) for own, given, y in told]
        parts = [torch.stack(starts).flatten(1)]
        if self.joint:
            shape = (self.count * self.data.num_classes,)
            parts.append(torch.stack([torch.randn(shape, generator=g) for g in rngs]))
        if attack.surrogate:
            parts.append(torch.zeros(len(pending), 1))
        return torch.cat(parts, dim=1).to(device)

    def _evaluate(self, z: Tensor, per_problem: Row, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """The gradient with respect to z, (P, D), and the loss, (P,), when so large a share of the steps is done."""
        own = {name: value for name, value in per_problem.items() if name != "views"}
        precision = self.coarse if share < self.attack.coarse else None
        slope, loss = torch.zeros_like(z), torch.zeros_like(z[:, 0])
        if self.attack.prior is not flat or self.attack.agreement or self.epochs > 1 or "smoothing" in own:
            slope, loss = each(grad_and_value(self._beliefs), z, per_problem)
        if self.attack.sees_gradient:
            for o, view in enumerate(self.views):
                more_slope, more_loss = view.evaluate(z, per_problem["views"][str(o)], self.decode, own, precision)
                slope, loss = slope + more_slope, loss + more_loss
        return slope, loss

    def _beliefs(self, z: Tensor, problem: Row) -> Tensor:
        """What the loss of one problem has beside the distances of gradients."""
        x, y = self.decode(z, problem)
        value = self.attack.prior(self.data.normalise(x))
        if "smoothing" in problem:
            value = value + problem["gain"] * problem["smoothing"] * total_variation(1.0)(x)
        if self.epochs > 1:
            value = value + self.attack.order_invariant * local_epochs.disagreement(x, self.epochs)
        if self.attack.agreement:
            value = value + problem["gain"] * self.attack.agreement * self._disagreement(problem, x, y)
        return value

    def _disagreement(self, problem: Row, x: Tensor, y: Tensor) -> Tensor:
        """How far what the model makes of the guess is from its labels, or from what an oracle tells of the true examples."""
        view, row = self.views[0], problem["views"]["0"]
        weights, buffers = row.get("weights", view.weights), row.get("buffers", view.buffers)
        logits = predict(self.model, self.data, self.loss, weights, x, buffers)
        made, aim = models.probabilities(logits), _one_hot(y, self.data.num_classes)
        if "logits" in problem:
            made, aim = logits, problem["logits"]
        return (made - aim).square().sum()

    def _gain(self, z: Tensor, problem: Row) -> Tensor:
        """How much of a simulated gradient's power a defense takes: a search must not stall because a clip made all small.

        It is 1 where no power is left, and of a null, which looks at nothing that was received.
        """
        if not (self.defended and self.attack.objective.squares and self.attack.sees_gradient):
            return torch.ones_like(z[0])
        guess = self.decode(z, problem)
        pairs = [view.powers(problem["views"][str(o)], *guess, z) for o, view in enumerate(self.views)]
        gain = torch.stack([before for before, _ in pairs]).sum() / torch.stack([after for _, after in pairs]).sum()
        return torch.where((gain > 0) & gain.isfinite(), gain, 1)

    def decode(self, z: Tensor, problem: Row) -> tuple[Tensor, Tensor]:
        """x (V, *shape), and y: the known labels (V,), or soft ones (V, K) out of the latent; of many problems, one row each."""
        pixels, classes = self.count * self.data.size, self.data.num_classes
        x = z[..., :pixels].reshape(*z.shape[:-1], self.count, *self.data.shape)
        if not self.joint:
            return x, problem["labels"]
        return x, z[..., pixels : pixels + self.count * classes].reshape(*z.shape[:-1], self.count, classes).softmax(dim=-1)

    def _project(self, z: Tensor) -> Tensor:
        if not self.attack.boxed:
            return z
        pixels = self.count * self.data.size
        return torch.cat([z[:, :pixels].clamp(0, 1), z[:, pixels:]], dim=1)

    def _labels(self, i: int, rng: Generator) -> Tensor:
        """(V,), the labels that the search for case i goes by."""
        attack, links, known = self.attack, self.links[i], self.cases[i].known_labels
        if not attack.sees_gradient:
            return torch.randint(self.data.num_classes, (self.count,), generator=rng).to(attack.device)
        if attack.labels is None and known is None:
            return torch.zeros(self.count, dtype=torch.long, device=attack.device)
        if known is None and links.labels is not None:
            return links.labels.to(attack.device)
        if known is None:
            rule = attack.labels
            assert rule is not None
            told = [read_labels(rule, view, i, self.model, rng) for view in self.views]
        else:
            told = list(torch.split(known, [len(places) // self.epochs for places in links.places]))
        found = torch.zeros(self.count, dtype=torch.long)
        for places, labels in zip(reversed(links.places), reversed(told), strict=True):
            found[places] = labels.cpu().repeat(self.epochs)
        return found.to(attack.device)


def _select(nested: Row, rows: Tensor) -> Row:
    return {name: _select(t, rows) if isinstance(t, dict) else t[rows] for name, t in nested.items()}


def _one_hot(y: Tensor, num_classes: int) -> Tensor:
    if y.ndim == 2:
        return y
    return (y[:, None] == torch.arange(num_classes, device=y.device)).float()  # torch's own looks at values: not under vmap
