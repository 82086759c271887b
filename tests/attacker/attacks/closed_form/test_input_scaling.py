"""Tests of closed forms on networks whose code scales its inputs before the first layer."""

from typing import Any

import pytest
import torch
from generators import seeded
from observations import observe_steps
from torch import Tensor, nn

from attacker.attacks import Case, exact
from attacker.attacks.closed_form.observations import observe as stack
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation

MEAN, STD = (0.49, 0.48, 0.44), (0.24, 0.25, 0.26)
SHAPE = (3, 6, 6)


class Dense(nn.Module):
    """A network of two linear layers, whose inputs `scale` changes first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(108, 200), nn.ReLU(), nn.Linear(200, 5))

    def scale(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(self.scale(x))
        return logits


class Normalised(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN))
        self.std = torch.tensor(STD)  # no buffer

    def scale(self, x: Tensor) -> Tensor:
        return (x - self.mean.view(1, 3, 1, 1)) / self.std[:, None, None]


class Divided(Dense):
    def scale(self, x: Tensor) -> Tensor:
        return x / 255


class Centred(Dense):
    def scale(self, x: Tensor) -> Tensor:
        return 2 * x - 1


class Negated(Dense):
    def scale(self, x: Tensor) -> Tensor:
        return 1 - x.mul(0.5)


class Learned(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def scale(self, x: Tensor) -> Tensor:
        return self.factor * x


class Squared(Dense):
    def scale(self, x: Tensor) -> Tensor:
        return x * x


class Masked(Dense):
    """A network that does not see the first row of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(6, 6)
        self.mask[0] = 0

    def scale(self, x: Tensor) -> Tensor:
        return x * self.mask


class ChannelsLast(Dense):
    """A network of an app with channels last, behind the reordering that its user adds for images with channels first."""

    def scale(self, x: Tensor) -> Tensor:
        return self.prepare(x.permute(0, 2, 3, 1))

    def prepare(self, x: Tensor) -> Tensor:
        return torch.movedim((x - 0.5) / 0.25, 3, 1)


class Reordered(Dense):
    def scale(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3)


class Copied(Normalised):
    """A network that moves inputs and constants to the device and dtype of each other, as code for several devices does."""

    def scale(self, x: Tensor) -> Tensor:
        x = x.to(self.net[1].weight.device).to(torch.float32).type_as(self.net[1].weight).clone()
        x = x.unsqueeze(1).squeeze(1).to(memory_format=torch.channels_last)
        return (x - self.mean.to(x.device).view(1, 3, 1, 1)) / self.std.to(x)[:, None, None]


class Convolved(Normalised):
    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.Sigmoid(), nn.Conv2d(12, 32, 3, padding=1), nn.Sigmoid()
        self.net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(288, 5))


def normalise_by_torchvision(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    from torchvision.transforms import Normalize

    return nn.Sequential(Normalize(MEAN, STD), *Dense().net)


def record(network: str, count: int, **data: Any) -> tuple[Observation, Tensor]:
    name, spec = f"{__name__}:{network}", DataSpec(shape=SHAPE, num_classes=5, **data)
    models.admit(name)
    x = torch.randint(256, (count, *SHAPE), generator=seeded(3)) / 255
    return observe_steps((x, torch.arange(count) % 5), model=ModelSpec(name=name), data=spec), x


def attack(observation: Observation) -> Reconstruction:
    return exact(fallback="none")([Case((observation,))], rng=seeded())[0]


@pytest.mark.parametrize(
    ("network", "data"),
    [
        ("Normalised", {}),
        ("Divided", {"std": (1 / 255,)}),
        ("Centred", {}),
        ("Negated", {}),
        ("Learned", {}),
        ("ChannelsLast", {}),
        ("Copied", {}),
        ("normalise_by_torchvision", {}),
        ("Normalised", {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}),
    ],
)
def test_batches_are_recovered_behind_scaled_inputs(network: str, data: dict[str, Any]) -> None:
    one, x = record(network, 4, **data)
    found = attack(one)
    assert found.route == "linear"
    order = torch.cdist(x.flatten(1), found.x.flatten(1)).argmin(dim=1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert torch.allclose(found.x[order], x, atol=1e-4)
    assert found.y[order].tolist() == [0, 1, 2, 3]
    assert bool((found.confidence > 0.9).all())


def test_single_images_are_recovered_behind_convolutions() -> None:
    """Zeros are padded after the code has scaled the inputs."""
    one, x = record("Convolved", 1)
    found = attack(one)
    assert found.route == "layers"
    assert torch.allclose(found.x, x, atol=1e-3)


NOT_SCALED = "not by a scale and a shift of each value"
OTHER_CODE = {"Squared": NOT_SCALED, "Reordered": NOT_SCALED, "Masked": "sets values of the inputs to constants"}


@pytest.mark.parametrize(("network", "reason"), OTHER_CODE.items())
def test_other_code_before_the_first_layer_is_refused(network: str, reason: str) -> None:
    one, _ = record(network, 4)
    chain = stack([Case((one,))]).chain
    assert isinstance(chain, str)
    assert reason in chain
