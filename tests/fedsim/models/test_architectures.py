"""Tests of published networks against second implementations: parameters, sizes of layers, and outputs."""

from itertools import pairwise
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.models import build, build_layout, list_buffers
from fedsim.recording import DataSpec, ModelSpec

CIFAR = DataSpec(shape=(3, 32, 32), num_classes=10)
TWO = DataSpec(shape=(3, 32, 32), num_classes=2)
DIGITS = DataSpec(shape=(1, 28, 28), num_classes=2)
IMAGENET = DataSpec(shape=(3, 128, 128), num_classes=1000)
FACES = DataSpec(shape=(3, 32, 32), num_classes=106)
ROWS = DataSpec(shape=(30,), num_classes=2)
SMALL = DataSpec(shape=(3, 9, 13), num_classes=4)


def conv(*widths: int, kernel: int = 3, bias: bool = False) -> int:
    return sum(a * b * kernel**2 + bias * b for a, b in pairwise(widths))


def stage(before: int, after: int, blocks: int) -> int:
    """Count the weights of a stage of basic blocks."""
    shortcut = conv(before, after, kernel=1) if before != after else 0
    return conv(before, *[after] * (2 * blocks)) + shortcut


STAGES_18 = stage(64, 64, 2) + stage(64, 128, 2) + stage(128, 256, 2) + stage(256, 512, 2)
CHANNELS_18 = 64 + 4 * 64 + 5 * (128 + 256 + 512)
CNN6_TAIL = 36 * 36 * 9 + 36 * 64 * 9 + 64 * 128 * 9 + 3200


@pytest.mark.parametrize(
    ("name", "arguments", "data", "count"),
    [
        ("resnet18", {}, CIFAR, 11_173_962),  # the published number
        ("resnet18", {}, CIFAR, conv(3, 64) + STAGES_18 + 2 * CHANNELS_18 + 513 * 10),
        ("resnet18", {"batch_norm": False}, CIFAR, 11_173_962 - CHANNELS_18),
        (
            *("resnet20_4", {}, CIFAR),
            conv(3, 64) + stage(64, 64, 3) + stage(64, 128, 3) + stage(128, 256, 3) + 2 * 7 * (64 + 128 + 256) + 2570,
        ),
        ("resnet18_rog", {}, IMAGENET, conv(3, 64, kernel=7) + STAGES_18 + 32_768 * 1000),
        (
            *("resnet9_rog", {}, IMAGENET),
            conv(3, 64, kernel=7) + stage(64, 64, 1) + stage(64, 128, 1) + stage(128, 256, 1) + stage(256, 512, 1) + 32_768_000,
        ),
        ("lenet_rog", {}, IMAGENET, conv(3, 32, 64, kernel=5, bias=True) + 65_536 * 512 + 512 * 1000),
        ("vgg7", {}, IMAGENET, conv(3, 128, 128, 256, 256, 512, 512, bias=True) + 131_072 * 1024 + 1024 * 1000),
        ("cnn6", {}, TWO, 3 * 12 * 16 + 12 * 36 * 9 + 36 * 36 * 9 + CNN6_TAIL),
        ("cnn6_d", {}, TWO, 3 * 12 * 16 + 12 * 20 * 9 + 20 * 36 * 9 + CNN6_TAIL),
        ("cnn6", {}, CIFAR, 3 * 12 * 16 + 12 * 36 * 9 + 36 * 36 * 9 + CNN6_TAIL + 9 * 3200),
        ("fcn3", {}, DIGITS, 784 * 1000 + 1000 * 100 + 100),
        ("torchvision", {"architecture": "resnet50"}, DataSpec(shape=(3, 224, 224), num_classes=1000), 25_557_032),
        ("torchvision", {"architecture": "resnet50"}, CIFAR, 25_557_032 - 990 * 2049),
        ("torchvision", {"architecture": "vgg16"}, DataSpec(shape=(3, 224, 224), num_classes=1000), 138_357_544),
        ("lenet_cpl", {}, FACES, 93_262),  # Wei et al.: four convolutions
        ("lenet_dlg", {}, FACES, 93_262 - (12 * 12 * 25 + 12)),  # one convolution less
        ("lenet_dlg", {}, DataSpec(shape=(1, 28, 28), num_classes=10), (25 + 1) * 12 + 2 * (12 * 25 + 1) * 12 + (588 + 1) * 10),
        ("mlp", {}, ROWS, 31 * 256 + 257 * 2),
        ("mlp", {"hidden": [5, 4]}, ROWS, 31 * 5 + 6 * 4 + 5 * 2),
        ("mlp", {"hidden": []}, ROWS, 31 * 2),
    ],
)
def test_the_number_of_parameters(name: str, arguments: dict[str, object], data: DataSpec, count: int) -> None:
    model = build_layout(ModelSpec(name=name, arguments=arguments), data)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    ("name", "data", "sizes"),
    [
        ("cnn6", TWO, [(12, 17, 17), (36, 9, 9), (36, 9, 9), (36, 9, 9), (64, 5, 5), (128, 5, 5), (1,)]),
        ("cnn6_d", TWO, [(12, 17, 17), (20, 9, 9), (36, 9, 9), (36, 9, 9), (64, 5, 5), (128, 5, 5), (1,)]),
        ("fcn3", DIGITS, [(1000,), (100,), (1,)]),
        ("lenet_rog", IMAGENET, [(32, 128, 128), (64, 64, 64), (512,), (1000,)]),
        (*("vgg7", IMAGENET), [*[(128, 128, 128)] * 2, *[(256, 64, 64)] * 2, *[(512, 32, 32)] * 2, (1024,), (1000,)]),
    ],
)
def test_the_sizes_of_layers(name: str, data: DataSpec, sizes: list[tuple[int, ...]]) -> None:
    model, found = build_layout(ModelSpec(name=name), data), []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, out: found.append(tuple(out.shape[1:])))
    model(torch.empty(1, *data.shape, device="meta"))
    assert found == sizes


