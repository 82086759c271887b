"""Tests that networks that are not chains of layers are refused with the right reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

from attacker.attacks.networks.chain import read_chain
from attacker.attacks.networks.traced import NotAChain
from defenses.networks import precode, take_penalty
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

SHAPE = (2, 9, 8)


def build_convolution(**arguments: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, **arguments), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 72, 3))


def around(*layers: nn.Module, width: int = 4 * 72) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(width, 3))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.conv(x) + x)
        return out


def used_twice() -> nn.Module:
    shared = nn.Conv2d(4, 4, 3, padding=1)
    return around(nn.Tanh(), shared, nn.Tanh(), shared)


def build_tied() -> nn.Module:
    model = around(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1))
    model[3].weight = model[1].weight
    return model


def one_bias() -> nn.Module:
    model = around(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1))
    model[3].bias = model[1].bias
    return model


def freeze_in_a_buffer(layer: Any) -> None:
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight, persistent=False)


def build_standardised() -> nn.Module:
    class Standardised(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight - weight.mean(), bias)

    return nn.Sequential(Standardised(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 72, 3))


def build_scaled() -> nn.Module:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.in_features

    return nn.Sequential(nn.Flatten(), Scaled(144, 3))


def build_parametrised() -> nn.Module:
    class Positive(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.abs()

    model = build_convolution()
    parametrize.register_parametrization(model[0], "weight", Positive())
    return model


def with_hook(at: int | None) -> nn.Module:
    model = build_convolution()
    module = model if at is None else model[at]
    module.register_forward_hook(lambda module, given, out: 2 * out)
    return model


def with_forward_of_its_own() -> nn.Module:
    model = build_convolution()
    model[0].forward = lambda x: functional.conv2d(2 * x, model[0].weight, padding=1)
    return model


def pruned() -> nn.Module:
    model = build_convolution()
    prune.random_unstructured(model[0], "weight", amount=0.5)
    return model


def changed(change: Callable[[nn.Module], Any], at: int = 0) -> nn.Module:
    model = build_convolution()
    change(model[at])
    return model


PADDED = [f"has padding_mode '{mode}'" for mode in ("circular", "reflect", "replicate")]
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a residual block": (lambda: around(Residual()), "add joins 2 paths, as residual networks do"),
    "groups": (lambda: build_convolution(groups=2), "0 is a convolution with 2 groups"),
    "circular": (lambda: build_convolution(padding_mode="circular"), PADDED[0]),
    "reflect": (lambda: build_convolution(padding_mode="reflect"), PADDED[1]),
    "replicate": (lambda: build_convolution(padding_mode="replicate"), PADDED[2]),
    "an even kernel": (lambda: nn.Sequential(nn.Conv2d(2, 4, 4, padding="same"), nn.ReLU()), "0 pads more on one side"),
    "max pooling": (lambda: around(nn.MaxPool2d(3, 1, 1)), "1 is MaxPool2d: its output does not show which"),
    "adaptive max": (lambda: around(nn.AdaptiveMaxPool2d((9, 8))), "AdaptiveMaxPool2d: its output does not show which"),
    "batch norm": (lambda: around(nn.BatchNorm2d(4)), "1 is BatchNorm2d: normalisation layers are not supported"),
    "group norm": (lambda: around(nn.GroupNorm(2, 4)), "1 is GroupNorm: normalisation layers are not supported"),
    "local norm": (lambda: around(nn.LocalResponseNorm(2)), "1 is LocalResponseNorm: normalisation layers"),
    "transposed": (lambda: around(nn.ConvTranspose2d(4, 4, 3, padding=1)), "ConvTranspose2d: the only convolution"),
    "another activation": (lambda: around(nn.ELU()), "1 is ELU: it is not a supported layer, activation or linear map"),
    "capped": (lambda: around(nn.ReLU6()), "1 is ReLU6: it is not a supported"),
    "a falling leaky ReLU": (lambda: around(nn.LeakyReLU(-0.1)), r"at least 0, got -0\.1"),
    "an activation of pooled ones": (lambda: around(nn.ReLU(), nn.AvgPool2d(3, 1, 1), nn.Tanh()), "3 follows no layer with w"),
    "an activation first": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)), "0 follows no layer with weights"),
    "no weights": (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten()), "no layer with weights"),
    "nothing": (nn.Identity, "no layer with weights"),
    "softmax in the end": (lambda: nn.Sequential(*around(), nn.Softmax(1)), "3 is Softmax: its outputs are probabilities"),
    "log softmax over examples": (
        lambda: nn.Sequential(*around(), nn.LogSoftmax(0)),
        "LogSoftmax: its outputs are probabilities",
    ),
    "a layer after log softmax": (
        lambda: nn.Sequential(*around(), nn.LogSoftmax(1), nn.Linear(2, 2)),
        "4 follows a log-softmax, and closed forms need it at the end of the network",
    ),
    "sigmoid in the end": (lambda: nn.Sequential(*around(), nn.Sigmoid()), "activation sigmoid to the outputs of its last layer"),
    "pooled logits": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "average pooling follows the network's last layer with weights, 0",
    ),
    "pooled outputs of a matrix": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Unflatten(1, (2, 2, 2)), nn.AvgPool2d(2), nn.Flatten()),
        "average pooling follows the network's last layer with weights, 1",
    ),
    "images as logits": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3)), r"returns shape \(4, 7, 6\) per example"),
    "a matrix over rows": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(144, 2)), r"0 takes inputs of shape"),
    "a module twice": (used_twice, "2 is used twice, and its gradient is a sum"),
    "one weight of two layers": (build_tied, "the weight of 3 is shared with another layer"),
    "one bias of two layers": (one_bias, "the bias of 3 is shared with another layer"),
    "a weight that is a buffer": (lambda: changed(freeze_in_a_buffer), "the weight of 0 is shared .*, or a buffer"),
    "weight norm": (lambda: changed(parametrizations.weight_norm), "the weight of 0 is shared with another layer"),
    "a parametrisation": (build_parametrised, "the weight of 0 is shared with another layer"),
    "pruning": (pruned, "0 has hooks or a replaced forward method"),
    "a hook": (lambda: with_hook(3), "3 has hooks or a replaced forward method"),
    "a hook of the whole": (lambda: with_hook(None), "the model has hooks or a replaced forward method"),
    "a forward of its own": (with_forward_of_its_own, "0 has hooks or a replaced forward method"),
    "standardised weights": (build_standardised, "uses 0.weight directly"),
    "a matrix that does more": (build_scaled, "uses 1.weight directly"),
    "the whole batch flat": (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(144, 2)), "0 changes the number of examples"),
    "a width that does not fit": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(143, 2)),
        r"1 fails on an input of shape \(144,\)",
    ),
    "channels that do not fit": (lambda: around(nn.Conv2d(3, 4, 3)), r"1 fails on an input of shape \(4, 9, 8\)"),
    "pooling of what is flat": (lambda: nn.Sequential(nn.Flatten(), nn.AvgPool2d(2)), r"1 fails on an input of shape \(144,\)"),
    "pooling that does not fit": (lambda: around(nn.AvgPool2d(10)), r"1 fails on an input of shape \(4, 9, 8\)"),
    "not materialised": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "1 has hooks"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of lazy modules, and of kernels that are padded unevenly
@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_network_is_refused_with_its_reason(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(NotAChain, match=reason):
        read_chain(make(), SHAPE)


def test_hook_based_weight_normalisations_are_refused() -> None:
    for norm in (nn.utils.weight_norm, nn.utils.spectral_norm):
        with pytest.warns(FutureWarning) if norm is nn.utils.weight_norm else torch.no_grad():
            model = changed(norm)
        with pytest.raises(NotAChain, match="0 has hooks"):
            read_chain(model, SHAPE)


@fx.wrap
def relu(x: Tensor) -> Tensor:
    """Compute the absolute value, under the name of PyTorch's relu."""
    return x.abs()


