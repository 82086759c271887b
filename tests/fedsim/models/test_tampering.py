"""Tests of signs that a malicious server changed the weights: published patterns are found, and ordinary networks have none."""

from itertools import pairwise

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchvision import models as vision

import fedleak
from fedsim import models
from fedsim.models.imprint_layers import find_imprint
from fedsim.models.tampering import inspect_model, inspect_weights
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
    first = {"first.weight": random_weights(40, 20, seed=1)}
    assert name_patterns({**first, "a.weight": weight, "a.bias": out_of_reach, "b.weight": head}) == {"dead neurons"}
    assert name_patterns({**first, "a.weight": weight, "a.bias": 0.9 * out_of_reach, "b.weight": head}) == set()
    some = torch.where(torch.arange(32) < 16, out_of_reach, torch.zeros(32))
    assert name_patterns({**first, "a.weight": weight, "a.bias": some, "b.weight": head}) == set()


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


def build_wide_network(*, neurons: int = 256, bias: bool = False, gaussian: tuple[int, ...] = (2,)) -> nn.Sequential:
    """Return an MLP of three linear layers, of which those with the given indices are drawn from a normal distribution."""
    layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, neurons, bias=bias), nn.ReLU(), nn.Linear(neurons, 10))
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
        (build_wide_network(), 1),
        (build_wide_network(gaussian=()), 0),  # PyTorch's uniform initialisation
        (build_wide_network(gaussian=(0, 2)), 0),  # another layer is drawn alike
        (build_wide_network(gaussian=(2, 4)), 0),
        (build_wide_network(bias=True), 0),  # the attack needs a layer without a bias
        (build_wide_network(neurons=64), 0),  # two neurons per feature
        (nn.Sequential(*build_wide_network()[2:]), 0),  # its inputs are the examples, no features of a network
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
    assert found.order.tolist() == list(range(19, -1, -1))
    torch.testing.assert_close(found.thresholds, thresholds.flip(0).double())
    torch.testing.assert_close(found.direction, direction[0].double())
    assert find_imprint(weights, 13) is None
    weights["a.weight"][0] *= -1
    assert find_imprint(weights, 12) is None


def imprint_layer(bins: int = 32) -> nn.Linear:
    """Return a linear layer whose neurons compare the mean of the input with quantiles of a normal distribution."""
    layer = nn.Linear(48, bins)
    with torch.no_grad():
        layer.weight.fill_(1 / 48)
        layer.bias.copy_(-torch.distributions.Normal(0.5, 0.2).icdf(torch.arange(1, bins + 1) / (bins + 1)))
    return layer


def patterns_of(*layers: nn.Module) -> set[str]:
    return {sign.pattern for sign in inspect_model(nn.Sequential(*layers))}


class Stored(nn.Module):
    """A linear layer with other names of its parameters, whose weight may be stored as (inputs, outputs)."""

    def __init__(self, layer: nn.Linear, *, transposed: bool) -> None:
        super().__init__()
        self.kernel = nn.Parameter(layer.weight.detach().T.clone() if transposed else layer.weight.detach().clone())
        self.shift = nn.Parameter(layer.bias.detach().clone())


@pytest.mark.parametrize(
    "hide",
    [
        lambda layer: layer,
        parametrizations.weight_norm,
        pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        lambda layer: nn.utils.prune.identity(layer, "weight"),
        lambda layer: Stored(layer, transposed=False),
        lambda layer: Stored(layer, transposed=True),
    ],
)
def test_imprint_layers_are_found_however_their_weight_is_stored(hide) -> None:
    assert patterns_of(hide(imprint_layer()), nn.ReLU(), nn.Linear(32, 10)) == {"imprint layer"}


def test_an_imprint_layer_of_few_bins_or_beside_other_neurons_is_found() -> None:
    assert patterns_of(imprint_layer(bins=8), nn.ReLU(), nn.Linear(8, 10)) == {"imprint layer"}
    wide, part = nn.Linear(48, 96), imprint_layer()
    with torch.no_grad():
        wide.weight[:32], wide.bias[:32] = part.weight, part.bias
    assert patterns_of(wide, nn.ReLU(), nn.Linear(96, 10)) == {"imprint layer"}


def test_parallel_rows_without_different_thresholds_show_no_sign() -> None:
    equal, blur = nn.Linear(48, 32), nn.Conv2d(16, 16, 3, groups=16)
    upsampling = nn.ConvTranspose2d(16, 16, 4, 2, groups=16, bias=False)
    for layer in (equal, blur, upsampling):
        nn.init.constant_(layer.weight, 0.1)
    nn.init.constant_(equal.bias, -0.3)
    assert patterns_of(equal) == patterns_of(blur) == patterns_of(upsampling) == set()
    equal.weight.data = equal.weight.data + 0.002 * random_weights(32, 48)  # parallel by training, as are their thresholds
    equal.bias.data = equal.bias.data + 0.01 * random_weights(32)
    assert patterns_of(equal) == set()
    pruned = nn.Linear(48, 32)
    pruned.weight.data[2:] = 0
    pruned.weight.data[1] = 2 * pruned.weight.data[0]
    assert patterns_of(pruned) == set()