def test_resnet20_4_has_the_21_convolutions_that_agic_counts() -> None:
    model = build_layout(ModelSpec(name="resnet20_4"), CIFAR)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 21
    assert all(m.bias is None for m in convolutions)
    assert len(list_buffers(model)) == 3 * 21


def resnet_by_hand(model: nn.Module, x: Tensor, blocks: tuple[int, ...], *, norm: bool, stem: int, pool: int) -> Tensor:
    """Compute the output of a residual network in evaluation mode from its tensors in their order."""
    tensors = iter(model.state_dict().items())

    def layer(x: Tensor, stride: int) -> Tensor:
        name, weight = next(tensors)
        assert name.endswith("weight")
        biased = not norm and stem == 3
        x = F.conv2d(x, weight, next(tensors)[1] if biased else None, stride=stride, padding=weight.shape[-1] // 2)
        if not norm:
            return x
        gamma, beta, mean, var, _ = (next(tensors)[1][:, None, None] if i < 4 else next(tensors)[1] for i in range(5))
        return gamma * (x - mean) / (var + 1e-5).sqrt() + beta

    x = layer(x, 1 if stem == 3 else 2).relu()
    for number, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if number and not block else 1
            body = layer(layer(x, stride).relu(), 1)
            x = (body + (layer(x, stride) if stride == 2 else x)).relu()
    x = F.adaptive_avg_pool2d(x, pool).flatten(1)
    weight, *bias = (tensor for _, tensor in tensors)
    return x @ weight.T + (bias[0] if bias else 0)


def with_random_statistics(model: nn.Module) -> nn.Module:
    rng = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=rng) + (0.5 if name.endswith("var") else 0))
    return model


