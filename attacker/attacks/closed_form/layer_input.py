"""Route `layer_input`: computes the input of a hidden linear layer from its gradient, and inverts the layers before it.

For one example, the gradient of the weight of a layer W h + b is d h^T, and the gradient of b is d. If d is not zero, h, the
layer's input, follows without a search, whatever layers precede or follow. The layer may also be the encoder of a variational
bottleneck (PRECODE), whatever random values are drawn after it.

The answer is a maximum a posteriori (MAP) estimate by Adam, with a smoothness prior, in up to two stages: first from h alone,
then also from the gradient of the last convolution before the layer. If the loss depends on x only through h, the gradient of a
parameter p before the layer is the derivative of <W^T d, h(p, x)> with respect to p.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.cases import seed_generator
from attacker.attacks.closed_form.observations import ClosedFormAnswer, StackedObservations
from attacker.attacks.closed_form.rgap.recursion import RgapSettings
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import read_labels
from attacker.attacks.labels.rules import infer_labels
from attacker.attacks.matching.smooth_images import Spread, build_smooth_spread
from attacker.attacks.networks.discrete_inputs import is_differentiable
from attacker.attacks.networks.forward import list_linear, record_calls, run_forward_pass
from attacker.attacks.timing import time_call
from defenses.networks import find_encoders
from fedsim import models

ROUTE_NAME = "layer_input"
MIN_INPUT_RATIO = 0.1
"""Smallest number of distinct values in the layer's input, relative to the number of values of an example; with fewer, the answer
is hardly more than the prior."""
MAX_WEIGHTS = 2**24
"""Largest number of parameters of a network that is inverted; every iteration is a forward and backward pass through it."""
MIN_ZERO_SHARE = 0.02
"""Smallest share of zeros among the layer's inputs. Without zeros no ReLU precedes the layer, and gradient matching is better."""
MAX_ZERO_INPUT = 1e-4
"""Inputs below this share of the largest one count as zero, since rounding errors are of that size."""
MAX_RANK_ONE_ERROR = 0.02
"""Largest part of the layer's gradient, relative to its norm, that one example does not explain."""
MAX_GRADIENT_ERROR = 1e-3
"""Largest relative error at which the convolution's gradient counts as a function of the layer's input, on a random example."""
STAGE_STEPS, LEARNING_RATE = (400, 400), 0.05
"""Iterations of both stages, and the learning rate, which falls to zero as a cosine in each."""
INPUT_WEIGHT, CONVOLUTION_WEIGHT, PRIOR_WEIGHT, RANGE_WEIGHT = 1.0, 0.1, 1e-2, 10.0
"""Weights of the terms of the loss: layer's input, convolution's gradient, prior, and values outside [0, 1]."""
PRIOR_DECAY, PRIOR_COLOUR, START_DEVIATION = 1.2, 0.02, 0.3
"""Arguments `decay` and `colour_variance` of the prior (`build_smooth_spread`), and the standard deviation of the start. All were
chosen on eight images of the tuning part of CIFAR-10, on the LeNet with ReLU of Flower's quickstart."""


@dataclass(frozen=True)
class HiddenLayer:
    """A hidden linear layer, and the convolution before it.

    name:        name of the layer.
    inputs:      estimated number of distinct values among its inputs.
    convolution: name of the weights of the last convolution before it; "" if there is none, or if these weights also affect the
                 logits by a path that bypasses the layer, so that their gradient cannot be computed from the layer's input.
    """

    name: str
    inputs: int
    convolution: str


def invert_layer_input(observed: StackedObservations, rng: Generator, rgap: RgapSettings) -> Sequence[ClosedFormAnswer]:
    """Compute the example of each case from the input of a hidden linear layer, and return one answer per case.

    An answer has no examples if the gradient of its case does not fit the method. rgap: not used; other closed forms with this
    signature use it. Raises ValueError if no hidden layer is suitable (`find_suitable_layer`).
    """
    layer = find_suitable_layer(observed)
    return [_answer(observed, layer, i, seed_generator(rng, case, ROUTE_NAME)) for i, case in enumerate(observed.cases)]


