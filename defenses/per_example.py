"""Gradient rules that clip the gradient of each example and add noise: DP-SGD and Fed-CDP.

The mean of clipped gradients is computed without a gradient of each example for large linear layers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from defenses.base import Update
from defenses.channel import Channel, compute_no_noise
from defenses.clipping import scale_each_to, scale_to
from defenses.noise import draw_normal
from defenses.rules import Gradient, GradientProblem, GradientRule, LocalStep, TrainingContext, Weights

PER_EXAMPLE_BYTES = 2**28
"""Approximate limit of memory for gradients of single examples that are computed at once."""
LARGE_LINEAR = 2**16
"""Number of entries from which on the weight of a linear layer counts as large."""
MAX_AT_ONCE = 64
"""Largest number of examples that are computed at once if large linear layers are factored."""
Clip = Callable[[Gradient], Update]
"""Scales the tensors of one example's gradient by factors that depend on their Euclidean norms only."""


def dp_sgd(max_norm: float = 1.0, noise: float = 1.1) -> GradientRule:
    """Clip the gradient of each example, add noise to the sum of the gradients, and divide by the batch size.

    Returns this way to compute a gradient, a `GradientRule`.
    max_norm: bound C on the Euclidean norm of one example's whole gradient; positive and finite.
    noise:    standard deviation of the Gaussian noise on every entry of the sum, in units of C; finite and not negative.
    The divisor is the true number of examples in the batch. The loss must be a mean over examples: the rule raises ValueError for
    a model whose batch norm uses statistics of the batch.
    Source: DP-SGD, Abadi et al. 2016, algorithm 1.
    """
    _check_bounds("dp_sgd", max_norm, noise)
    return _make_rule(partial(scale_to, max_norm=max_norm), _FixedNoise(noise * max_norm))


def fed_cdp(
    max_norm: float = 4.0, noise: float | None = None, snr_db: float | None = None, snr_scope: str = "tensor"
) -> GradientRule:
    """Clip each tensor of each example's gradient, average over examples, and add noise.

    Returns this way to compute a gradient, a `GradientRule`.
    Exactly one of `noise` and `snr_db` must be given; otherwise raises ValueError.
    max_norm:  bound C on the Euclidean norm of one tensor (a kernel, a bias) of one example's gradient; positive and finite.
    noise:     standard deviation of the noise on the sum over examples, in units of C; on the mean over examples, the standard
               deviation is noise * C / batch size.
    snr_db:    signal-to-noise ratio in decibels, instead of `noise`: the expected mean square of the noise is 10^(-snr_db / 10)
               times the mean square of the clipped and averaged gradient. The noise then depends on the data and gives no
               differential privacy.
    snr_scope: "tensor": the ratio holds for each tensor; "gradient": for the whole gradient.
    Source: Fed-CDP, Wei et al. 2021, with the bound on each tensor of its released code.
    """
    _check_bounds("fed_cdp", max_norm, noise or 0.0)
    if (noise is None) == (snr_db is None):
        raise ValueError(f"fed_cdp: give either noise or snr_db, got noise = {noise} and snr_db = {snr_db}")
    if snr_db is not None and not math.isfinite(snr_db):
        raise ValueError(f"fed_cdp: snr_db must be finite, got {snr_db}")
    if snr_scope not in ("tensor", "gradient"):
        raise ValueError(f"fed_cdp: snr_scope must be 'tensor' or 'gradient', got {snr_scope!r}")
    added = (
        _FixedNoise(noise * max_norm)
        if noise is not None
        else _RelativeNoise(10 ** (-(snr_db or 0.0) / 10), snr_scope == "tensor")
    )
    return _make_rule(partial(scale_each_to, max_norm=max_norm), added)


