"""Tests that a chain of layers computes the same as its network, for many kinds of networks."""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from generators import seed_default
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from attacker.attacks.networks.chain import Chain, read_chain
from attacker.attacks.networks.traced import NotAChain
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

SHAPE = (2, 9, 8)


def evaluate(chain: Chain, model: nn.Module, x: Tensor) -> Tensor:
    """Evaluate the formula of a chain for x (N, *inputs) with PyTorch's functions."""
    weights = dict(model.named_parameters())
    for layer in chain.layers:
        assert x.shape[1:] == layer.inputs
        for one in layer.before:
            x = one(x)
        assert x.shape[1:] == layer.product_inputs
        weight, bias = weights[layer.weight], None if layer.bias is None else weights[layer.bias]
        assert weight.shape == layer.shape
        if layer.kernel is None:
            x = functional.linear(x, weight, bias)
        else:
            x = functional.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)
        assert x.shape[1:] == layer.product_outputs
        for one in layer.after:
            x = one(x)
        assert x.shape[1:] == layer.outputs
        x = layer.activation.forward(x)
    return x


def assert_agreement(model: nn.Module, shape: tuple[int, ...] = SHAPE) -> Chain:
    """Return the chain of `model`, and assert that both compute the same for batches of one and three."""
    chain = read_chain(model, shape)
    model = model.double().eval()
    for count in (1, 3):
        x = torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
        wanted = model(x)
        assert torch.allclose(evaluate(chain, model, x), wanted, rtol=1e-12, atol=1e-12)
        assert wanted.abs().max() > 0
    for before, after in pairwise(chain.layers):
        assert before.outputs == after.inputs
    return chain


@pytest.fixture(autouse=True)
def _weights_are_drawn_from_a_seed() -> Any:
    with seed_default(5):
        yield


def head(features: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(features, 3)]


ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "dilation": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, dilation=(2, 1)), nn.Tanh(), *head(4 * 5 * 6)),
    "uneven kernels": lambda: nn.Sequential(nn.Conv2d(2, 4, (1, 4), (2, 3), (0, 1)), nn.ReLU(), *head(4 * 5 * 3)),
    "same padding": lambda: nn.Sequential(nn.Conv2d(2, 4, (3, 5), padding="same", dilation=(1, 2)), *head(4 * 72)),
    "same padding by dilation": lambda: nn.Sequential(nn.Conv2d(2, 4, 2, padding="same", dilation=2), *head(4 * 72)),
    "valid padding": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding="valid"), *head(4 * 42)),
    "pooling of the input": lambda: nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(2, 3, 2), nn.Sigmoid(), *head(36)),
    "pooling before an activation": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(3, 2, 1), nn.ReLU(), *head(3 * 12)),
    "pooling after an activation": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(3, 2, 1), *head(3 * 12)),
    "uneven adaptive pooling": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d((4, None)), *head(3 * 4 * 6)),
    "pooling over its own size": lambda: nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), *head(144)),
    "pooling by another divisor": lambda: nn.Sequential(nn.AvgPool2d(2, divisor_override=3), *head(2 * 4 * 4)),
    "pooling twice": lambda: nn.Sequential(nn.AvgPool2d(2), nn.AvgPool2d((2, 1)), *head(2 * 2 * 4)),
    "a matrix made an image": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(144, 24), nn.Tanh(), nn.Unflatten(1, (2, 3, 4)), nn.Conv2d(2, 3, 2), nn.Tanh(), *head(18)
    ),
    "a shape in steps": lambda: nn.Sequential(nn.Flatten(2), nn.Flatten(), nn.Linear(144, 3)),
    "nothing between matrices": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Linear(5, 3)),
    "dropout in evaluation": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Dropout2d(), nn.LeakyReLU(0.3), nn.Dropout(), *head(126)
    ),
    "identities": lambda: nn.Sequential(
        nn.Identity(), nn.Conv2d(2, 3, 3), nn.Identity(), nn.ReLU(True), nn.Identity(), *head(126)
    ),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU())), nn.Sequential(*head(126))),
    "a convolution in the end": lambda: nn.Sequential(nn.Conv2d(2, 3, (9, 8)), nn.Flatten()),
    "a steep leaky ReLU": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.LeakyReLU(3.0), *head(126)),
    "no slope": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.LeakyReLU(0.0), *head(126)),
    "weights that stay": lambda: nn.Sequential(nn.Conv2d(2, 3, 3).requires_grad_(False), nn.Tanh(), *head(126)),
}


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_chain_agrees_with_its_network(make: Callable[[], nn.Module]) -> None:
    assert_agreement(make())


