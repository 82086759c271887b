"""Statistics of batch norm layers: of a client's batches, read from the buffers that the client returned, and of candidates.

In mode "train", batch norm moves its running statistics r toward the mean and the variance b of each batch. After S steps,
r_S = (1 - m)^S r_0 + sum_i m (1 - m)^(S - 1 - i) b_i with the momentum m. A server that gets r_S back can compute a weighted mean
of the statistics of the client's batches; after one step, the statistics of the single batch (Yin et al. 2021, "See through
gradients", eq. 8; Huang et al. 2021, "Evaluating gradient inversion attacks and defenses", section 3).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from attacker.attacks.networks.forward import run_forward_pass
from attacker.attacks.networks.opaque import call_opaquely
from attacker.attacks.simulation.client import find_schedule
from attacker.attacks.simulation.gradients import explain_vmap_failure
from defenses.rules import Weights
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import DataSpec, Observation

Statistics = dict[str, dict[str, Tensor]]
"""Dict from layer to `mean` and `deviation` (the square root of the unbiased variance) of each channel of its input, (C,)."""
MIN_VARIANCE = 1e-5
"""Added to the variance in units of which statistics are compared; the default of PyTorch's batch norm."""


def _list_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return a dict from name to layer, for the batch norm layers of a network whose momentum is neither None nor 0."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
    return {name: layer for name, layer in layers.items() if layer.momentum}


def read_statistics(observation: Observation, model: nn.Module) -> Statistics:
    """Return a client's mean and deviation of the inputs of each batch norm layer, averaged with weights over its local steps.

    They are computed from the buffers that the client got and returned; layers whose buffers were not sent or not returned are
    left out. Steps are weighted as in the running statistics of batch norm: a later step has a larger weight than an earlier one.
    Variances are averaged, not deviations. Empty if the client returned no buffers or did not train in mode "train", or if the
    observation is a secure sum of several clients.
    """
    if observation.training.mode != "train" or observation.client == SUM_CLIENT:
        return {}
    before, after, steps = observation.buffers, observation.buffers_after, find_schedule(observation)[1]
    statistics = {}
    for name, layer in _list_norms(model).items():
        names = [f"{name}.running_mean", f"{name}.running_var"]
        if not all(name in before and name in after for name in names):
            continue
        kept = (1 - (layer.momentum or 0.0)) ** steps
        mean, variance = ((after[name] - kept * before[name]) / (1 - kept) for name in names)
        statistics[name] = {"mean": mean, "deviation": variance.clamp(min=0).sqrt()}
    return statistics


def compute_statistics(
    model: nn.Module, data: DataSpec, loss: str, weights: Weights, buffers: Weights, x: Tensor, sizes: Sequence[int]
) -> Statistics:
    """Return what `read_statistics` would return if the client's batches were the examples x, all at the weights it was sent.

    x: examples (N, *shape) in [0, 1] of all steps in order. sizes: number of examples of each step, with the sum N. Weights that
    change from step to step are not simulated. The function can also be called under torch.func's transforms for networks that do
    not support these transforms.
    """
    layers, names = _list_norms(model), (*buffers, *weights)

    def measure(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        state = dict(zip(names, tensors, strict=True))
        batches = [_measure_batch(model, layers, state, data.normalise(batch)) for batch in torch.split(x, list(sizes))]
        return tuple(moment for name, layer in layers.items() for moment in _average(layer, [b[name] for b in batches]))

    tensors = (*buffers.values(), *weights.values())
    opaque = bool(explain_vmap_failure(model, data, loss))
    moments = iter(call_opaquely(lambda x, *t: measure(x.contiguous(), *t), x, *tensors) if opaque else measure(x, *tensors))
    return {name: {"mean": next(moments), "deviation": next(moments).clamp(min=MIN_VARIANCE**2).sqrt()} for name in layers}


def measure_mismatch(simulated: Statistics, targets: Statistics) -> Tensor:
    """Return how much the statistics `simulated` differ from those that a client returned, `targets`, a 0-d tensor.

    For each channel, the squared differences of mean and of deviation are added, and divided by the square of the client's
    deviation plus `MIN_VARIANCE`. The result is the mean over the channels of a layer, and then over the layers.
    """
    layers = []
    for name, aim in targets.items():
        unit = aim["deviation"].square() + MIN_VARIANCE
        differences = [(simulated[name][moment] - aim[moment]).square() / unit for moment in ("mean", "deviation")]
        layers.append(sum(difference.mean() for difference in differences))
    return torch.stack([torch.as_tensor(layer) for layer in layers]).mean()


def _measure_batch(
    model: nn.Module, layers: Mapping[str, nn.Module], state: Weights, x: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return a dict from the name of each layer to the mean and the unbiased variance of its input, (C,) each."""
    moments: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, value: Tensor) -> None:
        axes = [axis for axis in range(value.ndim) if axis != 1]
        moments[name] = value.mean(axes), value.var(axes)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(lambda _, inputs, name=name: keep(name, inputs[0]))
            hooks.callback(handle.remove)
        run_forward_pass(model, state, x)
    return moments


def _average(layer: nn.modules.batchnorm._BatchNorm, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the averages of means and variances over batches, (C,) each, weighted as in the running statistics."""
    shares = [(1 - (layer.momentum or 0.0)) ** (len(batches) - 1 - i) for i in range(len(batches))]
    mean, variance = (sum(share * batch[k] for share, batch in zip(shares, batches, strict=True)) for k in (0, 1))
    total = sum(shares)
    return torch.as_tensor(mean) / total, torch.as_tensor(variance) / total
