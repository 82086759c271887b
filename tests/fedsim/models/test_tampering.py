"""Tests of signs that a malicious server changed the weights: published patterns are found, and ordinary networks have none."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torchvision import models as vision

import fedleak
from fedsim import models
from fedsim.models.tampering import find_imprint, inspect_model, inspect_weights
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(3, 16, 16), num_classes=10)


def random_weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def name_patterns(weights: dict[str, Tensor]) -> set[str]:
    return {sign.pattern for sign in inspect_weights(weights)}


@pytest.mark.parametrize("statistic", ["average", "cosine"])
def test_an_imprint_module_is_found_through_the_public_function(statistic: str) -> None:
    spec = ModelSpec(name="imprint", arguments={"base": "lenet_cpl", "bins": 64, "statistic": statistic})
    found = fedleak.inspect_model(models.build(spec, DATA))
    assert ("0.sort.weight", "imprint layer") in {(sign.layer, sign.pattern) for sign in found}


@pytest.mark.parametrize("name", ["mlp", "lenet_cpl", "lenet_rog", "cnn6", "resnet20_4"])
def test_networks_of_this_project_show_no_sign(name: str) -> None:
    assert inspect_model(models.build(ModelSpec(name=name), DataSpec(shape=(3, 32, 32), num_classes=10))) == []


@pytest.mark.parametrize("name", ["squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_torchvision_networks_show_no_sign(name: str) -> None:
    assert inspect_model(getattr(vision, name)(num_classes=10)) == []


def test_trap_weights_are_found_and_random_rows_are_not() -> None:
    half = random_weights(32, 20).abs()
    order = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(32)])
    trap = torch.cat([-half, 0.9 * half], dim=1).gather(1, order)
    assert name_patterns({"a.weight": trap, "head.weight": random_weights(10, 32)}) == {"trap weights"}
    assert name_patterns({"a.weight": random_weights(32, 40), "head.weight": random_weights(10, 32)}) == set()


def test_neurons_that_no_input_reaches_are_found() -> None:
    weight, head = random_weights(32, 40), random_weights(10, 32)
    out_of_reach = -3.1 * weight.abs().sum(dim=1)
    assert name_patterns({"a.weight": weight, "a.bias": out_of_reach, "b.weight": head}) == {"dead neurons"}
    assert name_patterns({"a.weight": weight, "a.bias": 0.9 * out_of_reach, "b.weight": head}) == set()
    some = torch.where(torch.arange(32) < 16, out_of_reach, torch.zeros(32))
    assert name_patterns({"a.weight": weight, "a.bias": some, "b.weight": head}) == set()


def test_a_head_of_one_class_is_found_and_a_head_of_zeros_is_not() -> None:
    head = torch.zeros(10, 32)
    assert name_patterns({"head.weight": head}) == set()
    head[3] = 1.0
    (sign,) = inspect_weights({"head.weight": head})
    assert sign.pattern == "head of a single class"
    assert "class 3" in sign.evidence


def test_convolutions_that_copy_their_input_are_found() -> None:
    copying = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    nn.init.dirac_(copying.weight)
    assert name_patterns({"conv.weight": copying.weight}) == {"copying convolution"}
    assert name_patterns({"conv.weight": random_weights(8, 3, 3, 3)}) == set()


def wide_network(
    *, features: int = 32, neurons: int = 256, bias: bool = False, gaussian: tuple[int, ...] = (2,)
) -> nn.Sequential:
    """Return an MLP of three linear layers, of which those with the given indices are drawn from a normal distribution."""
    layers = nn.Sequential(
        nn.Linear(64, features), nn.ReLU(), nn.Linear(features, neurons, bias=bias), nn.ReLU(), nn.Linear(neurons, 10)
    )
    for number, index in enumerate(gaussian):
        weight = layers[index].weight
        assert isinstance(weight, nn.Parameter)
        weight.data = random_weights(*weight.shape, seed=number) * (2 / weight.shape[1]) ** 0.5
    return layers


@pytest.mark.parametrize("base", ["lenet_cpl", "resnet20_4"])
def test_a_wide_gaussian_layer_that_a_server_added_is_found(base: str) -> None:
    spec = ModelSpec(name="wide_head", arguments={"base": base, "features": 64, "neurons": 512})
    (sign,) = inspect_model(models.build(spec, DATA))
    assert (sign.layer, sign.pattern) == ("1.widen.weight", "wide Gaussian layer")
    assert "512 neurons" in sign.evidence
    assert "64 features" in sign.evidence


@pytest.mark.parametrize(
    ("network", "count"),
    [
        (wide_network(), 1),
        (wide_network(gaussian=()), 0),  # PyTorch's uniform initialisation
        (wide_network(gaussian=(0, 2)), 0),  # another layer is drawn alike
        (wide_network(gaussian=(2, 4)), 0),
        (wide_network(bias=True), 0),  # the attack needs a layer without a bias
        (wide_network(neurons=64), 0),  # two neurons per feature
        (nn.Sequential(*wide_network()[2:]), 0),  # its inputs are the examples, no features of a network
    ],
)
def test_ordinary_wide_layers_show_no_sign(network: nn.Sequential, count: int) -> None:
    assert len(inspect_model(network)) == count


@pytest.mark.parametrize("initialise", [nn.init.kaiming_normal_, nn.init.xavier_normal_, nn.init.orthogonal_])
@pytest.mark.parametrize("widths", [(784, 64, 512, 10), (30, 64, 256, 2), (3072, 128, 1024, 100)])
@pytest.mark.parametrize("bias", [True, False])
def test_common_mlps_show_no_sign(initialise, widths: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)]
    for layer in layers:
        initialise(layer.weight)
    assert inspect_model(nn.Sequential(*layers)) == []


def test_an_imprint_layer_is_described_by_its_thresholds_in_order() -> None:
    direction = torch.nn.functional.normalize(random_weights(1, 12), dim=1)
    scales, thresholds = torch.linspace(0.5, 2.0, 20), torch.linspace(1.0, -1.0, 20)
    weights = {"a.weight": scales[:, None] * direction, "a.bias": -thresholds * scales}
    found = find_imprint(weights, 12)
    assert found is not None
    assert found.order.tolist() == list(range(19, -1, -1))
    torch.testing.assert_close(found.thresholds, thresholds.flip(0).double())
    torch.testing.assert_close(found.direction, direction[0].double())
    assert find_imprint(weights, 13) is None
    weights["a.weight"][0] *= -1
    assert find_imprint(weights, 12) is None
