"""Local training and evaluation of a client."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from defenses.networks import start_drawing
from defenses.rules import GradientProblem, GradientRule, Weights, plain
from fedsim.models import find_loss, list_buffers, predict_classes
from fedsim.recording.observation import DataSpec
from fedsim.recording.training import Training

Batch = tuple[Tensor, Tensor]

NO_BUFFERS: Weights = MappingProxyType({})
PLAIN_RULE = plain()
UNUSED_GENERATOR = Generator()


@dataclass(frozen=True)
class TrainingResult:
    """Result of local training.

    update:  weights after training minus weights before, by name.
    loss:    mean over all uses of examples, each evaluated with the weights before the step that uses it.
    buffers: batch-norm statistics after training, by name; empty if the model has none.
    """

    update: dict[str, Tensor]
    loss: float
    buffers: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    weights: Weights,
    batches: Sequence[Batch],
    training: Training,
    data: DataSpec,
    *,
    buffers: Weights = NO_BUFFERS,
    rule: GradientRule = PLAIN_RULE,
    rng: Generator | None = None,
) -> TrainingResult:
    """Take one optimiser step on each batch (x, y), starting from `weights`, and return the update, the loss and the buffers.

    No tensor in the arguments is changed, but `model` is put in training mode if `training.mode` is "train", else in evaluation
    mode.

    The update of SGD is the sum of its steps. A difference of two nearby float32 weights would lose most of the digits of a small
    update.

    batches: pairs of x (N, *shape), values in [0, 1] before the normalisation of `data`, and labels y.
    buffers: initial batch-norm statistics; empty for the model's own. In mode "train" (`training.mode`), batch norm uses batch
             statistics, and updates the running ones as torch.nn.BatchNorm2d does, unless `training.buffers` is "none". In any
             other mode it uses the running ones, which stay unchanged.
    rule:    computes each gradient and may draw random numbers from `rng`. Every rule but the default one needs `rng`. Random
             blocks of the network (see `defenses.networks`) are active in both modes and draw from PyTorch's global generator.

    Raises ValueError if `buffers` are given but incomplete, or if a rule other than the default is given without `rng`.
    """
    if rng is None and rule is not PLAIN_RULE:
        raise ValueError("the defense of the gradient may draw random numbers; give rng, a torch.Generator")
    model.train(training.mode == "train")
    start_drawing(model)
    loss_function = find_loss(training.loss)
    optimiser: _Optimiser = (_SGD if training.optimiser == "sgd" else _Adam)(weights, training)
    carried = _copy_tensors(_find_buffers(model, buffers))
    losses, examples = 0.0, 0
    for x, y in batches:
        current = {name: w.requires_grad_() for name, w in zip(weights, optimiser.read_weights(), strict=True)}
        problem = GradientProblem(model, _make_forward(model, carried, data), loss_function)
        gradient, loss = rule.gradient(problem, current, x, y, rng or UNUSED_GENERATOR)
        optimiser.step(tuple(gradient.values()))
        losses, examples = losses + loss.item() * len(y), examples + len(y)
        if training.buffers == "none":
            carried = _copy_tensors(_find_buffers(model, buffers))
    return TrainingResult(dict(zip(weights, optimiser.update, strict=True)), losses / examples, carried)


def _make_forward(model: nn.Module, buffers: Weights, data: DataSpec) -> Callable[[Weights, Tensor], Tensor]:
    return lambda weights, x: functional_call(model, {**buffers, **weights}, (data.normalise(x),))


class _Optimiser(Protocol):
    """An optimiser of local training.

    update: current minus initial weights, one tensor per weight; empty before the first step.
    """

    update: tuple[Tensor, ...]

    def read_weights(self) -> tuple[Tensor, ...]:
        """Return the current weights, at which the next gradient is computed, detached from autograd.

        Do not change them: they may share memory with the weights that training started from.
        """
        ...

    def step(self, gradient: tuple[Tensor, ...]) -> None: ...


def _clip_gradient(gradient: tuple[Tensor, ...], norm: float | None) -> tuple[Tensor, ...]:
    """Return the gradient scaled as by torch.nn.utils.clip_grad_norm_; unchanged if `norm` is None.

    norm: largest L2 norm over all tensors together.
    """
    if norm is None:
        return gradient
    whole = torch.nn.utils.get_total_norm(gradient)
    return torch._foreach_mul(gradient, (norm / (whole + 1e-6)).clamp(max=1))


class _SGD:
    """SGD with momentum and weight decay as in torch.optim.SGD, which accumulates the update instead of changing weights."""

    def __init__(self, weights: Weights, training: Training) -> None:
        self.start, self.training, self.steps = tuple(w.detach() for w in weights.values()), training, 0
        self.update: tuple[Tensor, ...] = ()
        self.velocity: tuple[Tensor, ...] = ()

    def read_weights(self) -> tuple[Tensor, ...]:
        """Return the current weights, detached from autograd; before the first step they share memory with `start`."""
        return torch._foreach_add(self.start, self.update) if self.update else tuple(w.detach() for w in self.start)

    def step(self, gradient: tuple[Tensor, ...]) -> None:
        rate, momentum, decay = self.training.compute_rate(self.steps), self.training.momentum, self.training.weight_decay
        self.steps += 1
        gradient = _clip_gradient(gradient, self.training.clip_norm)
        if decay:
            gradient = torch._foreach_add(gradient, self.read_weights(), alpha=decay)
        if momentum and self.velocity:
            torch._foreach_mul_(self.velocity, momentum)
            torch._foreach_add_(self.velocity, gradient)
        elif momentum:
            self.velocity = tuple(g.clone() for g in gradient)
        step = self.velocity or gradient
        if self.training.nesterov:
            step = torch._foreach_add(gradient, self.velocity, alpha=momentum)
        if self.update:
            torch._foreach_add_(self.update, step, alpha=-rate)
        else:
            self.update = torch._foreach_mul(step, -rate)


class _Adam:
    """Adam or AdamW of torch.optim, applied to copies of the weights."""

    def __init__(self, weights: Weights, training: Training) -> None:
        self.start, self.training, self.steps = tuple(w.detach() for w in weights.values()), training, 0
        self.own = [w.clone() for w in self.start]
        made = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
        decay = training.weight_decay
        self.optimiser = made(self.own, lr=training.learning_rate, betas=training.betas, eps=training.eps, weight_decay=decay)
        self.update: tuple[Tensor, ...] = ()

    def read_weights(self) -> tuple[Tensor, ...]:
        return tuple(w.clone() for w in self.own)

    def step(self, gradient: tuple[Tensor, ...]) -> None:
        self.optimiser.param_groups[0]["lr"] = self.training.compute_rate(self.steps)
        self.steps += 1
        for parameter, g in zip(self.own, _clip_gradient(gradient, self.training.clip_norm), strict=True):
            parameter.grad = g.detach()
        self.optimiser.step()
        self.update = torch._foreach_sub(self.own, self.start)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    weights: Weights,
    x: Tensor,
    y: Tensor,
    data: DataSpec,
    training: Training,
    *,
    buffers: Weights = NO_BUFFERS,
    chunk: int = 512,
) -> dict[str, float]:
    """Return {"loss": mean loss, "accuracy": share of correct predictions} of `weights` on the held-out examples (x, y).

    The model is in evaluation mode, but batch norm uses the statistics of the held-out examples themselves if clients train in
    mode "train" and do not share statistics (`training.buffers`).

    buffers: global batch-norm statistics, used unless batch norm uses the statistics of the examples; empty for the model's own.
    chunk:   largest number of examples that are evaluated at once, in parts of about equal size. If batch norm uses the
             statistics of the examples, they are computed for each part, so that the result depends on `chunk`.
    """
    model.eval()
    if training.mode == "train" and training.buffers != "shared":
        for module in model.modules():
            module.train(isinstance(module, _BatchNorm))
    state = {**_copy_tensors(_find_buffers(model, buffers)), **weights}
    parts = torch.tensor_split(data.normalise(x), max(1, ceil(len(x) / chunk)))
    logits = torch.cat([functional_call(model, state, (part,)) for part in parts])
    model.eval()
    accuracy = (predict_classes(logits) == y).float().mean()
    return {"loss": find_loss(training.loss)(logits, y).item(), "accuracy": accuracy.item()}


def _find_buffers(model: nn.Module, buffers: Weights) -> dict[str, Tensor]:
    """Return the batch-norm statistics for `model` by name: `buffers`, or the model's own if `buffers` is empty.

    Raises ValueError if `buffers` is not empty but lacks some.
    """
    names = list_buffers(model)
    if missing := [name for name in names if buffers and name not in buffers]:
        raise ValueError(f"buffers lack {', '.join(missing)}; give all buffers of the model, or none to use its own")
    initial = dict(model.named_buffers())
    return {name: buffers[name] if buffers else initial[name] for name in names}


def _copy_tensors(tensors: Weights) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}