class _FixedNoise(NamedTuple):
    """Noise with standard deviation `std` on every coordinate of the sum of the clipped gradients of a batch's examples."""

    std: float

    def compute_stds(self, mean: Gradient, size: int) -> dict[str, Tensor]:
        """Return the standard deviation of the noise on the mean gradient of `size` examples: 0-d tensors by parameter name."""
        return {name: g.new_full((), self.std / size) for name, g in mean.items()}

    def compute_power(self, received: Update, steps: Sequence[LocalStep]) -> Tensor:
        """Return the expected squared norm of the noise in the update `received`: the sum over the client's local steps."""
        of_one = sum((step.share * self.std / step.size) ** 2 for step in steps)
        return compute_no_noise(received) + of_one * sum(u.numel() for u in received.values())


class _RelativeNoise(NamedTuple):
    """Noise whose expected mean square is `ratio` times the mean square of the mean of a batch's clipped gradients.

    by_tensor: whether both mean squares are taken over each tensor separately, or else over all tensors together.
    """

    ratio: float
    by_tensor: bool

    def compute_stds(self, mean: Gradient, size: int) -> dict[str, Tensor]:
        every = _compute_mean_square(mean)
        return {
            name: (self.ratio * (_compute_mean_square({name: g}) if self.by_tensor else every)).sqrt() for name, g in mean.items()
        }

    def compute_power(self, received: Update, steps: Sequence[LocalStep]) -> Tensor:
        """Estimate the expected squared norm of the noise in the received update, assuming equal gradients in all local steps."""
        ratio = self.ratio * sum(step.share**2 for step in steps) / sum(step.share for step in steps) ** 2
        return compute_no_noise(received) + ratio / (1 + ratio) * sum(u.square().sum() for u in received.values())


def _make_rule(clip: Callable[[Gradient], Update], noise: _FixedNoise | _RelativeNoise) -> GradientRule:
    def compute_gradient(
        problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor, rng: Generator
    ) -> tuple[Gradient, Tensor]:
        _check_separable(problem.model)
        mean, loss = compute_clipped_mean(clip, problem, {name: w.detach() for name, w in weights.items()}, x, y)
        stds = noise.compute_stds(mean, len(x))
        drawn = {name: stds[name] * draw_normal(mean[name], rng) for name in sorted(mean)}
        return {name: g + drawn[name] for name, g in mean.items()}, loss

    def expect_gradient(problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor) -> Gradient:
        _check_separable(problem.model)
        return compute_clipped_mean(clip, problem, weights, x, y)[0]

    def make_channel(facts: TrainingContext) -> Channel:
        return Channel(lambda update, known: update, noise=lambda received: noise.compute_power(received, facts.steps))

    return GradientRule(compute_gradient, expect_gradient, make_channel, separate=True)


