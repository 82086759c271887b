"""Tests of the random inputs that attackers use."""

import torch
from torch import nn

from attacker.attacks.labels.probes import compute_head_inputs, draw_inputs
from fedsim.recording import DataSpec

PICTURES = DataSpec(shape=(3, 32, 32), num_classes=10)


def draw(count: int, seed: int, data: DataSpec = PICTURES) -> torch.Tensor:
    return draw_inputs(data, count, torch.Generator().manual_seed(seed))


def test_inputs_are_in_range_and_depend_on_the_seed_only() -> None:
    for data in (PICTURES, DataSpec(shape=(1, 8, 5), num_classes=2), DataSpec(shape=(7,), num_classes=2)):
        x = draw(4, 1, data)
        assert x.shape == (4, *data.shape)
        assert 0 <= x.min() <= x.max() <= 1
        assert torch.equal(x, draw(4, 1, data))
        assert not torch.equal(x, draw(4, 2, data))


def test_neighbouring_pixels_and_channels_of_noise_images_are_alike() -> None:
    x = draw(64, 0) - draw(64, 0).mean(dim=(2, 3), keepdim=True)
    power = x.square().mean()
    assert (x[..., 1:] * x[..., :-1]).mean() > 0.5 * power
    assert (x[:, 0] * x[:, 2]).mean() > 0.7 * power
    white = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0)) - 0.5
    assert (white[..., 1:] * white[..., :-1]).mean().abs() < 0.1 * white.square().mean()


def test_image_of_one_pixel_is_finite() -> None:
    assert torch.isfinite(draw(3, 0, DataSpec(shape=(1, 1, 1), num_classes=2))).all()


def test_inputs_of_the_head_give_the_logits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 5))
    other = {name: 2 * p.detach() for name, p in model.named_parameters()}
    x = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        features, logits = compute_head_inputs(model, DataSpec(shape=(3, 8, 8), num_classes=5), other, x)
    assert features.shape == (4, 72)
    torch.testing.assert_close(features @ other["3.weight"].T + other["3.bias"], logits)
    assert not any(module._forward_pre_hooks for module in model.modules())