class Own(nn.Module):
    """A network with custom code; `then` is applied between the convolution and the linear layer."""

    def __init__(self, then: Callable[[nn.Module, Tensor], Tensor], features: int = 3 * 7 * 6) -> None:
        super().__init__()
        self.conv, self.fc, self.then = nn.Conv2d(2, 3, 3), nn.Linear(features, 4), then

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.then(self, self.conv(x)))
        return out


CODE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "view": lambda m, x: torch.relu(x).view(x.size(0), -1),
    "view of the batch": lambda m, x: x.view(-1, 126),
    "view of all sizes": lambda m, x: x.sigmoid().view(x.shape[0], x.size(1) * x.size(2) * x.size(dim=3)),
    "a sum of sizes": lambda m, x: x.tanh().reshape(-1, (x.size(2) + x.size(3) - 1 + x.size(1) * 2) * 7),
    "view by a tuple": lambda m, x: x.tanh().view((x.shape[0], -1)),
    "view by a keyword": lambda m, x: x.relu_().reshape(shape=(x.size()[0], 126)),
    "reshape": lambda m, x: torch.reshape(functional.leaky_relu(x, 0.1), (x.shape[0], -1)),
    "slope by keyword": lambda m, x: functional.leaky_relu(input=x, negative_slope=0.7, inplace=True).flatten(1),
    "slope left out": lambda m, x: functional.leaky_relu(x).flatten(start_dim=1),
    "flatten by keyword": lambda m, x: torch.flatten(input=functional.relu(x), start_dim=1),
    "the length of a batch": lambda m, x: x.relu().view(len(x), -1),
    "lengths of shapes": lambda m, x: x.tanh().view(len(x.shape) // 4 * x.shape[0], -1),
    "a choice by dimensions": lambda m, x: x.relu().flatten(1) if x.dim() == 4 else x,
    "a choice by ndim": lambda m, x: x if x.ndim != 4 else x.relu().flatten(1),
    "a choice by a size": lambda m, x: m.missing if x.shape[-1] != 6 else x.tanh().reshape(-1, 126),
    "a choice by dtype": lambda m, x: m.missing if x.dtype == torch.uint8 else x.sigmoid().flatten(1),
    "a range of dimensions": lambda m, x: x.view(x.shape[0], *(x.size(i) for i in range(1, x.dim()))).flatten(1),
    "a product of sizes": lambda m, x: x.view(-1, prod(x.shape[1:])),
    "all values": lambda m, x: x.view(len(x), x.numel() // len(x)),
    "clamp": lambda m, x: x.clamp(min=0).flatten(1),
    "clamp by torch": lambda m, x: torch.clamp(input=x, min=0.0).flatten(1),
    "clamp in place": lambda m, x: x.clamp_(0).flatten(1),
    "clip": lambda m, x: torch.clip(x, 0, None).flatten(1),
    "contiguous": lambda m, x: torch.tanh(x).contiguous().flatten(1),
    "dropout as it should be": lambda m, x: functional.dropout(x, 0.5, m.training).flatten(1),
    "dropout by keyword": lambda m, x: functional.dropout(x, training=m.training).flatten(1),
    "unflatten": lambda m, x: x.flatten(1).unflatten(1, (3, -1)).flatten(1).relu(),
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE.keys())
def test_custom_forward_code_is_read(code: Callable[[Any, Tensor], Tensor]) -> None:
    assert_agreement(Own(code))


@pytest.mark.parametrize(
    ("pool", "features"),
    [
        (lambda m, x: functional.avg_pool2d(x, 2).relu().flatten(1), 3 * 3 * 3),
        (lambda m, x: functional.avg_pool2d(input=x.relu(), kernel_size=(2, 3), ceil_mode=True).flatten(1), 3 * 4 * 2),
        (lambda m, x: functional.avg_pool2d(x, x.size()[2:]).view(x.size(0), -1), 3),
        (lambda m, x: functional.adaptive_avg_pool2d(x.relu(), output_size=4).flatten(1), 3 * 16),
    ],
)
def test_functional_pooling_is_read(pool: Callable[[Any, Tensor], Tensor], features: int) -> None:
    assert_agreement(Own(pool, features))


@pytest.mark.parametrize(
    "end",
    [
        lambda z: functional.log_softmax(z, dim=1),
        lambda z: torch.log_softmax(z, -1),
        lambda z: z.log_softmax(dim=1),
        nn.LogSoftmax(dim=1),
    ],
    ids=["functional", "torch", "method", "module"],
)
def test_chain_gives_the_logits_before_a_log_softmax_at_the_end(end: Callable[[Tensor], Tensor]) -> None:
    """The cross-entropy of logits does not change if they are first replaced by their log-softmax."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.end = nn.Linear(144, 7), nn.Linear(7, 5), end

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.last(torch.relu(self.first(x.flatten(1)))))

    net = Net().double()
    x, y = torch.randn(3, *SHAPE, dtype=torch.float64), torch.tensor([0, 4, 1])
    logits = evaluate(read_chain(net, SHAPE), net, x)
    assert (logits - net(x)).abs().max() > 0.1
    torch.testing.assert_close(functional.cross_entropy(logits, y), functional.nll_loss(net(x), y))


def test_size_of_the_input_is_right_when_read_after_a_convolution() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 3, 3), nn.Linear(126, 2)

        def forward(self, x: Tensor) -> Tensor:
            given = self.conv(x)
            height, width = x.size(2) - 2, x.shape[-1] - 2  # of the input, asked for after the convolution
            out: Tensor = self.fc(given.reshape(-1, given.size(1) * height * width))
            return out

    assert_agreement(Early())


def test_layers_state_their_shapes_kernels_and_activations() -> None:
    model = nn.Sequential(
        *(nn.AvgPool2d(2), nn.Conv2d(2, 4, 3, stride=2, padding=(2, 1), bias=False), nn.AvgPool2d((1, 2)), nn.Tanh()),
        *(nn.AvgPool2d((3, 1)), nn.Flatten(), nn.Linear(4, 6), nn.LeakyReLU(0.1), nn.Dropout(), nn.Linear(6, 2)),
    )
    first, second, third = assert_agreement(model, (2, 8, 8)).layers
    assert (first.weight, first.bias, second.weight, second.bias) == ("1.weight", None, "6.weight", "6.bias")
    assert (first.inputs, first.product_inputs) == ((2, 8, 8), (2, 4, 4))
    assert (first.product_outputs, first.outputs) == ((4, 3, 2), (4, 3, 1))
    assert (first.kernel, first.stride, first.padding, first.dilation) == ((3, 3), (2, 2), (2, 1), (1, 1))
    assert (second.inputs, second.product_inputs, second.kernel) == ((4, 3, 1), (4,), None)
    assert (second.product_outputs, second.outputs) == ((6,), (6,))
    assert (third.inputs, third.product_inputs, third.outputs) == ((6,), (6,), (2,))
    assert [layer.activation.name for layer in (first, second, third)] == ["tanh", "leaky_relu(0.1)", "identity"]
    assert [len(layer.before) for layer in (first, second, third)] == [1, 2, 1]
    assert len(first.after) == 1


@pytest.mark.parametrize("layer", [nn.Linear(6, 2), nn.Linear(6, 2, bias=False)])
def test_a_single_matrix_is_a_chain_of_one(layer: nn.Linear) -> None:
    (only,) = assert_agreement(layer, (6,)).layers
    assert (only.name, only.weight) == ("", "weight")


def test_subclass_of_a_convolution_with_its_forward_is_accepted() -> None:
    class Conv3x3(nn.Conv2d):
        def __init__(self, before: int, after: int) -> None:
            super().__init__(before, after, 3, padding=1)

    assert [layer.name for layer in assert_agreement(nn.Sequential(Conv3x3(2, 3), nn.ReLU(), *head(216))).layers] == ["0", "3"]


CHAINS = {"cnn6": 7, "cnn6_d": 7, "fcn3": 3, "lenet_cpl": 5, "lenet_dlg": 4, "mlp": 2}


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize(("name", "layers"), CHAINS.items())
def test_networks_of_the_papers_are_chains_also_without_weight_values(name: str, layers: int, classes: int) -> None:
    data = DataSpec(shape=(1, 12, 16), num_classes=classes)
    chain = assert_agreement(models.build(ModelSpec(name=name), data), data.shape)
    outline = read_chain(models.build_layout(ModelSpec(name=name), data), data.shape)
    assert len(chain.layers) == len(outline.layers) == layers
    for real, drawn in zip(chain.layers, outline.layers, strict=True):
        assert (real.weight, real.bias, real.shape, real.outputs) == (drawn.weight, drawn.bias, drawn.shape, drawn.outputs)
        assert real.activation.name == drawn.activation.name


def test_reading_a_chain_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(), nn.ReLU(), *head(126))
    model.train()[1].eval()
    modes, values = [m.training for m in model.modules()], {k: (id(p), p.clone()) for k, p in model.named_parameters()}
    read_chain(model, SHAPE)
    assert [m.training for m in model.modules()] == modes
    assert all(id(p) == values[k][0] and torch.equal(p, values[k][1]) for k, p in model.named_parameters())


ACTIVATIONS: list[Callable[[], nn.Module]] = [nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Identity, lambda: nn.LeakyReLU(0.2), nn.Dropout]


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Sequential, tuple[int, ...]]:
    """Generate random networks of supported layers, with an input shape; layers with weights are followed by an activation or
    none, before or after pooling."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=3, max_size=3)))
    layers: list[nn.Module] = []
    x, open_for_activation = torch.zeros(1, *shape), False
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["conv", "conv", "pool", "adaptive", "linear"]))
        one = draw(pieces(kind, tuple(x.shape[1:])))
        open_for_activation = open_for_activation or kind in ("conv", "linear")
        if open_for_activation and draw(st.booleans()):
            one.append(draw(st.sampled_from(ACTIVATIONS))())
            open_for_activation = isinstance(one[-1], nn.Identity | nn.Dropout)
        try:
            x = nn.Sequential(*one).eval()(x)
        except RuntimeError:  # the image has become too small
            assume(False)
        layers += one
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(x[0].numel(), 3)), shape


