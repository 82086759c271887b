"""Inputs of the attacker's own, to see what the model makes of anything: no data of anyone's are needed for them."""

from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.networks.forward import forward_pass
from fedsim import models
from fedsim.recording.observation import DataSpec

BRIGHTNESS, CONTRAST = (0.25, 0.75), (0.1, 0.3)
"""Of noise that is made like photographs: ranges of the mean and of the standard deviation of its pixels."""

TINT = 0.3
"""How much of such noise is a channel's own; the rest all channels share, as in photographs."""


def random_inputs(data: DataSpec, count: int, rng: Generator) -> Tensor:
    """(count, *shape) in [0, 1]. Images are noise whose spectrum falls as one over the frequency, as that of photographs does.

    A trained network takes white noise for some one class, and its features are far from those of any example. Rows are uniform.
    """
    if not data.is_image:
        return torch.rand(count, *data.shape, generator=rng)
    height, width = data.shape[-2:]
    noise = torch.randn(count, *data.shape, generator=rng)
    noise = noise.mean(dim=1, keepdim=True) * data.shape[0] ** 0.5 + TINT * noise
    frequency = (torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width).square()).sqrt()
    frequency[0, 0] = 1 / max(height, width)
    noise = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency, s=(height, width))
    noise = noise / noise.flatten(1).std(dim=1, correction=0).clamp(min=1e-6)[:, None, None, None]
    mean, deviation = (low + (high - low) * torch.rand(count, 1, 1, 1, generator=rng) for low, high in (BRIGHTNESS, CONTRAST))
    pixels: Tensor = mean + deviation * noise
    return pixels.clamp(0, 1)


def head_inputs(model: nn.Module, state: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last linear layer is given, (N, F), and the logits, (N, K), of inputs x as the model takes them.

    state: weights and buffers by name.
    """
    seen: list[Tensor] = []
    layer = model.get_submodule(models.head(model)[0].rpartition(".")[0])
    handle = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten(1)))
    try:
        logits = forward_pass(model, state, x)
    finally:
        handle.remove()
    return seen[-1], logits
