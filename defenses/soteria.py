"""Soteria: a gradient rule that zeroes columns of a linear layer's gradient that help reconstruction most (Sun et al. 2021)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn

from defenses.base import Update
from defenses.channel import Channel, ChannelFacts, transparent
from defenses.networks import find_last_linear
from defenses.rules import Gradient, GradientProblem, GradientRule, TrainingContext, Weights

DERIVATIVES_PER_PASS = 64
"""Approximate number of derivatives that are computed in one batched backward pass."""


def soteria(prune: float = 0.8, layer: str = "") -> GradientRule:
    """Zero those columns of a linear layer's gradient that help a reconstruction most, by the criterion of the paper.

    Returns this way to compute a gradient, a `GradientRule`.
    prune: share in [0, 1) of the layer's R input features; the columns of the round(prune * R) features with the smallest scores
           (`compute_scores`) are zeroed. Relative to their magnitude, these features change least when the input changes. By the
           paper's criterion, zeroing their columns makes the reconstructed input differ most from the original.
    layer: name of the layer; "" for the last linear one.
    All other gradients and the network stay unchanged. A step costs about as much as R additional backward passes.
    Attackers leave columns that arrived as zeros out of the comparison with simulated gradients. If zeros of a gradient do not
    arrive as zeros (`TrainingContext.exact` is False), they leave out this layer's whole weight.
    Raises ValueError if `prune` is out of range. The rule raises ValueError if `layer` is not a linear layer of the network, or
    is not called exactly once per forward pass, with a matrix (examples, features).
    Source: Sun et al. 2021, with the magnitude of the feature in the denominator of its score.
    """
    if not 0 <= prune < 1:
        raise ValueError(f"soteria: prune must be in [0, 1), got {prune}")

    def compute_gradient(
        problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor, rng: Generator
    ) -> tuple[Gradient, Tensor]:
        name = _find_linear(problem.model, layer)
        x = x.detach().requires_grad_()
        with _collect_inputs(problem.model.get_submodule(name)) as entered:
            loss = problem.compute_loss(weights, x, y)
        values = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True, retain_graph=True)
        found = dict(zip(weights, values, strict=True))
        key = _name_weight(name)
        found[key] = found[key] * choose_kept(compute_scores(_get_only_input(entered, name), x), prune).to(found[key].dtype)
        return found, loss.detach()

    def make_channel(facts: TrainingContext) -> Channel:
        return _make_channel(_name_weight(_find_linear(facts.model, layer))) if facts.exact else transparent

    def find_omitted(facts: TrainingContext) -> frozenset[str]:
        return frozenset() if facts.exact else frozenset({_name_weight(_find_linear(facts.model, layer))})

    return GradientRule(compute_gradient, channel=make_channel, omitted=find_omitted)


def compute_scores(features: Tensor, x: Tensor) -> Tensor:
    """Return (R,) scores: the sum over the batch of |d r_i / d x| / |r_i| for features r (N, R) of x (N, *shape).

    Norms are over one example, and |r_i| counts as at least the machine epsilon. The features must carry the autograd graph from
    x. With batch norm in training mode, r_i of one example depends on all examples; the sum of r_i over the batch is then
    differentiated.
    """
    count, width = features.shape
    norms, per_pass = [], max(1, DERIVATIVES_PER_PASS // count)
    for rows in torch.split(torch.eye(width, dtype=features.dtype, device=features.device), per_pass):
        ones = rows[:, None, :].expand(-1, count, -1)
        (derivative,) = torch.autograd.grad(features, x, ones, retain_graph=True, is_grads_batched=True)
        norms.append(torch.linalg.vector_norm(derivative.flatten(2), dim=2))
    magnitude = features.detach().abs().T.clamp(min=torch.finfo(features.dtype).eps)
    return (torch.cat(norms) / magnitude).sum(dim=1)


def choose_kept(scores: Tensor, prune: float) -> Tensor:
    """Return (R,) booleans: False for the round(prune * R) smallest scores; of equal scores, for those of lower index first."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    keep[scores.argsort(stable=True)[: round(prune * len(scores))]] = False
    return keep


def _make_channel(weight: str) -> Channel:
    def learn(received: Update) -> ChannelFacts:
        return {"columns": (received[weight] != 0).any(dim=0).to(received[weight].dtype)}

    def expect(update: Update, known: ChannelFacts) -> Update:
        return {name: u * known["columns"] if name == weight else u for name, u in update.items()}

    return Channel(expect, learn)


@contextmanager
def _collect_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which each call of `module` within the `with` block appends its first argument."""
    entered: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0]))
    try:
        yield entered
    finally:
        handle.remove()


def _get_only_input(entered: list[Tensor], name: str) -> Tensor:
    if len(entered) != 1 or entered[0].ndim != 2:
        shapes = [tuple(t.shape) for t in entered]
        raise ValueError(
            f"soteria: layer {name!r} must be called once, with a matrix (examples, features), but its inputs have the shapes "
            f"{shapes}; name another layer"
        )
    return entered[0]


def _find_linear(model: nn.Module, layer: str) -> str:
    name = layer or find_last_linear(model)
    linear = [known for known, module in model.named_modules() if isinstance(module, nn.Linear)]
    if name not in linear:
        raise ValueError(f"soteria: {name!r} is not a linear layer of this model. Known: {', '.join(linear)}")
    return name


def _name_weight(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"
