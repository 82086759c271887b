"""Tests of LeNet variants against a second implementation, and of their initial weights."""

import pytest
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, conv2d, leaky_relu, max_pool2d

from fedsim.models import build
from fedsim.recording import DataSpec, ModelSpec


def describe_images(size: int = 32, channels: int = 3, classes: int = 106) -> DataSpec:
    return DataSpec(shape=(channels, size, size), num_classes=classes)


def test_a_seed_gives_the_same_initial_weights_as_in_earlier_versions() -> None:
    """Recordings store the seed of a model, so that its initial weights must not change between versions."""
    model = build(ModelSpec(name="lenet_dlg"), describe_images(size=8, channels=1, classes=3), seed=4)
    torch.manual_seed(4)
    layers = [nn.Conv2d(1, 12, 5), nn.Conv2d(12, 12, 5), nn.Conv2d(12, 12, 5), nn.Linear(48, 3)]
    with torch.no_grad():
        for parameter in (p for layer in layers for p in layer.parameters()):
            parameter.uniform_(-0.5, 0.5)
    for (_, mine), theirs in zip(model.named_parameters(), (p for layer in layers for p in layer.parameters()), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("size", [1, 7, 28, 33, 64, 128])
@pytest.mark.parametrize("name", ["lenet_cpl", "lenet_dlg"])
def test_images_of_any_size_are_accepted(name: str, size: int) -> None:
    data = describe_images(size=size, classes=4)
    assert build(ModelSpec(name=name, arguments={"channels": 3}), data)(torch.rand(2, *data.shape)).shape == (2, 4)


def test_activations_and_pooling_are_in_the_right_order() -> None:
    """The output equals a forward pass with functional operations."""
    data = describe_images(size=9, channels=1, classes=3)
    for pooling, pool in (("max", max_pool2d), ("mean", avg_pool2d)):
        arguments = {"activation": "leaky_relu", "pooling": pooling, "channels": 2}
        model = build(ModelSpec(name="lenet_dlg", arguments=arguments), data)
        x = h = torch.randn(4, *data.shape)
        *convolutions, weight, bias = [p.detach() for p in model.parameters()]
        for i in range(3):
            h = leaky_relu(conv2d(h, convolutions[2 * i], convolutions[2 * i + 1], padding=2), 0.5)
            h = pool(h, 2) if i < 2 else h
        torch.testing.assert_close(model(x), h.flatten(1) @ weight.T + bias)


@pytest.mark.parametrize(("activation", "module"), [("tanh", nn.Tanh), ("relu", nn.ReLU), ("sigmoid", nn.Sigmoid)])
def test_activations_by_name(activation: str, module: type[nn.Module]) -> None:
    model = build(ModelSpec(name="lenet_cpl", arguments={"activation": activation}), describe_images())
    assert sum(isinstance(m, module) for m in model.modules()) == 4


def test_networks_without_sigmoids_have_pytorchs_initial_weights_by_default() -> None:
    def largest(**arguments: str) -> float:
        model = build(ModelSpec(name="lenet_cpl", arguments=arguments), describe_images())
        return float(next(model.parameters()).detach().abs().max())

    bound = (3 * 25) ** -0.5
    assert largest() > 0.4
    assert largest(activation="relu") <= bound
    assert largest(initial="default") <= bound
    assert largest(activation="relu", initial="uniform") > 0.4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"activation": "swish"}, "unknown activation 'swish'. Known: sigmoid, tanh, relu, leaky_relu"),
        ({"pooling": "median"}, "unknown pooling 'median'. Known: none, max, mean"),
        ({"initial": "zero"}, "unknown initial 'zero'. Known: published, uniform, default"),
        ({"channels": 0}, "a LeNet: channels must be a whole number above 0, got 0"),
    ],
)
def test_unknown_options_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(ModelSpec(name="lenet_cpl", arguments=arguments), describe_images())


def test_an_image_too_small_to_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4x4 pixels"):
        build(ModelSpec(name="lenet_cpl", arguments={"pooling": "max"}), describe_images(size=3))