@pytest.mark.parametrize(
    ("name", "arguments", "blocks", "norm", "stem", "pool"),
    [
        ("resnet20_4", {}, (3, 3, 3), True, 3, 1),
        ("resnet18", {}, (2, 2, 2, 2), True, 3, 1),
        ("resnet18", {"batch_norm": False}, (2, 2, 2, 2), False, 3, 1),
        ("resnet9_rog", {}, (1, 1, 1, 1), False, 7, 8),
        ("resnet18_rog", {}, (2, 2, 2, 2), False, 7, 8),
    ],
)
def test_residual_networks_compute_what_a_second_implementation_does(
    name: str, arguments: dict[str, object], blocks: tuple[int, ...], norm: bool, stem: int, pool: int
) -> None:
    model = with_random_statistics(build(ModelSpec(name=name, arguments=arguments), SMALL, seed=3)).eval()
    x = torch.rand(2, 3, 9, 13, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            model(x), resnet_by_hand(model, x, blocks, norm=norm, stem=stem, pool=pool), rtol=1e-3, atol=1e-3
        )


def test_convolutions_before_batch_norm_start_kaiming_normal_by_fan_out() -> None:
    model = build(ModelSpec(name="resnet20_4"), CIFAR, seed=1)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            expected = (2 / (module.out_channels * prod(module.kernel_size))) ** 0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05)
            assert module.weight.abs().max() > 2 * expected  # a uniform distribution ends at 1.73 standard deviations


@pytest.mark.parametrize("name", ["cnn6", "cnn6_d", "fcn3"])
def test_rgap_networks_are_homogeneous(name: str) -> None:
    """Without biases and with LeakyReLU of slope 0.2, twice the input gives twice the logit, but minus not minus."""
    model, x = build(ModelSpec(name=name), DataSpec(shape=(1, 12, 12), num_classes=2)), torch.rand(3, 1, 12, 12) - 0.5
    torch.testing.assert_close(model(2 * x), 2 * model(x))
    assert not torch.allclose(model(-x), -model(x), rtol=0.05)
    slopes = {m.negative_slope for m in model.modules() if isinstance(m, nn.LeakyReLU)}
    assert slopes == {0.2}
    assert all(p.ndim > 1 for p in model.parameters())


def test_the_logits_of_fcn3_may_be_negative() -> None:
    """There is no LeakyReLU after the last layer, as in the paper; its code has one, which would shrink negative logits."""
    model, x = build(ModelSpec(name="fcn3"), DIGITS, seed=2), torch.rand(40, 1, 28, 28) - 0.5
    w = [p.detach() for p in model.parameters()]
    by_hand = F.leaky_relu(F.leaky_relu(x.flatten(1) @ w[0].T, 0.2) @ w[1].T, 0.2) @ w[2].T
    assert by_hand.min() < 0 < by_hand.max()
    torch.testing.assert_close(model(x), by_hand)


def test_torchvisions_classifiers_start_untrained_from_the_seed_alone() -> None:
    spec = ModelSpec(name="torchvision", arguments={"architecture": "squeezenet1_1"})
    one, two = (build(spec, CIFAR, seed=6).state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("architecture", "shape", "words"),
    [
        ("resnet_50", (3, 32, 32), r"no classifier 'resnet_50'\. Did you mean 'resnet50'\?"),
        ("fasterrcnn_resnet50_fpn", (3, 32, 32), "no classifier"),
        ("zzz", (3, 32, 32), "Known: alexnet, "),
        ("alexnet", (3, 32, 32), r"architecture=alexnet\) does not fit inputs of shape \(3, 32, 32\)"),
        ("vit_b_16", (3, 32, 48), "square images, and these have 32x48"),
    ],
)
def test_unknown_or_unsuitable_torchvision_networks_are_refused(architecture: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_layout(
            ModelSpec(name="torchvision", arguments={"architecture": architecture}), DataSpec(shape=shape, num_classes=5)
        )


@pytest.mark.parametrize("architecture", ["googlenet", "vit_b_32", "regnet_y_400mf"])
def test_architectures_with_something_special_give_plain_logits(architecture: str) -> None:
    """They have auxiliary outputs, a fixed image size, or parts that cannot be built on the meta device."""
    model = build_layout(ModelSpec(name="torchvision", arguments={"architecture": architecture}), CIFAR)
    x = torch.empty(2, 3, 32, 32, device=next(model.parameters()).device)
    assert model.train()(x).shape == (2, 10)
