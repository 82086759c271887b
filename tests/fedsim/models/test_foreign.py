"""Tests of third-party networks: lazy layers get their sizes, and the logits are taken out of output objects."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacker.attacks.networks.traced import trace
from fedsim.models import (
    ModuleSpec,
    admit,
    adopt_precision,
    build,
    build_layout,
    find_client_types,
    find_head,
    has_head,
    list_warnings,
)
from fedsim.recording import DataSpec, ModelSpec, Training

DATA = DataSpec(shape=(1, 6, 6), num_classes=4)


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4))


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 4))


class WithOutputDict(nn.Module):
    """A network that returns several named outputs, as those of the package transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(36, 4)

    def wrap(self, logits: Tensor) -> Any:
        return {"loss": None, "logits": logits}

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.classifier(x.flatten(1)))


class Attributes(WithOutputDict):
    def wrap(self, logits: Tensor) -> Any:
        return SimpleNamespace(loss=None, logits=logits)


class Other(WithOutputDict):
    def wrap(self, logits: Tensor) -> Any:
        return {"scores": logits}


def spec(network: type[nn.Module]) -> ModelSpec:
    reference = f"{__name__}:{network.__name__}"
    admit(reference)
    return ModelSpec(name=reference)


def test_lazy_layers_get_sizes_and_leave_batch_norm_statistics_unchanged() -> None:
    model = build(spec(Lazy), DATA)
    assert [tuple(p.shape) for p in model.parameters()] == [(2, 1, 3, 3), (2,), (2,), (2,), (4, 32), (4,)]
    assert model.training
    assert (model[1].running_mean.abs().sum(), int(model[1].num_batches_tracked)) == (0, 0)


@pytest.mark.parametrize("network", [WithOutputDict, Attributes])
def test_the_logits_of_an_output_object_are_its_output(network: type[nn.Module]) -> None:
    x = torch.rand(2, *DATA.shape)
    model = build(spec(network), DATA)
    torch.testing.assert_close(model(x), model.classifier(x.flatten(1)))
    gradient = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(dict(model.named_parameters()))
    torch.testing.assert_close(gradient["classifier.bias"], torch.full((4,), 2.0))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_network_with_hook_based_weight_norm_can_be_copied() -> None:
    network = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(36, 4)))
    x = torch.rand(2, *DATA.shape)
    network(x)  # makes the weight a non-leaf tensor, which `copy.deepcopy` refuses
    torch.testing.assert_close(ModuleSpec.of(network).copy()(x), network(x))


class Half(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.half()


class Double(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.double()


@pytest.mark.parametrize(("network", "kind"), [(Half, torch.float16), (Double, torch.float64), (Plain, torch.float32)])
def test_networks_compute_in_float32_and_their_own_types_stay_known(network: type[nn.Module], kind: torch.dtype) -> None:
    model = build(spec(network), DATA)
    assert model(torch.rand(2, *DATA.shape)).dtype == torch.float32
    assert set(find_client_types(model).values()) == {kind}
    stated = Training(learning_rate=0.1, batch_size=1, steps=1)
    assert adopt_precision(model, stated).precision == ("float16" if kind == torch.float16 else "float32")
    assert adopt_precision(model, replace(stated, precision="bfloat16")).precision == "bfloat16"


@pytest.mark.parametrize(
    ("end", "warned"),
    [
        (nn.Sigmoid(), True),
        (nn.Softmax(dim=1), True),
        (nn.Sequential(nn.Sigmoid(), nn.Flatten()), True),
        (nn.Identity(), False),
        (nn.LogSoftmax(dim=1), False),
        (nn.Sequential(nn.Sigmoid(), nn.Linear(4, 4)), False),
    ],
)
def test_network_that_returns_probabilities_is_named(end: nn.Module, warned: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), end)
    training = Training(learning_rate=0.1, batch_size=1, steps=1, mode="eval")
    found = list_warnings(model, training, DATA)
    assert any("ends in a sigmoid or softmax" in one for one in found) is warned


class Adapted(nn.Module):
    """A network whose last layer holds its weight as a buffer, beside a trained vector, as with frozen base weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(36, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))
        for name, weight in list(self.head.named_parameters()):
            delattr(self.head, name)
            self.head.register_buffer(name, weight.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * torch.relu(self.first(x.flatten(1))))


def test_layer_whose_weight_is_no_parameter_is_no_head() -> None:
    model = build(spec(Adapted), DATA)
    assert not has_head(model, DATA)
    with pytest.raises(ValueError, match="no linear layer with 4 outputs whose weight is a parameter"):
        find_head(model, DATA)


def test_a_network_with_the_hook_for_logits_can_be_traced() -> None:
    graph, _ = trace(build(spec(Plain), DATA).eval())
    assert [node.op for node in graph.nodes][-1] == "output"


def test_an_output_object_without_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="returns dict, but 4 classes need 4 logits"):
        build_layout(spec(Other), DATA)