@st.composite
def pieces(draw: st.DrawFn, kind: str, shape: tuple[int, ...]) -> list[nn.Module]:
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    if kind == "conv":
        padding = st.tuples(st.integers(0, 2), st.integers(0, 2))
        return [nn.Conv2d(shape[0], draw(st.integers(1, 4)), draw(pair), draw(pair), draw(padding), draw(pair))]
    if kind == "pool":
        kernel, stride = draw(pair), draw(pair)
        padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
        return [nn.AvgPool2d(kernel, stride, padding, draw(st.booleans()), draw(st.booleans()))]
    if kind == "adaptive":
        return [nn.AdaptiveAvgPool2d(draw(pair))]
    after = draw(st.tuples(*[st.integers(1, 3)] * 3))
    return [nn.Flatten(), nn.Linear(prod(shape), prod(after), bias=draw(st.booleans())), nn.Unflatten(1, after)]


@given(networks())
@settings(deadline=None, max_examples=60)
def test_chain_of_a_random_network_agrees_with_it(network: tuple[nn.Sequential, tuple[int, ...]]) -> None:
    model, shape = network
    chain = assert_agreement(model, shape)
    assert len(chain.layers) == sum(isinstance(one, nn.Conv2d | nn.Linear) for one in model)


PIECES: dict[str, Callable[[Any, Tensor], Any]] = {
    "relu": lambda m, x: x.relu(),
    "leaky": lambda m, x: functional.leaky_relu(x, 0.2),
    "plus": lambda m, x: x + 1,
    "times": lambda m, x: 2 * x,
    "twice": lambda m, x: x + x,
    "minus": lambda m, x: -x,
    "clamp": lambda m, x: x.clamp(min=0),
    "length": lambda m, x: x.view(len(x), -1),
    "if image": lambda m, x: x.tanh() if x.dim() == 4 else x,
    "if batch": lambda m, x: x.tanh() if len(x) > 2 else x,
    "cut": lambda m, x: x[:, :1],
    "first": lambda m, x: x[:1],
    "flip": lambda m, x: x.flip(1),
    "turn": lambda m, x: x.transpose(-1, -2),
    "other order": lambda m, x: x.permute(0, *range(2, x.dim()), 1) if isinstance(x, Tensor) else x.permute(0, 2, 3, 1),
    "flat": lambda m, x: x.flatten(1),
    "too flat": lambda m, x: x.flatten(),
    "channels as batch": lambda m, x: x.view(x.size(1), -1),
    "rows as batch": lambda m, x: x.reshape(-1, x.size(-1)),
    "one row": lambda m, x: x.view(1, -1),
    "view": lambda m, x: x.view(x.size(0), -1),
    "drop": lambda m, x: functional.dropout(x),
    "conv": lambda m, x: m.conv(x),
    "conv again": lambda m, x: m.again(x),
    "own weights": lambda m, x: functional.conv2d(x, m.conv.weight, padding=1),
    "image": lambda m, x: x.unflatten(1, (2, -1, 2)),
    "pool": lambda m, x: functional.avg_pool2d(x, 3, 1, 1),
    "largest": lambda m, x: functional.max_pool2d(x, 3, 1, 1),
    "norm": lambda m, x: functional.layer_norm(x, x.shape[1:]),
    "shortcut": lambda m, x: m.conv(x) + x,
    "gate": lambda m, x: x * m.conv(x).sigmoid(),
    "fc": lambda m, x: m.fc(x),
    "fc again": lambda m, x: m.same(x),
    "noise": lambda m, x: x + torch.rand_like(x),
    "double": lambda m, x: x.double().float(),
    "detached": lambda m, x: x.detach(),
    "unused": lambda m, x: (m.conv(x), x)[1],
    "squeeze": lambda m, x: x.squeeze(),
    "size as value": lambda m, x: x * x.size(1),
}


class Written(nn.Module):
    def __init__(self, pieces: list[str]) -> None:
        super().__init__()
        self.conv, self.again = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.fc, self.same, self.end = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.same.weight = self.fc.weight
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces:
            x = PIECES[piece](self, x)
        out: Tensor = self.end(x)
        return out


@given(st.lists(st.sampled_from(sorted(PIECES)), max_size=4), st.lists(st.sampled_from(["fc", "relu", "view"]), max_size=2))
@settings(deadline=None, max_examples=300)
def test_accepted_code_agrees_with_its_chain(pieces: list[str], more: list[str]) -> None:
    model, shape = Written([*pieces, "flat", *more]), (2, 2, 4)
    try:
        chain = read_chain(model, shape)
    except NotAChain:
        return
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(evaluate(chain, model, x), model(x), rtol=1e-5, atol=1e-6)
    used = [layer.weight for layer in chain.layers]
    assert len(set(used)) == len(used)
    loss = model(x).square().sum()  # and no other parameter affects the loss
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert {name for (name, _), g in zip(model.named_parameters(), grads, strict=True) if g is not None} == {
        name for layer in chain.layers for name in (layer.weight, layer.bias) if name
    }