def time_iteration(observed: StackedObservations) -> float:
    """Return the mean processor time in seconds of one iteration for one case, over both stages, see `time_call`.

    Raises ValueError if no hidden layer is suitable.
    """
    layer, inputs = find_suitable_layer(observed), InputRecorder(observed, 0)
    spread = build_smooth_spread(observed.data, decay=PRIOR_DECAY, colour_variance=PRIOR_COLOUR)
    convolution, rng = _find_convolution_gradient(observed, layer, 0), torch.Generator().manual_seed(0)
    example = torch.full(observed.data.shape, 0.5, device=observed.device)
    target = inputs.record_inputs(example)[layer.name].detach()
    cotangent = torch.ones_like(target)
    repeat = partial(_search, inputs, layer, target, cotangent, convolution, spread, rng, steps=(1, 1))
    return time_call(repeat, str(observed.device)) / (1 + (convolution is not None))


def find_suitable_layer(observed: StackedObservations) -> HiddenLayer:
    """Return the first hidden linear layer from whose input an example can be computed.

    The layer has a bias and is trained, it is called once and on one vector per example, its gradient is not distorted by a known
    defense, its input depends on the example, and the number of distinct values of this input is at least MIN_INPUT_RATIO times
    the number of values of an example. Equal values, such as copies made by pooling, count once (`_count_distinct`).
    Raises ValueError with the reason if there is no such layer, if the update is not of one example and one step, if the network
    reads whole numbers or has more than MAX_WEIGHTS parameters, or if it was trained with dropout.
    """
    if observed.examples != 1 or observed.steps != 1:
        raise ValueError(
            "the closed form 'layer_input' needs an update of one example and one step, and this update is of "
            f"{observed.examples} example{'s' * (observed.examples != 1)} and {observed.steps} "
            f"step{'s' * (observed.steps != 1)}{observed.search_advice}"
        )
    first = observed.cases[0].observations[0]
    if not is_differentiable(first.model, first.data):
        raise ValueError(
            "the network reads whole numbers, such as tokens or codes of categories, and the closed form 'layer_input' searches "
            "among real-valued inputs; the check tokens-readable of `attacker audit` finds which of them occur"
        )
    count = sum(p.numel() for p in observed.model.parameters())
    if count > MAX_WEIGHTS:
        raise ValueError(
            f"the network has {count:,} parameters, and the closed form 'layer_input' supports at most {MAX_WEIGHTS:,}; a "
            "search, such as the attack cpl, has no such limit"
        )
    drops = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in observed.model.modules())
    if drops and observed.training.mode == "train":
        raise ValueError(
            "clients train with dropout, and the closed form 'layer_input' cannot tell which inputs of a layer were zero before "
            "dropout; a search, such as the attack cpl, does not need to know"
        )
    network = InputRecorder(observed, 0)
    probe = torch.rand(observed.data.shape, generator=torch.Generator().manual_seed(0)).to(observed.device)
    minimum = MIN_INPUT_RATIO * observed.data.size
    head = models.find_head(observed.model, observed.data)[0].rpartition(".")[0]
    misleading = observed.omitted - find_encoders(observed.model)
    for name, h in network.record_inputs(probe).items():
        weight, bias = f"{name}.weight", f"{name}.bias"
        if name == head or not {weight, bias}.isdisjoint(misleading) or not {weight, bias} <= observed.gradient.keys():
            continue
        distinct = _count_distinct(h.detach())
        if distinct >= minimum and h.requires_grad:
            return HiddenLayer(name, distinct, network.find_convolution(name, probe))
    raise ValueError(
        "no hidden linear layer is suitable: it must have a bias, be trained, be called once and on one vector per example, have "
        f"a gradient that the defense does not distort, and have an input with at least {minimum:,.0f} distinct values, a tenth "
        "of the number of values of an example (equal values, such as copies made by pooling, count once); choose another attack"
    )


def _count_distinct(h: Tensor) -> int:
    """Return the estimated number of distinct inputs in h. Zeros are assumed to be repeated as often as other values."""
    positive = h[h != 0]
    return round(len(h) * len(torch.unique(positive)) / max(1, len(positive)))


