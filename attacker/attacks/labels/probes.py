"""Random inputs, and a model's features and predictions for them, which show an attacker without data what is typical."""

from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.networks.forward import record_inputs
from fedsim import models
from fedsim.recording.observation import DataSpec

BRIGHTNESS_RANGE, CONTRAST_RANGE = (0.25, 0.75), (0.1, 0.3)
"""Ranges of the mean and of the standard deviation of the pixels of a random image."""

CHANNEL_NOISE = 0.3
"""Standard deviation of the noise that is drawn for each channel of a random image, relative to the noise that all channels
share: the channels of photographs are similar."""


def draw_inputs(data: DataSpec, count: int, rng: Generator) -> Tensor:
    """Draw random inputs (count, *shape) in [0, 1].

    Images are noise whose amplitude is proportional to one over the frequency, as in photographs, clamped to [0, 1]. White noise
    is less suitable, since trained networks tend to assign it to a single class. Rows of a table are uniform.
    """
    if not data.is_image:
        return torch.rand(count, *data.shape, generator=rng)
    height, width = data.shape[-2:]
    noise = torch.randn(count, *data.shape, generator=rng)
    noise = noise.mean(dim=1, keepdim=True) * data.shape[0] ** 0.5 + CHANNEL_NOISE * noise
    frequency = (torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width).square()).sqrt()
    frequency[0, 0] = 1 / max(height, width)
    noise = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency, s=(height, width))
    noise = noise / noise.flatten(1).std(dim=1, correction=0).clamp(min=1e-6)[:, None, None, None]
    ranges = BRIGHTNESS_RANGE, CONTRAST_RANGE
    mean, deviation = (low + (high - low) * torch.rand(count, 1, 1, 1, generator=rng) for low, high in ranges)
    pixels: Tensor = mean + deviation * noise
    return pixels.clamp(0, 1)


def compute_head_inputs(
    model: nn.Module, data: DataSpec, state: Mapping[str, Tensor], x: Tensor, *, layer: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the features (N, F), which are the inputs of the last linear layer, and the logits (N, K) for inputs x (N, *shape).

    state: weights and buffers by name. x: normalised, as the network takes it. layer: name of another module whose inputs are
    returned as features; None for the last linear layer (`models.find_head`).
    """
    head = models.find_head(model, data)[0].rpartition(".")[0]
    return record_inputs(model, state, x, layer=head if layer is None else layer)