def test_equal_rows_of_an_embedding_that_is_also_the_head_show_no_sign() -> None:
    network = nn.Sequential(nn.Embedding(60, 32), nn.Linear(32, 60))
    network[1].weight = network[0].weight
    network[0].weight.data[10:50] = network[0].weight.data[10]
    assert inspect_model(network) == []


@pytest.mark.parametrize("factor", [0.95, 0.99, -0.999])
@pytest.mark.parametrize("size", [97, 3072])
def test_trap_weights_of_any_sign_are_found(factor: float, size: int) -> None:
    trap, half = torch.zeros(32, size), size // 2
    for i in range(32):
        values, place = random_weights(half, seed=i), torch.randperm(size, generator=torch.Generator().manual_seed(i))
        trap[i, place[:half]], trap[i, place[half : 2 * half]] = values, -factor * values
    assert name_patterns({"a.weight": trap, "head.weight": random_weights(10, 32)}) == {"trap weights"}


def test_antisymmetric_and_binary_rows_are_no_trap_weights() -> None:
    places = torch.arange(64)
    cosines = torch.cos(torch.pi / 64 * (places + 0.5) * places[:, None])
    powers = 2.0 ** -torch.randint(0, 4, (64, 64), generator=torch.Generator().manual_seed(0)) * random_weights(64, 64).sign()
    decay = 0.9**places * torch.ones(64, 1)
    for weight in (cosines, random_weights(64, 64).sign(), powers, decay):
        assert name_patterns({"a.weight": weight, "head.weight": random_weights(10, 64)}) == set()


def test_a_first_layer_that_nearly_never_reacts_is_found() -> None:
    first, second, head = random_weights(32, 40), random_weights(32, 32, seed=1), random_weights(10, 32, seed=2)
    rare = torch.full((32,), -2.0 * 40**0.5)
    assert name_patterns({"a.weight": first, "a.bias": rare, "b.weight": head}) == {"rarely active neurons"}
    gate = {"a.weight": first, "a.bias": torch.zeros(32), "b.weight": second, "b.bias": rare, "c.weight": head}
    assert name_patterns(gate) == set()  # such as the gates of a highway network


def test_normalised_channels_that_never_react_are_found() -> None:
    network = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16, 10))
    nn.init.zeros_(network[1].weight)
    assert inspect_model(network) == []  # the usual initialisation of the last normalisation of a residual block
    nn.init.constant_(network[1].bias, -1.0)
    assert [(sign.layer, sign.pattern) for sign in inspect_model(network)] == [("1.weight", "dead neurons")]


def test_heads_that_fish_for_classes_or_a_feature_are_found() -> None:
    kept = random_weights(10, 32)
    head, bias = torch.zeros(10, 32), torch.full((10,), 1000.0)
    head[[2, 5]], bias[[2, 5]] = kept[[2, 5]], 0.0
    assert name_patterns({"head.weight": head, "head.bias": bias}) == {"head of few classes"}
    assert name_patterns({"head.weight": head, "head.bias": -bias}) == set()  # classes that are masked out
    assert name_patterns({"head.weight": head, "head.bias": torch.zeros(10)}) == set()  # classes that are still to come
    feature = torch.zeros(10, 32)
    feature[[2, 5], 7] = 100.0
    assert name_patterns({"head.weight": feature}) == {"head of a single feature"}
    single = torch.zeros(10, 32)
    single[3] = kept[3]
    assert name_patterns({"head.weight": single, "body.weight": random_weights(32, 40)}) == {"head of a single class"}
    assert name_patterns({"a.weight": random_weights(8, 3, 3, 3), "b.weight": single[:, :, None, None]}) == {
        "head of a single class"
    }


def test_convolutions_that_copy_for_one_client_among_many_are_found() -> None:
    weight = torch.zeros(30, 3, 3, 3)
    for channel in range(3):
        weight[9 + channel, channel, 1, 1] = 1.0
    assert name_patterns({"conv.weight": weight}) == {"copying convolution"}
    weight[9:12] *= torch.tensor([0.5, 1.0, 2.0]).reshape(3, 1, 1, 1)  # what pruning leaves has different values
    assert name_patterns({"conv.weight": weight}) == set()


def test_what_cannot_be_inspected_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"must be a torch.nn.Module, got OrderedDict"):
        inspect_model(nn.Linear(3, 2).state_dict())
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    for model in (empty, nn.LazyLinear(3)):
        with pytest.raises(ValueError, match="the parameter weight has no values yet"):
            inspect_model(model)