class Own(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.fc, self.drop, self.code = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(288, 3), nn.Dropout(), code
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.ones(2, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def whole(change: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.fc(change(m, m.conv(x)).flatten(1))


CODE: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "times a constant": (whole(lambda m, x: x * 2), "its code calls mul: it is not a supported"),
    "plus itself": (whole(lambda m, x: x + x), "its code calls add: it is not a supported"),
    "normalised by a buffer": (lambda m, x: m.fc(m.conv(x - m.mean).flatten(1)), "its code scales the inputs before"),
    "normalised after a layer": (whole(lambda m, x: x - m.mean), "its code uses mean directly"),
    "divided by a parameter": (lambda m, x: m.fc(m.conv(x).flatten(1)) / m.temperature, "uses temperature directly"),
    "a function of its weights": (lambda m, x: functional.conv2d(x, m.conv.weight), "uses conv.weight directly"),
    "a penalty on its weights": (lambda m, x: m.fc(m.conv(x).flatten(1)) * m.fc.weight.sum(), "uses fc.weight directly"),
    "twice": (lambda m, x: m.fc(m.conv(m.conv(x)[:, :2]).flatten(1)), "its code calls getitem: it is not a supported"),
    "a second path": (lambda m, x: m.fc(m.conv(x).flatten(1)) if m.conv(x) is not None else x, "conv starts a second path"),
    "not its end": (lambda m, x: (m.fc(m.conv(x).flatten(1)), x)[1], "it returns something else"),
    "several outputs": (lambda m, x: (m.fc(m.conv(x).flatten(1)), 1), "it returns something else"),
    "a dictionary": (lambda m, x: {"logits": m.fc(m.conv(x).flatten(1))}, "it returns something else"),
    "dropout for ever": (whole(lambda m, x: functional.dropout(x)), "applies dropout in evaluation mode"),
    "dropout by torch": (whole(lambda m, x: torch.dropout(x, 0.5, train=True)), "applies dropout in evaluation mode"),
    "max pooling": (whole(lambda m, x: functional.max_pool2d(x, 3, 1, 1)), "max_pool2d: its output does not show which"),
    "softmax": (lambda m, x: m.fc(m.conv(x).flatten(1)).softmax(dim=1), "its code calls softmax: its outputs are probabilities"),
    "cut off": (whole(lambda m, x: x.detach()), "its code calls detach"),
    "chunks": (whole(lambda m, x: x.chunk(2, dim=1)[0]), "its code calls chunk: it splits a tensor into several"),
    "another relu": (whole(lambda m, x: relu(x)), "its code calls relu: it is not a supported"),
    "a falling leaky ReLU": (whole(lambda m, x: functional.leaky_relu(x, -1)), "at least 0, got -1"),
    "an infinite slope": (whole(lambda m, x: functional.leaky_relu(x, float("inf"))), "at least 0, got inf"),
    "channels as examples": (whole(lambda m, x: x.view(x.size(1), -1)), "view changes the number of examples in a batch"),
    "all as one": (lambda m, x: m.fc(m.conv(x).view(1, -1)), "view changes the number of examples in a batch"),
    "no such dimension": (
        whole(lambda m, x: x.view(x.size(7), -1)),
        r"asks for a size that its inputs of shape \(4, 9, 8\) do not have",
    ),
    "a size that does not fit": (whole(lambda m, x: x.view(-1, 5)), "view fails on an input of shape"),
    "a choice by value": (
        lambda m, x: m.fc(m.conv(x).flatten(1)) if x.sum() > 0 else x,
        r"needs the values of a tensor, .* \(test_chain_refused\.py, line \d+: .*x\.sum\(\) > 0.*\); write this line with",
    ),
    "a loop over examples": (lambda m, x: torch.stack([m.fc(m.conv(one)) for one in x]), "needs the values of a tensor"),
    "an error without words": (lambda m, x: (_ for _ in ()).throw(RuntimeError()), "cannot be traced: RuntimeError:  "),
    "a refused size": (whole(lambda m, x: x if len(x) < 9 else m.missing), "cannot be traced: AttributeError.*has no attribute"),
    "a choice by batch": (whole(lambda m, x: x.relu() if len(x) > 1 else x.tanh()), "batches of different sizes differently"),
    "an unsupported one before": (whole(lambda m, x: x.exp().view(len(x.exp()), -1)), "its code calls exp: it is not a"),
    "values clamped from above": (whole(lambda m, x: x.clamp(0, 1)), "its code calls clamp: it is not a supported"),
    "values clamped at one": (whole(lambda m, x: torch.clamp(x, min=1)), "its code calls clamp: it is not a supported"),
    "another dtype": (whole(lambda m, x: x.double().float()), "its code calls double"),
    "whole numbers": (whole(lambda m, x: x.to(torch.int64)), "its code calls to"),
    "moved axes": (whole(lambda m, x: x.permute(0, 2, 3, 1)), "its code calls permute"),
    "moved examples": (lambda m, x: m.fc(m.conv(x.transpose(0, 1)).flatten(1)), "transpose moves the axis of the examples"),
    "squeezed examples": (whole(lambda m, x: x.squeeze()), "squeeze without an axis"),
    "two activations": (whole(lambda m, x: x.relu().tanh()), "tanh follows no layer with weights"),
}


@pytest.mark.parametrize(("code", "reason"), CODE.values(), ids=CODE.keys())
def test_code_is_refused_with_its_reason(code: Callable[[Any, Tensor], Any], reason: str) -> None:
    with pytest.raises(NotAChain, match=reason):
        read_chain(Own(code), SHAPE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_casts_to_whole_numbers_are_refused_in_a_single_floating_dtype_as_well(dtype: torch.dtype) -> None:
    read_chain(Own(lambda m, x: m.fc(m.conv(x.to(torch.float64)).flatten(1))), SHAPE, one_dtype=True)
    with pytest.raises(NotAChain, match="its code calls to"):
        read_chain(Own(lambda m, x: m.fc(m.conv(x.to(dtype)).flatten(1))), SHAPE, one_dtype=True)


def test_second_input_is_refused_unless_it_has_a_default() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.fc(x + y)
            return out

    class Optional(Two):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            out: Tensor = self.fc(x)
            return out

    with pytest.raises(NotAChain, match="missing 1 required positional argument: 'y'"):
        read_chain(Two(), (6,))
    assert len(read_chain(Optional(), (6,)).layers) == 1


def test_one_dimensional_convolutions_are_refused() -> None:
    with pytest.raises(NotAChain, match=r"0 is Conv1d: the only convolution that closed forms support is torch\.nn\.Conv2d"):
        read_chain(nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(15, 2)), (2, 7))


OWN_NETWORKS = {"resnet20_4": "add joins 2 paths", "resnet9_rog": "joins 2 paths", "lenet_rog": "2 is MaxPool2d"}


@pytest.mark.parametrize(("name", "reason"), OWN_NETWORKS.items())
def test_own_networks_with_joins_or_max_pooling_are_refused(name: str, reason: str) -> None:
    with pytest.raises(NotAChain, match=reason):
        read_chain(models.build_layout(ModelSpec(name=name), DataSpec(shape=(3, 16, 16), num_classes=10)), (3, 16, 16))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("vgg11", r"features\.2 is MaxPool2d"),
        ("vgg11_bn", r"features\.1 is BatchNorm2d"),
        ("resnet18", "add joins 2 paths"),
        ("squeezenet1_1", "cat joins 2 paths"),
    ],
)
def test_networks_of_torchvision_are_refused(architecture: str, reason: str) -> None:
    spec = ModelSpec(name="torchvision", arguments={"architecture": architecture})
    with pytest.raises(NotAChain, match=reason):
        read_chain(models.build_layout(spec, DataSpec(shape=(3, 64, 64), num_classes=10)), (3, 64, 64))


@pytest.mark.parametrize("network", ["precode(bottleneck=4)", "dropout"])
def test_blocks_that_draw_random_numbers_in_training_are_refused(network: str) -> None:
    spec = ModelSpec(name="lenet_cpl", network=network)
    with pytest.raises(NotAChain, match="draws random numbers during training, which the server does not know"):
        read_chain(models.build_layout(spec, DataSpec(shape=(3, 16, 16), num_classes=10)), (3, 16, 16))


def test_reading_keeps_the_penalty_that_a_network_stored() -> None:
    model = precode(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), bottleneck=2)
    model(torch.ones(1, 4))
    with pytest.raises(NotAChain):
        read_chain(model, (4,))
    assert isinstance(take_penalty(model), Tensor)