class InputRecorder:
    """Forward passes of one example through the network of case i, in float32, that record the inputs of its linear layers.

    copies: number of copies of the example in each pass; batch normalisation in training mode needs two.
    """

    def __init__(self, observed: StackedObservations, i: int, *, copies: int = 1) -> None:
        self.model, self.data, self.copies = observed.model, observed.data, copies
        state = {**observed.get_buffers(i), **observed.get_weights(i)}
        self.state = {name: t.float().detach() if t.is_floating_point() else t for name, t in state.items()}

    def record_inputs(self, x: Tensor, changed: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return, by name, the input of each linear layer that is called once with one row per copy, for x (*shape) in [0, 1].

        Returned tensors that depend on x require gradients, also if x does not; the pass then uses a copy of x that does. The
        logits are kept in `logits`.
        changed: values by parameter name that replace the network's own values in this pass.
        """
        x = x if x.requires_grad else x.clone().requires_grad_()
        with record_calls(list_linear(self.model)) as seen:
            inputs = self.data.normalise(x.expand(self.copies, *x.shape))
            self.logits = run_forward_pass(self.model, {**self.state, **(changed or {})}, inputs)
        once = {name: calls[0][0] for name, calls in seen.items() if len(calls) == 1}
        return {name: h[0] for name, h in once.items() if h.ndim == 2 and len(h) == self.copies}

    def find_convolution(self, layer: str, x: Tensor) -> str:
        """Return the name of the weights of the last convolution before `layer`, or "", see `HiddenLayer.convolution`.

        x: an example (*shape) in [0, 1] for a forward pass.
        """
        named = {f"{name}.weight": m for name, m in self.model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
        weights = {name: self.state[name].clone().requires_grad_() for name in named if name in self.state}
        if not weights:
            return ""
        inner, bias = f"{layer}.weight", self.state[f"{layer}.bias"].clone().requires_grad_()
        h = self.record_inputs(x, {**weights, f"{layer}.bias": bias})[layer]
        loss = -self.logits.log_softmax(dim=1)[0, 0] if self.logits.shape[1] > 1 else self.logits.sum()
        d, *slopes = torch.autograd.grad(loss, [bias, *weights.values()], retain_graph=True, allow_unused=True)
        slopes_through_layer = torch.autograd.grad(h, list(weights.values()), d @ self.state[inner], allow_unused=True)
        pairs = {name: (w, b) for name, w, b in zip(weights, slopes, slopes_through_layer, strict=True) if b is not None}
        if not pairs:
            return ""
        name, (direct, through_layer) = list(pairs.items())[-1]
        return (
            name
            if direct is not None and float((direct - through_layer).norm()) <= MAX_GRADIENT_ERROR * float(direct.norm())
            else ""
        )


def _answer(observed: StackedObservations, layer: HiddenLayer, i: int, rng: Generator) -> ClosedFormAnswer:
    """Return the answer for case i.

    It has no examples if the gradient of the layer's bias is zero, or if the gradient of its weight is not the outer product of
    the gradient of the bias and a vector, up to MAX_RANK_ONE_ERROR, as one example causes it. It also has no examples if less
    than a share MIN_ZERO_SHARE of the layer's inputs is 0: then probably no ReLU precedes it.
    """
    weight, bias = observed.gradient[f"{layer.name}.weight"][i], observed.gradient[f"{layer.name}.bias"][i]
    if not bool(bias.any()):
        return ClosedFormAnswer.without_examples(observed.data, ROUTE_NAME, f"the gradient of {layer.name} is zero")
    h = bias @ weight / bias.square().sum()
    if float((weight - bias[:, None] * h).norm()) > MAX_RANK_ONE_ERROR * float(weight.norm()):
        reason = f"the gradient of {layer.name} does not have rank one, as that of one example has"
        return ClosedFormAnswer.without_examples(observed.data, ROUTE_NAME, reason)
    zero = h.abs() <= MAX_ZERO_INPUT * h.abs().max()
    if float(zero.double().mean()) < MIN_ZERO_SHARE:
        reason = f"hardly any input of {layer.name} is zero, so probably no ReLU precedes it"
        return ClosedFormAnswer.without_examples(observed.data, ROUTE_NAME, reason)
    target = h.masked_fill(zero, 0.0).float()
    cotangent = (bias @ observed.get_weights(i)[f"{layer.name}.weight"]).float()
    spread = build_smooth_spread(observed.data, decay=PRIOR_DECAY, colour_variance=PRIOR_COLOUR)
    x = _search(InputRecorder(observed, i), layer, target, cotangent, _find_convolution_gradient(observed, layer, i), spread, rng)
    labels = infer_case_labels(observed, i, rng)
    free = max(0.0, 1 - layer.inputs / observed.data.size)
    note = (f"the {layer.inputs:,} inputs of {layer.name} were inverted; the smoothness prior determines the rest",)
    return ClosedFormAnswer(x[None], labels.to(x.device), ROUTE_NAME, note, determined=1 - free, likeliest=True, final=True)


def infer_case_labels(observed: StackedObservations, i: int, rng: Generator) -> Tensor:
    """Return the labels of case i that are known, or else inferred from the gradient of the last layer."""
    case = observed.cases[i]
    if case.known_labels is not None:
        return case.known_labels
    gradients = ObservedGradients([case.observations[0]], model=observed.model, device=str(observed.device))
    return read_labels(infer_labels, gradients, 0, gradients.model, rng)


def _find_convolution_gradient(observed: StackedObservations, layer: HiddenLayer, i: int) -> Tensor | None:
    """Return the observed gradient of `layer.convolution` for case i; None if there is none, or it is zero or distorted."""
    if not layer.convolution or layer.convolution in observed.omitted:
        return None
    gradient = observed.gradient[layer.convolution][i].float()
    return gradient if bool(gradient.any()) else None


def _search(
    network: InputRecorder,
    layer: HiddenLayer,
    target: Tensor,
    cotangent: Tensor,
    convolution: Tensor | None,
    spread: Spread,
    rng: Generator,
    *,
    steps: tuple[int, int] | None = None,
) -> Tensor:
    """Return the approximate MAP estimate x (*shape), in [0, 1], of the example from the input of a layer.

    network: forward passes of the network. target: input of the layer, (F,). cotangent: derivative of the loss by `target`, (F,).
    spread: linear map from standard normal z (*shape) to deviations of smooth images from 0.5, the prior. rng: draws the first z.
    convolution: observed gradient of the weight of the convolution before the layer, which a second stage fits as well; None for
                 no second stage.
    steps: iterations of both stages; None for STAGE_STEPS.
    """
    first, last = steps or STAGE_STEPS
    z = (START_DEVIATION * torch.randn(network.data.shape, generator=rng)).to(target.device)
    stages = [(first, False)] + ([(last, True)] if convolution is not None else [])
    weights = {} if convolution is None else {layer.convolution: network.state[layer.convolution].clone().requires_grad_()}
    for iterations, second in stages:
        z = z.detach().requires_grad_()
        optimiser = torch.optim.Adam([z], lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, iterations)
        for _ in range(iterations):
            x = 0.5 + spread(z)
            h = network.record_inputs(x, weights if second else {})[layer.name]
            loss = (
                INPUT_WEIGHT * _compute_relative_error(h, target)
                + PRIOR_WEIGHT * z.square().mean()
                + RANGE_WEIGHT * (x - x.clamp(0, 1)).square().mean()
            )
            if second and convolution is not None:
                (convolution_gradient,) = torch.autograd.grad(h, list(weights.values()), cotangent, create_graph=True)
                loss = loss + CONVOLUTION_WEIGHT * _compute_relative_error(convolution_gradient, convolution)
            (z.grad,) = torch.autograd.grad(loss, [z])
            optimiser.step()
            schedule.step()
    x_found: Tensor = (0.5 + spread(z.detach())).clamp(0, 1)
    return x_found


def _compute_relative_error(simulated: Tensor, observed: Tensor) -> Tensor:
    return (simulated - observed).square().sum() / observed.square().sum()
