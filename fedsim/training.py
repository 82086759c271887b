"""Local training: what a client computes from the weights that it was sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedsim.wire.observation import DataSpec, Training

Weights = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """update: local minus global weights, by name. loss: mean over the examples used, each before its own step."""

    update: dict[str, Tensor]
    loss: float


def train(model: nn.Module, weights: Weights, batches: Sequence[Batch], training: Training, data: DataSpec) -> Trained:
    """Take one SGD step on each batch (x, y), starting from `weights`.

    The update is added up by itself, so that one step gives `-learning_rate * gradient` to the last bit: the difference
    of two nearby float32 weights would lose most of a small update.
    """
    model.train(training.mode == "train")
    update = {name: torch.zeros_like(w) for name, w in weights.items()}
    velocity: dict[str, Tensor] = {}
    losses, examples = 0.0, 0
    for x, y in batches:
        current = {name: (w + update[name]).requires_grad_() for name, w in weights.items()}
        loss = cross_entropy(functional_call(model, current, (data.normalise(x),)), y)
        gradients = torch.autograd.grad(loss, list(current.values()))
        for (name, w), gradient in zip(current.items(), gradients, strict=True):
            step = gradient + training.weight_decay * w.detach() if training.weight_decay else gradient
            if training.momentum:
                step = velocity[name] = training.momentum * velocity[name] + step if name in velocity else step
            update[name] = update[name] - training.learning_rate * step
        losses, examples = losses + loss.item() * len(y), examples + len(y)
    return Trained(update, losses / examples)


@torch.no_grad()
def evaluate(model: nn.Module, weights: Weights, x: Tensor, y: Tensor, data: DataSpec, *, chunk: int = 512) -> dict[str, float]:
    """Mean cross-entropy and accuracy on held-out examples, in evaluation mode."""
    model.eval()
    logits = torch.cat([functional_call(model, dict(weights), (data.normalise(part),)) for part in torch.split(x, chunk)])
    return {"loss": cross_entropy(logits, y).item(), "accuracy": (logits.argmax(1) == y).float().mean().item()}
