"""One observation of every case, and the distance between its gradient and the simulated gradient of candidates.

Shapes: P problems (one search of one case each), V examples per case, N of them in the observation, D entries of a latent vector.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import vmap

from attacker.attacks.gradients.adjoints import Adjoints, build_adjoints
from attacker.attacks.gradients.convolutions import to_channels_last
from attacker.attacks.gradients.hardware import keep_freed_memory
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.gradients.products import GradientTensors
from attacker.attacks.gradients.vectorised import PerProblem, build_per_problem
from attacker.attacks.matching.layer_weights import weigh_by_norm, weigh_relatively
from attacker.attacks.matching.loss.problems import ProblemRow, get_row, map_problems
from attacker.attacks.matching.objectives import Objective
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.simulation.batch_statistics import compute_statistics, measure_mismatch, read_statistics
from attacker.attacks.simulation.bottleneck import SolvedBottleneck, find_solved_bottleneck
from attacker.attacks.simulation.client import find_frozen, follow_channel, simulate_channel
from attacker.attacks.simulation.draws import Draws
from attacker.attacks.simulation.gradients import build_gradient, squared_norm
from attacker.attacks.simulation.local_steps import simulate_one_step
from attacker.attacks.simulation.step_orders import StepOrder
from defenses.channel import ChannelState, transparent
from fedsim.recording.observation import Observation


class View(ObservedGradients):
    """One observation of every case, stacked, with functions that compare simulated gradients with it.

    The o-th view of a search holds the o-th observation of each case.
    places:   (cases, N) index of the example at each of the N positions of the observation, among the V examples of the case.
    gamma:    (cases,) weight of the observation in the objective.
    examples: the number V.
    draws:    variables of the client's random draws at the end of latent vectors; None if none are searched.
    bottleneck: for a network with a variational bottleneck, a layer that draws its outputs at random: function that computes the
              gradients of this layer's encoder and of the layers between input and encoder, without simulating the draws; then
              only these gradients are compared. None for other networks, and where it cannot be used.
    rows:     the data that differ between cases, tensors with one row per case, in nested dicts. The argument `row` of the
              methods is one row of `rows`, or a stack of rows, one per problem.
    worst:    (cases,) distance of each observed gradient from a zero gradient.
    power:    (cases,) expected squared norm of the known noise in the observed gradient, with layer weights applied.
    noisy:    whether the attacker knows that the defense adds noise.
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
        draws: Draws | None = None,
    ) -> None:
        keep_freed_memory(max(w.nbytes for w in observations[0].weights.values()))
        super().__init__(observations, model=model, device=device, knows_defense=simulation.knows_defense)
        self.objective, self.simulation, self.draws = objective, simulation, draws
        loss = self.training.loss
        steps = (self.training, self.sizes, find_frozen(model, self.training))
        self.plain = simulation.build_gradient(build_gradient(model, self.data, loss), *steps)
        self.gradient = simulation.build_gradient(build_gradient(model, self.data, loss, self.rule), *steps)
        # Values that differ: QSGD sends values that are all equal without noise. Not the update, which the null must not read.
        generic = {
            name: torch.linspace(0.5, 1.5, s[0].numel(), dtype=s.dtype, device=s.device).view_as(s[0])
            for name, s in self.seen.items()
        }
        self.noisy = bool(self.channel.noise(generic) > 0)
        self.bottleneck = self._find_bottleneck(places.shape[1])
        self._stack(places, gamma)
        if objective.batch_norm:
            self._add_statistics(observations)
        self.in_order = bool((places == torch.arange(examples)).all()) if places.shape[1] == examples else False
        differs = self.own_rule or draws is not None or simulation.surrogate or simulation.local_steps == "simulated"
        self.common = not differs and self.bottleneck is None and self.shared and self.same_buffers

    @cached_property
    def at_once(self) -> PerProblem | None:
        """The gradient function for all problems in one batch, see `build_per_problem`; None if it cannot be used.

        It requires that all cases share weights and buffers, that `build_per_problem` supports the network, and that the
        simulated gradient is the gradient of one batch: without simulated local steps, surrogate weights, searched draws, a
        `bottleneck`, or a known defense that changes how clients compute gradients.
        """
        return build_per_problem(self.model, self.data, self.training.loss) if self.common else None

    @cached_property
    def written(self) -> Adjoints | None:
        """The gradient function for all problems by explicit formulas, which can be compiled; None if there are no formulas.

        There are formulas for chains of linear layers and small convolutions, on the CPU. See `build_adjoints`. They require that
        all cases share weights and buffers, and that the simulated gradient is the gradient of one batch, as `at_once` does.
        """
        return build_adjoints(self.model, self.data, self.training.loss, self.weights) if self.common else None

    def _find_bottleneck(self, examples: int) -> SolvedBottleneck | None:
        """Return the function `bottleneck` (see `View`); None if the network has no variational bottleneck, or none can be used.

        The function solves the derivatives of the loss by the encoder's outputs, which depend on the draws, from the observed
        gradient. It can be used if the attacker knows the defense and the defense does not change the update or its gradient, if
        clients train by SGD without clipping, if the attack takes the update for the gradient of one batch, if the encoder is
        trained, and if `find_solved_bottleneck` finds it. examples: number N in the observation.
        """
        simulation, training = self.simulation, self.training
        plain = simulation.local_steps == "one_batch" and training.is_linear
        if not simulation.knows_defense or self.defended or not plain:
            return None
        weights = self.weights if self.shared else {name: w[0] for name, w in self.weights.items()}
        bottleneck = find_solved_bottleneck(self.model, self.data, weights, examples, training.loss)
        return None if bottleneck is None or any(training.is_frozen(name) for name in bottleneck.names) else bottleneck

    def _is_compared(self, name: str) -> bool:
        if self.bottleneck is None:
            return name not in self.omitted
        return name in self.bottleneck.compared and not self.training.is_frozen(name)

    def _stack(self, places: Tensor, gamma: Tensor) -> None:
        """Set `rows`, the data that differ between cases (see `View`), `worst` and `power`.

        worst: (cases,) distance of each observed gradient from a zero gradient. power: (cases,) expected squared norm of the
        known noise in this gradient. places, gamma: see `View`.
        """
        compared = {name: g for name, g in self.gradients.items() if self._is_compared(name)}
        scale = [self._compute_scale({name: g[i] for name, g in compared.items()}) for i in range(len(places))]
        scales = {name: torch.stack([s[name] for s in scale]) for name in scale[0]}
        scaled = vmap(_scale)(compared, scales) if scales else compared
        self.rows: ProblemRow = {
            "observed": {name: to_channels_last(g) if g.ndim == 5 else g for name, g in scaled.items()},
            "scale": scales,
            "known": vmap(self.channel.learn)(self.seen),
            "places": places.to(self.device),
            "gamma": gamma.to(self.device),
        }
        if self.simulation.surrogate:
            self.rows["seen"] = self.seen
        if self.bottleneck is not None:
            self.rows["encoder"] = {name: self.gradients[name] for name in self.bottleneck.names}
        if not self.shared:
            self.rows["weights"] = self.weights
        if not self.same_buffers:
            self.rows["buffers"] = self.buffers
        self.worst = vmap(self.objective.distance.worst)(self.rows["observed"])
        self.power = self._estimate_power()

    def _add_statistics(self, observations: Sequence[Observation]) -> None:
        """Add the statistics of batch norm that the clients returned to `rows`, if all clients returned statistics."""
        stated = [read_statistics(observation, self.model) for observation in observations]
        if all(stated):
            names = {
                name: {moment: [statistics[name][moment] for statistics in stated] for moment in stated[0][name]}
                for name in stated[0]
            }
            self.rows["statistics"] = {
                name: {moment: torch.stack(values).to(self.device) for moment, values in moments.items()}
                for name, moments in names.items()
            }

    def measure_statistics(self, row: ProblemRow, x: Tensor) -> Tensor:
        """Return how much a candidate's statistics of batch norm differ from those that the client returned, a 0-d tensor.

        It is the result of `measure_mismatch` times the observation's weight. x: all examples of the case (V, *shape), of which
        those in the observation are used.
        """
        weights, buffers = row.get("weights", self.weights), row.get("buffers", self.buffers)
        placed = x[row["places"]]
        simulated = compute_statistics(self.model, self.data, self.training.loss, weights, buffers, placed, self.sizes)
        gamma: Tensor = row["gamma"]
        return gamma * measure_mismatch(simulated, row["statistics"])

    def _estimate_power(self) -> Tensor:
        """Return the expected squared norm (cases,) of known noise in the compared gradient, with layer weights applied."""
        scale = self.rows["scale"]
        weights = {name: s.square().flatten(1).mean(dim=1) if s.ndim > 1 else s.square() for name, s in scale.items()}
        counted = [(g[0].numel(), weights.get(name, 1.0)) for name, g in self.rows["observed"].items()]
        share: Tensor = self.variance * sum(count * weight for count, weight in counted)
        return share

    @property
    def coordinates(self) -> int:
        """Number of gradient entries of the first case that enter the distance with a weight above 0."""
        scale = {name: s[0] for name, s in self.rows["scale"].items() if s.ndim > 1}
        return sum(int((scale[name] > 0).sum()) if name in scale else g[0].numel() for name, g in self.rows["observed"].items())

    @property
    def is_partial(self) -> bool:
        """Whether entries of the observed gradient have weights of their own, such as 0, in the distance."""
        return any(s.ndim > 1 for s in self.rows["scale"].values())

    def _compute_scale(self, observed: GradientTensors) -> dict[str, Tensor]:
        """Return a dict from a tensor's name to the square root of its weight, or of its entries' weights, in squared distances.

        The dict is empty if there are no weights.
        """
        layers = self.objective.layers
        weights = layers(self.model, observed) if layers else {}
        if observed and not self.noisy and self.objective.unit:
            weigh = weigh_by_norm if self.objective.unit == "norm" else weigh_relatively
            weights = {name: w * weights.get(name, 1.0) for name, w in weigh(observed).items()}
        return {name: w.sqrt() for name, w in weights.items()}

    def set_order(self, orders: Sequence[StepOrder]) -> None:
        """Simulate local steps with these orders of the examples in the observation, one for each case."""
        used = torch.tensor([order.examples for order in orders], device=self.device)
        self.rows["places"] = torch.stack([row[order] for row, order in zip(self.rows["places"], used, strict=True)])

    def get_case(self, i: int) -> ProblemRow:
        """Return the row of data of the i-th case that `compute_distance` takes, including the weights and buffers sent."""
        return self.get_state(i) | get_row(self.rows, i)

    def compute_distance(self, row: ProblemRow, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Return the distance between the simulated gradient of a candidate and the observed gradient, a 0-d tensor.

        row: data of the case. x, y: all examples of the case (V, *shape), and labels (V,) or soft labels (V, K). z: the latent
        vector (D,), of which only the surrogate parameter and the variables of random draws are used.
        """
        return self.objective.distance(self.simulate(row, x, y, z), row["observed"])

    def simulate(self, row: ProblemRow, x: Tensor, y: Tensor, z: Tensor) -> GradientTensors:
        """Return the gradient expected for a candidate, with defense and layer weights. Arguments as in `compute_distance`."""
        weights = row.get("weights", self.weights)
        return self.observe(self._differentiate(weights, x, y, z, row), row)

    def _differentiate(self, weights: GradientTensors, x: Tensor, y: Tensor, z: Tensor, row: ProblemRow) -> GradientTensors:
        """Return the gradient of one problem at these weights, by parameter name, before the defense changes an update.

        Other arguments as in `compute_distance`. If `bottleneck` is set, the result has only the parameters whose gradients are
        compared.
        """
        buffers, places = row.get("buffers", self.buffers), row["places"]
        if self.draws is not None:
            mixed = self.draws.mix(z, x[places], y[places], self.data.num_classes)
            return self.gradient(weights, *mixed, {**buffers, **self.draws.build_buffers(z)})
        weights = self._get_surrogate_weights(row, weights, z)
        if self.bottleneck is not None:
            return self.bottleneck(weights, x[places], y[places], row["encoder"], buffers)
        return self.gradient(weights, x[places], y[places], buffers)

    def _get_surrogate_weights(self, row: ProblemRow, weights: GradientTensors, z: Tensor) -> GradientTensors:
        """Return the weights sent; with `surrogate`, a point between them and those returned, given by z[-1] (SME, eq. 6)."""
        if not self.simulation.surrogate:
            return weights
        share = z[-1].sigmoid()
        return {name: w + share * row["seen"][name] for name, w in weights.items()}

    def compute_powers(self, row: ProblemRow, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared norms, 0-d, of a candidate's gradient before and after the defense, with layer weights applied.

        Arguments as in `compute_distance`.
        """
        weights, buffers = row.get("weights", self.weights), row.get("buffers", self.buffers)
        before = _scale(self.plain(weights, x[row["places"]], y[row["places"]], buffers), row["scale"])
        return squared_norm({name: before[name] for name in row["observed"]}), squared_norm(
            {name: g for name, g in self.simulate(row, x, y, z).items() if name in row["observed"]}
        )

    def compute_gradients(self, x: Tensor, y: Tensor, z: Tensor, row: ProblemRow) -> GradientTensors:
        """Return this observation's gradients for all problems, by parameter name, (P, *shape) each, as clients compute them.

        The effect of a defense on the finished update is not included.
        x, y: all examples (P, V, *shape) and labels of the problems, of which those in this observation are used. z: the latent
        vectors (P, D), of which only the surrogate parameter and the variables of random draws are used.
        """
        if self.at_once is not None:
            stacked = self.at_once(self.weights, *self.select_placed(x, y, row), self.buffers)
            return {name: torch.stack(g) if isinstance(g, tuple) else g for name, g in stacked.items()}

        def compute(x: Tensor, y: Tensor, z: Tensor, row: ProblemRow) -> GradientTensors:
            return self._differentiate(row.get("weights", self.weights), x, y, z, row)

        gradients: GradientTensors = map_problems(compute, x, y, z, row)
        return gradients

    def follow_round(self, gradient: GradientTensors, row: ProblemRow, state: ChannelState) -> tuple[Tensor, ChannelState]:
        """Return the distance of one problem's gradient from the observed one, and the state of its defense after this round.

        gradient: before the defense changes it. state: the defense's state after the client's earlier rounds; empty before the
        first.
        """
        weights = row.get("weights", self.weights)
        if self.simulation.local_steps == "one_batch":
            gradient = simulate_one_step(dict(gradient), weights, self.training)
        expected, after = follow_channel(self.channel, state, row["known"], gradient, weights, self.training, self.steps)
        return self.objective.distance(_scale(expected, row["scale"]), row["observed"]), after

    def weigh(self, distance: Tensor, row: ProblemRow, problem: ProblemRow) -> Tensor:
        """Return this observation's part of the loss: the robust loss of its distance, times its weight and the gain.

        distance: of one problem, 0-d, or of several, (P,). The gain counteracts a defense that makes gradients, and so the loss,
        small, see `CaseBatch._compute_gain`.
        """
        weighed: Tensor = row["gamma"] * problem["gain"] * self.objective.apply_robust_loss(distance)
        return weighed

    def select_placed(self, x: Tensor, y: Tensor, row: ProblemRow) -> tuple[Tensor, Tensor]:
        """Return the examples in this observation, and their labels, given all examples x (P, V, *shape) and labels y."""
        if self.in_order:
            return x, y
        rows = torch.arange(len(x), device=x.device)[:, None]
        return x[rows, row["places"]], y[rows, row["places"]]

    def observe(self, gradient: GradientTensors, row: ProblemRow) -> GradientTensors:
        """Return the gradient of one problem as it would be observed, after the defense and with layer weights applied."""
        weights, one_batch = row.get("weights", self.weights), self.simulation.local_steps == "one_batch"
        if one_batch:
            gradient = simulate_one_step(dict(gradient), weights, self.training)
        if self.channel is not transparent:
            approximate = one_batch and self.steps > 1
            gradient = simulate_channel(
                self.channel, row["known"], gradient, weights, self.training, self.steps, approximate=approximate
            )
        return _scale(gradient, row["scale"])


def _scale(gradient: GradientTensors, scale: GradientTensors) -> dict[str, Tensor]:
    return {name: g * scale[name] if name in scale else g for name, g in gradient.items()}
