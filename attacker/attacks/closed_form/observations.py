"""Observations as stacked gradients, the input of closed forms, and the class of their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor, nn

from attacker.attacks.cases import Case
from attacker.attacks.closed_form.input_scaling import InputScaling, measure_scaling
from attacker.attacks.networks.chain import Chain, read_chain
from attacker.attacks.networks.discrete_inputs import is_differentiable
from attacker.attacks.networks.forward import run_forward_pass
from attacker.attacks.networks.input_layer import is_input_random
from attacker.attacks.networks.traced import NotAChain
from attacker.attacks.simulation.client import (
    build_channel,
    build_network,
    compute_total_step,
    convert_to_gradient,
    find_omitted,
    find_schedule,
    get_buffers,
    simulate_channel,
)
from attacker.attacks.simulation.gradients import Gradients, build_gradient, squared_norm
from attacker.attacks.simulation.local_steps import simulate_one_step
from defenses.channel import Channel, transparent
from fedsim import models
from fedsim.recording.contradictions import EVEN_MAGNITUDES, has_even_magnitudes
from fedsim.recording.observation import DataSpec
from fedsim.recording.training import Training

FLOAT32_ROUNDING = 2.0**-24
"""Largest relative error of rounding to float32, the dtype of updates."""


@dataclass(frozen=True)
class StackedObservations:
    """N stacked observations of the same model, data and training settings, the first of each case, in float64.

    cases:     the N cases.
    model:     the network, whose own weights are not used.
    weights:   weights that the server sent, by parameter name, (1 or N, *shape); 1 if all observations share them.
    gradient:  by parameter name, (N, *shape), as `convert_to_gradient` recovers it from the updates.
    buffers:   by name, (N, *shape), or (*shape) if `same_buffers`, that is if all observations share them.
    simulated: function from (weights, x, y, buffers) to the gradient of candidate examples x with labels y.
    channel:   the attacker's model of the defense, a `defenses.channel.Channel`; `transparent`, which changes nothing, if the
               defense is not known.
    omitted:   names of the parameters that comparisons of gradients leave out; empty if the defense is not known.
    steps:     number of local steps.
    """

    cases: Sequence[Case]
    model: nn.Module
    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]
    buffers: dict[str, Tensor]
    same_buffers: bool
    simulated: Gradients
    channel: Channel
    omitted: frozenset[str]
    steps: int

    @property
    def data(self) -> DataSpec:
        return self.cases[0].observations[0].data

    @property
    def training(self) -> Training:
        return self.cases[0].observations[0].training

    @property
    def examples(self) -> int:
        return self.cases[0].observations[0].num_examples or 0

    @cached_property
    def _chain_and_scaling(self) -> tuple[Chain | str, InputScaling | None]:
        first = self.cases[0].observations[0]
        layout = models.build_layout(first.model, first.data)
        try:
            chain = read_chain(layout, first.data.shape, one_dtype=True, scaled_inputs=True)
            if not chain.scales_inputs:
                return chain, None
            return chain, measure_scaling(self.model, {**self.get_buffers(0), **self.get_weights(0)}, chain, first.data)
        except NotAChain as error:
            return str(error), None

    @property
    def chain(self) -> Chain | str:
        """The model as a chain of layers, or the reason why it is not one, as a string."""
        return self._chain_and_scaling[0]

    @cached_property
    def search_advice(self) -> str:
        """What to do instead, to be added to the reason why a closed form cannot be used; "" if searches are refused as well."""
        first = self.cases[0].observations[0]
        return "; a search, such as the attack cpl, has no such limit" if is_differentiable(first.model, first.data) else ""

    def scale_inputs(self, x: Tensor) -> Tensor:
        """Return the inputs (..., *shape) of the first layer of `chain` for examples x (..., *shape) in [0, 1]."""
        scaling = self._chain_and_scaling[1]
        return self.data.normalise(x) if scaling is None else scaling.apply(x)

    def restore_examples(self, inputs: Tensor) -> Tensor:
        """Return the examples (..., *shape) for inputs (..., *shape) of the first layer of `chain`."""
        scaling = self._chain_and_scaling[1]
        return self.data.denormalise(inputs) if scaling is None else scaling.undo(inputs)

    def make_paler(self, x: Tensor, mse: float | None) -> Tensor:
        """Return copies of the examples x (N, *shape) whose inputs of the first layer are nearer to 0.

        The factor of an example's inputs is such that the mean squared difference of its values is `mse`, but at least 0; it is a
        half if `mse` is None.
        """
        x = x.to(self.device, self.dtype)
        difference = x - self.restore_examples(torch.zeros_like(x))
        size = difference.flatten(1).square().mean(dim=1).sqrt().clamp(min=1e-12)
        factor = torch.full_like(size, 0.5) if mse is None else (sqrt(mse) / size).clamp(max=1)
        return x - factor.reshape(-1, *[1] * (x.ndim - 1)) * difference

    def get_input_range(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and the highest inputs of the first layer of `chain` for examples in [0, 1], each (*shape)."""
        ends = (torch.full(self.data.shape, value, dtype=self.dtype, device=self.device) for value in (0.0, 1.0))
        low, high = (self.scale_inputs(end) for end in ends)
        return torch.minimum(low, high), torch.maximum(low, high)

    def draws_before(self, layer: str) -> bool:
        """Return whether the model changes the input of `layer` at random while clients train, see `is_input_random`."""
        first = self.cases[0].observations[0]
        return first.training.mode == "train" and is_input_random(first.model, first.data, layer)

    @cached_property
    def has_random_inputs(self) -> bool:
        """Whether the model is a chain that changes the input of its first layer at random in training, as dropout does."""
        return isinstance(self.chain, Chain) and self.draws_before(self.chain.layers[0].name)

    def explain_other_optimiser(self, i: int) -> str:
        """Return why the update of case i is not of SGD, which is stated, so that no closed form applies; "" if it may be."""
        first = self.cases[i].observations[0]
        if first.training.optimiser != "sgd" or first.is_defended or not has_even_magnitudes(first.update):
            return ""
        return f"closed forms cannot invert the update of {first.key}: {EVEN_MAGNITUDES}"

    def select(self, rows: Sequence[int]) -> "StackedObservations":
        """Return only the observations of the cases with indices `rows`."""
        at = torch.tensor(list(rows), device=self.device)
        return replace(
            self,
            cases=[self.cases[i] for i in rows],
            weights={name: w[at] if len(w) > 1 else w for name, w in self.weights.items()},
            gradient={name: g[at] for name, g in self.gradient.items()},
            buffers=self.buffers if self.same_buffers else {name: b[at] for name, b in self.buffers.items()},
        )

    def get_weights(self, i: int) -> dict[str, Tensor]:
        return {name: w[i if len(w) > 1 else 0] for name, w in self.weights.items()}

    def get_buffers(self, i: int) -> dict[str, Tensor]:
        """Return the buffers of case i by name."""
        return {name: b if self.same_buffers else b[i] for name, b in self.buffers.items()}

    def measure_misfit(self, i: int, x: Tensor, y: Tensor) -> float:
        """Return the distance of an answer's gradient from the observed one of case i, relative to the observed one's norm.

        The answer's gradient first passes through the clients' optimiser, which may clip or normalise it, and through `channel`,
        which simulates their defense. Parameters in `omitted` are left out.
        0 means exact; 1 is the distance of a zero gradient, and is also returned for NaN and for no examples. An infinite
        distance is returned as 1e30. If the answer has fewer examples than the client, the missing examples are taken to
        contribute nothing to the mean gradient.
        x: (B, *shape) in [0, 1]. y: (B,).
        """
        if not len(x):
            return 1.0
        weights = self.get_weights(i)
        simulated = self.simulated(weights, x.to(self.device, self.dtype), y.to(self.device), self.get_buffers(i))
        if len(x) < self.examples:
            simulated = {name: len(x) / self.examples * g for name, g in simulated.items()}
        simulated = simulate_one_step(simulated, weights, self.training)
        if self.channel is not transparent:
            known = self.channel.learn(self._decode_update(i))
            simulated = simulate_channel(self.channel, known, simulated, weights, self.training, self.steps)
        return self.measure_distance(i, simulated)

    def measure_distance(self, i: int, simulated: Mapping[str, Tensor]) -> float:
        """Return the distance of a simulated gradient from the observed one of case i, relative to the norm of the observed one.

        Parameters in `omitted` are left out. NaN counts as 1, and an infinite distance as 1e30.
        """
        observed = {name: g[i] for name, g in self.gradient.items() if name not in self.omitted}
        difference = {name: simulated[name] - g for name, g in observed.items()}
        return float((squared_norm(difference) / squared_norm(observed)).sqrt().nan_to_num(nan=1.0, posinf=1e30))

    def differentiate_outputs(self, module: str, x: Tensor) -> Tensor:
        """Return the gradient of each example's own loss at the outputs of a module for each of K labels, (K, R, *outputs).

        module: its name in the model, which has the weights and buffers of the first case. x: examples (R, *shape), which are
        clamped to [0, 1].
        """
        outputs: list[Tensor] = []

        def keep_output(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            outputs.append(output.detach().requires_grad_())
            return outputs[-1]

        handle = self.model.get_submodule(module).register_forward_hook(keep_output)
        try:
            state = {**self.get_weights(0), **self.get_buffers(0)}
            logits = run_forward_pass(self.model, state, self.data.normalise(x.clamp(0, 1)))
        finally:
            handle.remove()
        loss = models.find_loss(self.training.loss)
        labels = (torch.full((len(x),), label, device=x.device) for label in range(self.data.num_classes))
        return torch.stack([torch.autograd.grad(len(x) * loss(logits, y), outputs, retain_graph=True)[0] for y in labels])

    def _decode_update(self, i: int) -> dict[str, Tensor]:
        """Return the update of a case as it was received, on the device of the gradients."""
        return {name: u.to(self.device) for name, u in self.cases[i].observations[0].update.items()}

    def estimate_noise(self, i: int) -> float:
        """Return the root mean square norm of the defense's noise, relative to the norm of the observed gradient of case i.

        The gradient of the true examples has about this distance to the observed one. 0 if `channel` models no noise.
        """
        power = self.channel.noise(self._decode_update(i)) / compute_total_step(self.training, self.steps) ** 2
        return float((power / squared_norm({name: g[i] for name, g in self.gradient.items()})).sqrt())

    @property
    def device(self) -> torch.device:
        return next(iter(self.gradient.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.gradient.values())).dtype

    def jitter(self, rngs: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """Return the gradient with random relative errors of at most FLOAT32_ROUNDING in each value.

        rngs: one per observation.
        """
        return {
            name: g
            * (
                1
                + FLOAT32_ROUNDING
                * torch.stack([2 * torch.rand(g.shape[1:], generator=r, dtype=g.dtype) - 1 for r in rngs]).to(g)
            )
            for name, g in self.gradient.items()
        }


@dataclass(frozen=True)
class ClosedFormAnswer:
    """The answer of a closed form to one case (the observations that are attacked together).

    x, y:       the examples found, (B, *shape), whose values may lie outside [0, 1], and their labels (B,). B may be 0.
    route:      name of the closed form.
    notes:      remarks for the user.
    doubts:     reasons why the answer may be wrong; not shown if its gradient is within `routing.EXACT_DISTANCE` of the observed
                one.
    stays:      (B,) in [0, 1], how certain each example is, from which its confidence is estimated; NaN for examples that may be
                mixtures of several. None if the closed form does not measure it; `Routing` may then measure how little x changes
                under other rounding errors of the gradient.
    twin:       another x with the same gradient, if the closed form `layers` or `peeled` found one; else None.
    determined: share of the input's values that the gradient determines, by count; below 1 the input is not unique. 1 also if it
                was not counted.
    likeliest:  whether x is a maximum a posteriori (MAP) estimate, whose prior keeps it from fitting noise.
    final:      whether no search starts from x, since a search for the whole gradient would move away from a correct answer.
    open_question: reason why the confidence is undecided instead of high; "" for none.
    """

    x: Tensor
    y: Tensor
    route: str
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    stays: Tensor | None = None
    twin: Tensor | None = None
    determined: float = 1.0
    likeliest: bool = False
    final: bool = False
    open_question: str = ""

    @classmethod
    def without_examples(cls, data: DataSpec, route: str, *notes: str) -> "ClosedFormAnswer":
        """Return an answer without examples. notes: the reasons."""
        return cls(torch.zeros(0, *data.shape), torch.zeros(0, dtype=torch.long), route, notes)


def observe(cases: Sequence[Case], *, knows_defense: bool = True, device: str = "cpu") -> StackedObservations:
    """Stack the first observation of each case. Raises ValueError if a gradient is zero, or has NaN or infinite values.

    The cases must agree in model, data, training settings, defense and number of examples, which are read from the first case.
    knows_defense: whether `simulated`, `channel` and `omitted` follow the clients' defense; if False, no defense is assumed.
    """
    observations = [case.observations[0] for case in cases]
    first = observations[0]
    model = build_network(first).to(device)
    order = [name for name, _ in model.named_parameters()]
    same = all(o.weights is first.weights for o in observations)
    weights = [{name: o.weights[name].to(device).double() for name in order} for o in observations[: 1 if same else None]]
    steps = find_schedule(first)[1]
    gradients = []
    for i, observation in enumerate(observations):
        update = {name: observation.update[name].to(device).double() for name in order}
        gradients.append(convert_to_gradient(update, weights[0 if same else i], observation.training, steps))
        _check_gradient(gradients[-1], observation.key)
    buffers, same_buffers = get_buffers(model, observations)
    return StackedObservations(
        cases=cases,
        model=model,
        weights={name: torch.stack([w[name] for w in weights]) for name in order},
        gradient={name: torch.stack([g[name] for g in gradients]) for name in order},
        buffers={name: b.double() if b.is_floating_point() else b for name, b in buffers.items()},
        same_buffers=same_buffers,
        simulated=build_gradient(model, first.data, first.training.loss, first.gradient.build() if knows_defense else None),
        channel=build_channel(first, model) if knows_defense else transparent,
        omitted=find_omitted(first, model) if knows_defense else frozenset(),
        steps=steps,
    )


def _check_gradient(gradient: dict[str, Tensor], round_and_client: str) -> None:
    if not all(bool(torch.isfinite(g).all()) for g in gradient.values()):
        raise ValueError(
            f"the update of {round_and_client} contains NaN or infinite values, so it cannot be inverted; attack other updates"
        )
    if not any(bool((g != 0).any()) for g in gradient.values()):
        raise ValueError(f"the update of {round_and_client} is zero, so it contains no information on the client's examples")