def _check_separable(model: nn.Module) -> None:
    """Raise ValueError if a batch norm of the model uses statistics of the batch, since single examples then have no gradient."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            remedy = (
                "use a model without batch norm, or with track_running_stats=True in mode 'eval'"
                if module.running_mean is None
                else "set training.mode to 'eval', which uses the running statistics, or use a model without batch norm"
            )
            raise ValueError(
                "gradients of single examples do not exist if batch norm uses batch statistics, as "
                f"{name or 'the model'} does: {remedy}"
            )


def _compute_mean_square(gradient: Gradient) -> Tensor:
    total = torch.stack([g.square().sum() for g in gradient.values()]).sum()
    return total / max(1, sum(g.numel() for g in gradient.values()))


def _check_bounds(name: str, max_norm: float, noise: float) -> None:
    if not 0 < max_norm < math.inf:
        raise ValueError(f"{name}: max_norm must be positive and finite, got {max_norm}")
    if not 0 <= noise < math.inf:
        raise ValueError(f"{name}: noise must be finite and not negative, got {noise}")


class _NotFactored(Exception):
    """Error for a linear layer that is not called exactly once with one vector for each example."""


def compute_clipped_mean(clip: Clip, problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor) -> tuple[Gradient, Tensor]:
    """Return the mean over examples of their clipped gradients, by parameter name, and the mean loss.

    The gradient of one example by the weight of a linear layer is the outer product of the derivative by the layer's output and
    of its input, and its norm is the product of their norms. For large layers only these vectors are computed for each example
    (Goodfellow 2015, "Efficient per-example gradient computations"), if the network calls the layer once with one vector.
    """
    large = _find_large_linears(problem.model, weights)
    if large:
        try:
            return _compute_factored(clip, problem, weights, x, y, large)
        except _NotFactored:
            pass
    return _compute_factored(clip, problem, weights, x, y, {})


def _find_large_linears(model: nn.Module, weights: Weights) -> dict[str, nn.Linear]:
    """Return the large linear layers of a network whose weights no other module uses, by the names of their weights."""
    found = {
        f"{name}.weight" if name else "weight": module for name, module in model.named_modules() if type(module) is nn.Linear
    }
    used = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    return {
        name: module
        for name, module in found.items()
        if name in weights and module.weight.numel() >= LARGE_LINEAR and used.count(id(module.weight)) == 1
    }


def _compute_factored(
    clip: Clip, problem: GradientProblem, weights: Weights, x: Tensor, y: Tensor, large: Mapping[str, nn.Linear]
) -> tuple[Gradient, Tensor]:
    """Return the result of `compute_clipped_mean`. large: layers whose gradients are factored, by the names of their weights.

    Raises _NotFactored if that is not possible.
    """
    small = {name: w for name, w in weights.items() if name not in large}
    zeros = {name: weights[name].new_zeros(1, len(weights[name])) for name in large}

    def compute_loss(own: Gradient, shifts: Gradient, x: Tensor, y: Tensor) -> tuple[Tensor, Gradient]:
        with _shift_outputs(large, shifts) as inputs:
            loss = problem.compute_loss({name: own.get(name, w) for name, w in weights.items()}, x, y)
        if len(inputs) < len(large):
            raise _NotFactored
        return loss, inputs

    def clip_one(x: Tensor, y: Tensor) -> tuple[Update, Gradient, Tensor]:
        """Return the clipped gradient of one example, in which the weight of a large layer has its derivative by the output.

        That derivative is scaled so that its norm is that of the gradient by the weight. The second dict has the inputs of these
        layers with norm 1.
        """
        evaluate = grad_and_value(compute_loss, argnums=(0, 1), has_aux=True)
        (gradient, slopes), (loss, inputs) = evaluate(small, zeros, x[None], y[None])
        norms = {name: (a.square().sum() + torch.finfo(a.dtype).tiny).sqrt() for name, a in inputs.items()}
        scaled = {name: slopes[name] * norms[name] for name in large}
        return clip({**gradient, **scaled}), {name: inputs[name] / norms[name] for name in large}, loss

    several = max(1, PER_EXAMPLE_BYTES // max(1, sum(w.numel() * w.element_size() for w in small.values())))
    several = min(several, MAX_AT_ONCE) if large else several
    total: Gradient = {}
    losses = []
    for part in zip(torch.split(x, several), torch.split(y, several), strict=True):
        clipped, inputs, loss = vmap(clip_one, randomness="different")(*part)
        for name in weights:
            of_part = clipped[name][:, 0].T @ inputs[name][:, 0] if name in large else clipped[name].sum(dim=0)
            total[name] = total[name] + of_part if name in total else of_part
        losses.append(loss)
    return {name: g / len(x) for name, g in total.items()}, torch.cat(losses).mean()


@contextmanager
def _shift_outputs(layers: Mapping[str, nn.Linear], shifts: Gradient) -> Iterator[Gradient]:
    """Add shifts (1, outputs) to the outputs of layers within a `with` statement, which yields a dict of their inputs (1, F).

    Raises _NotFactored if a layer is called twice, or with inputs of another shape.
    """
    inputs: Gradient = {}

    def build_hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def shift(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            if name in inputs or output.shape != shifts[name].shape:
                raise _NotFactored
            inputs[name] = args[0]
            return output + shifts[name]

        return shift

    handles = [layer.register_forward_hook(build_hook(name)) for name, layer in layers.items()]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
