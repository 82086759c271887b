"""One observation of each case, stacked: what a search needs to compare a guess with it."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from attacker.attacks.gradients.adjoints import Adjoints, adjoints
from attacker.attacks.gradients.allocator import keep_freed_memory
from attacker.attacks.gradients.compiled import Compiled, Evaluate
from attacker.attacks.gradients.convolutions import channels_last
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.gradients.products import Gradient, squared_norm
from attacker.attacks.gradients.vectorised import PerProblem, apart, per_problem, together
from attacker.attacks.matching.objectives import Objective
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.simulation.client import gradient_of, through
from attacker.attacks.simulation.local_steps import as_stepped
from defenses.channel import transparent
from fedsim.recording.observation import Observation

ProblemRow = dict[str, Any]
"""What belongs to one problem; stacked, one row for each."""
Decode = Callable[[Tensor, ProblemRow], tuple[Tensor, Tensor]]
"""From latents and what belongs to their problems, all examples of each problem and their labels."""


class View(ObservedGradients):
    """One observation of every case, and how the gradients of guesses are compared with it.

    places: (cases, N) which of the `examples` of its case each place holds. gamma: (cases,) how much the observation counts.
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        places: Tensor,
        gamma: Tensor,
        examples: int,
        *,
        model: nn.Module,
        objective: Objective,
        simulation: Simulation,
        device: str = "cpu",
        compiled: bool = False,
    ) -> None:
        keep_freed_memory()
        super().__init__(observations, model=model, device=device, knows_defense=simulation.knows_defense)
        self.objective, self.simulation = objective, simulation
        loss = self.training.loss
        self.plain = simulation.whole(gradient_of(model, self.data, loss), self.training, self.sizes)
        self.gradient = simulation.whole(gradient_of(model, self.data, loss, self.rule), self.training, self.sizes)
        self._stack(places, gamma)
        self.in_order = bool((places == torch.arange(examples)).all()) if places.shape[1] == examples else False
        own_way = self.own_rule or simulation.surrogate or simulation.local_steps == "simulated"
        self.common = not own_way and self.shared and self.same_buffers
        self.to_compile = compiled
        self.compiled: Compiled | None = None

    @cached_property
    def at_once(self) -> PerProblem | None:
        """The gradients of all problems by one ordinary batch, where they share weights and clients go by the plain rule."""
        return per_problem(self.model, self.data, self.training.loss) if self.common else None

    @cached_property
    def written(self) -> Adjoints | None:
        """The same written out, for networks that this is known of: to be compiled, as what autograd notes cannot be."""
        return adjoints(self.model, self.data, self.training.loss, self.weights) if self.common else None

    def _stack(self, places: Tensor, gamma: Tensor) -> None:
        """Stack what differs between cases; weights that all of them share are kept once."""
        compared = {name: g for name, g in self.gradients.items() if name not in self.omitted}
        scale = [self._scale({name: g[i] for name, g in compared.items()}) for i in range(len(places))]
        scales = {name: torch.stack([s[name] for s in scale]) for name in compared} if self.objective.layers else {}
        self.rows: ProblemRow = {
            "observed": {name: _laid_out(g) for name, g in (vmap(_scaled)(compared, scales) if scales else compared).items()},
            "scale": scales,
            "known": vmap(self.channel.learn)(self.seen),
            "places": places.to(self.device),
            "gamma": gamma.to(self.device),
        }
        if self.simulation.surrogate:
            self.rows["seen"] = self.seen
        if not self.shared:
            self.rows["weights"] = self.weights
        if not self.same_buffers:
            self.rows["buffers"] = self.buffers
        self.worst = vmap(self.objective.distance.worst)(self.rows["observed"])
        self.noisy = bool(self.channel.noise({name: torch.ones_like(s[0]) for name, s in self.seen.items()}) > 0)
        self.power = self._power()

    def _power(self) -> Tensor:
        """Return that of the noise of known power in what is compared, as it is compared, (cases,)."""
        scale = self.rows["scale"]
        counted = [(g[0].numel(), scale[name].square() if name in scale else 1.0) for name, g in self.rows["observed"].items()]
        share: Tensor = self.variance * sum(count * weight for count, weight in counted)
        return share

    @property
    def coordinates(self) -> int:
        """Number of gradient entries that enter the distance, per case."""
        return sum(g[0].numel() for g in self.rows["observed"].values())

    def _scale(self, observed: Gradient) -> dict[str, Tensor]:
        """By what to multiply tensors so that layers count as they should: distances and dot products are quadratic."""
        layers = self.objective.layers
        return {name: w.sqrt() for name, w in layers(self.model, observed).items()} if layers else {}

    def case(self, i: int) -> ProblemRow:
        """The row of case i, with its weights and buffers."""
        return self.state(i) | _row(self.rows, i)

    def distance(self, row: ProblemRow, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """How far the gradient of the guess x (V, *shape), y (V,) or (V, K), all examples of a case, is from the observed one."""
        return self.objective.distance(self.simulate(row, x, y, z), row["observed"])

    def simulate(self, row: ProblemRow, x: Tensor, y: Tensor, z: Tensor) -> Gradient:
        """The gradient that would be observed of a guess, as it is compared."""
        weights = row.get("weights", self.weights)
        at = self._surrogate(row, weights, z)
        return self._seen(self.gradient(at, x[row["places"]], y[row["places"]], row.get("buffers", self.buffers)), row)

    def _surrogate(self, row: ProblemRow, weights: Gradient, z: Tensor) -> Gradient:
        """Weights on the way from those sent to those sent back, at the share that the search found so far (SME, eq. 6)."""
        if not self.simulation.surrogate:
            return weights
        share = z[-1].sigmoid()
        return {name: w + share * row["seen"][name] for name, w in weights.items()}

    def powers(self, row: ProblemRow, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Of a guess, the squared norms of its gradient before and after the defense."""
        weights, buffers = row.get("weights", self.weights), row.get("buffers", self.buffers)
        before = _scaled(self.plain(weights, x[row["places"]], y[row["places"]], buffers), row["scale"])
        return squared_norm({name: before[name] for name in row["observed"]}), squared_norm(
            {name: g for name, g in self.simulate(row, x, y, z).items() if name in row["observed"]}
        )

    def evaluate(
        self, z: Tensor, row: ProblemRow, decode: Decode, problem: ProblemRow, precision: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of latents (P, D), the gradients (P, D) and values (P,) of this view's part of the loss.

        precision: of convolutions, where that can be chosen.
        """
        if self.to_compile and precision is None:
            if self.compiled is None:
                best = self._written(decode) if self.written is not None else self._of_each(decode)
                self.compiled = Compiled(best, self._as_it_is(decode), len(self.worst))
            return self.compiled(z, row, problem)
        return self._as_it_is(decode, precision)(z, row, problem)

    def _as_it_is(self, decode: Decode, precision: torch.dtype | None = None) -> Evaluate:
        if self.at_once is not None:
            return lambda z, row, problem: self._at_once(z, row, decode, problem, precision)
        return self._of_each(decode)

    def _of_each(self, decode: Decode) -> Evaluate:
        """By `vmap` over problems."""

        def loss(z: Tensor, row: ProblemRow, problem: ProblemRow) -> Tensor:
            return self._weighed(self.distance(row, *decode(z, problem), z), row, problem)

        return lambda z, row, problem: each(grad_and_value(loss), z, row, problem)

    def _written(self, decode: Decode) -> Evaluate:
        """By what a distance between gradients does to them, and `adjoints`; nothing is left to autograd."""
        written = self.written
        assert written is not None

        def loss(gradient: Gradient, row: ProblemRow, problem: ProblemRow) -> Tensor:
            seen, observed = (written.laid(g) for g in (self._seen(written.shaped(gradient), row), row["observed"]))
            return self._weighed(self.objective.distance(seen, observed), row, problem)

        def evaluate(z: Tensor, row: ProblemRow, problem: ProblemRow) -> tuple[Tensor, Tensor]:
            def fed(z: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
                x, y = self._placed(*decode(z, problem), row)
                x = self.data.normalise(x)
                return ((x, y) if y.is_floating_point() else (x,)), y

            (x, *_), of_guess, y = vjp(fed, z, has_aux=True)  # type: ignore[misc]
            gradient, of_gradient = written(x, y)
            slopes, value = each(grad_and_value(loss), gradient, row, problem)
            return of_guess(of_gradient(slopes))[0], value

        return evaluate

    def _at_once(
        self, z: Tensor, row: ProblemRow, decode: Decode, problem: ProblemRow, precision: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """The same with one ordinary batch of the examples of all problems, which share weights."""
        assert self.at_once is not None
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            gradient = self.at_once(self.weights, *self._placed(*decode(z, problem), row), self.buffers, precision)
            stacked, whole = together(gradient), self.objective.distance
            distance = whole if stacked is not None else whole.of_large or whole

            def compared(gradient: Gradient, row: ProblemRow) -> Tensor:
                return distance(self._seen(gradient, row), row["observed"])

            found = each(compared, stacked, row) if stacked is not None else one_by_one(compared, apart(gradient), row)
            value = self._weighed(found, row, problem)
            if not value.requires_grad:  # where nothing of the gradient was sent
                return torch.zeros_like(z), value
            (slope,) = torch.autograd.grad(value.sum(), z)
        return slope, value.detach()

    def _placed(self, x: Tensor, y: Tensor, row: ProblemRow) -> tuple[Tensor, Tensor]:
        """Of all examples of all problems, those that this view's batches hold."""
        if self.in_order:
            return x, y
        rows = torch.arange(len(x), device=x.device)[:, None]
        return x[rows, row["places"]], y[rows, row["places"]]

    def _seen(self, gradient: Gradient, row: ProblemRow) -> Gradient:
        """The gradient of one problem as it would be observed and is compared."""
        if self.simulation.local_steps == "one_batch":
            gradient = as_stepped(dict(gradient), row.get("weights", self.weights), self.training)
        if self.channel is not transparent:
            gradient = through(self.channel, row["known"], gradient, row.get("weights", self.weights), self.training, self.steps)
        return _scaled(gradient, row["scale"])

    def _weighed(self, distance: Tensor, row: ProblemRow, problem: ProblemRow) -> Tensor:
        weighed: Tensor = row["gamma"] * problem["gain"] * self.objective.robust_loss(distance)
        return weighed


def each(function: Callable[..., Any], *rows: Any) -> Any:
    """`function` of each problem, whose arguments are one row each of tensors or nested mappings of them; one row a result."""
    first = next(iter(tree_leaves(rows)))
    if len(first) > 1:
        return vmap(function, randomness="different")(*rows)
    alone = function(*tree_map(lambda t: t[0], rows))
    return tree_map(lambda t: t[None], alone)


def one_by_one(compared: Callable[[Gradient, ProblemRow], Tensor], gradients: Sequence[Gradient], rows: ProblemRow) -> Tensor:
    """(P,), the same problem by problem: large tensors of one problem stay where the processor reaches them fast."""
    return torch.stack([compared(gradient, _row(rows, i)) for i, gradient in enumerate(gradients)])


def _laid_out(stack: Tensor) -> Tensor:
    """(P, *shape of a weight), as gradients of convolutions are."""
    return channels_last(stack) if stack.ndim == 5 else stack


def _scaled(gradient: Gradient, scale: Gradient) -> dict[str, Tensor]:
    return {name: g * scale[name] if name in scale else g for name, g in gradient.items()}


def _row(nested: ProblemRow, i: int) -> ProblemRow:
    return {name: _row(t, i) if isinstance(t, dict) else t[i] for name, t in nested.items()}
