"""Tests of single examples read off a patch embedding and trained positions, as in vision transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedleak
from attacker.reconstruction import Reconstruction

CLASSES = 5


class Transformer(nn.Module):
    """A small vision transformer for images (3, 12, 8) with a class token and trained positions."""

    def __init__(self, *, width: int = 24, patches: int = 6, trained: bool = True) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        positions = 0.1 * torch.randn(1, 1 + patches, width)
        if trained:
            self.positions = nn.Parameter(positions)
        else:
            self.register_buffer("positions", positions)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def cut(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.first.expand(len(x), -1, -1), self.cut(x)], dim=1) + self.positions
        logits: Tensor = self.head(self.encode(tokens)[:, 0])
        return logits


class WithLinearLayer(Transformer):
    """The same network, which scales its inputs, and embeds patches by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, 24)

    def cut(self, x: Tensor) -> Tensor:
        patches = (2 * x - 1).unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(len(x), 6, 48)
        return self.embed(patches)


def attack(model: nn.Module, x: Tensor, *, claimed: int = 1, noise: float = 0.0) -> Reconstruction:
    loss = nn.functional.cross_entropy(model((x - 0.4) / 0.3), torch.arange(len(x)))
    gradient = [g + noise * g.std() * torch.randn_like(g) for g in torch.autograd.grad(loss, list(model.parameters()))]
    shape = tuple(x.shape[1:])
    seen = fedleak.observe(model, "cross_entropy", gradient, shape=shape, num_examples=claimed, mean=(0.4,), std=(0.3,))
    return fedleak.attack(seen, "exact", fallback="none").reconstructions[0]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("network", [Transformer, WithLinearLayer])
def test_patches_of_one_image_are_exact(network: type[Transformer]) -> None:
    x = torch.rand(1, 3, 12, 8)
    found = attack(network(), x)
    assert found.route == "linear"
    assert float((found.x - x).abs().max()) < 1e-3
    assert found.y.tolist() == [0]
    assert float(found.confidence) > 0.9


def test_patches_that_their_gradient_leaves_open_are_fitted_to_the_other_layers() -> None:
    """Behind layer norm, the gradients of embeddings of 24 values span 23 dimensions: a combination of 24 patches is open."""
    x = make_smooth_image(32, 12)
    found = attack(Transformer(patches=24), x)
    assert found.route == "linear"
    assert float((found.x - x).square().mean()) < 3e-4
    assert float(found.confidence) > 0.9


def test_too_many_open_patches_are_refused_and_two_images_are_not_certain() -> None:
    with pytest.raises(ValueError, match="linearly dependent"):
        attack(Transformer(patches=27), make_smooth_image(36, 12))  # 4 of 27
    x = torch.cat([make_smooth_image(32, 12), make_smooth_image(32, 12)])
    assert not float(attack(Transformer(patches=24), x).confidence) >= 0.5


def make_smooth_image(height: int, width: int) -> Tensor:
    small = torch.rand(1, 3, 4, 4)
    return nn.functional.interpolate(small, (height, width), mode="bilinear")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"trained": False}, "cannot invert this network"), ({"width": 4}, "linearly dependent")],
    ids=["fixed positions", "few outputs"],
)
def test_the_reason_is_given_where_patches_do_not_follow(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        attack(Transformer(**settings), torch.rand(1, 3, 12, 8))


def test_two_images_or_noise_are_not_certain() -> None:
    x = torch.rand(2, 3, 12, 8)
    for found in (attack(Transformer(), x), attack(Transformer(), x[:1], noise=0.5)):
        assert float((found.x - x[:1]).square().mean()) > 0.009
        assert not float(found.confidence) >= 0.5
