"""Tests of examples read off a linear layer that sees them, in networks that are no chain of supported layers."""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_steps
from torch import Tensor, nn

from attacker.attacks import Case, exact
from attacker.attacks.closed_form.linear.direct_layer import find_direct_layer, recover_direct_batch
from attacker.attacks.closed_form.observations import observe as stack
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation
from fedsim.recording.codec import encode

ROWS = DataSpec(shape=(20,), num_classes=4, mean=(0.4,), std=(0.3,))
IMAGES = DataSpec(shape=(3, 8, 8), num_classes=4, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


class Residual(nn.Module):
    """A network of linear layers with GELU, layer normalisation and a residual path."""

    def __init__(self, size: int = 20, drop: float = 0.0) -> None:
        super().__init__()
        self.drop, self.first, self.norm = nn.Dropout(drop), nn.Linear(size, 32), nn.LayerNorm(32)
        self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.norm(self.first(self.drop(x.flatten(1)))))
        logits: Tensor = self.head(h + nn.functional.gelu(self.second(h)))
        return logits


class NormalisesInside(Residual):
    """The same network for images, which normalises them itself."""

    def __init__(self) -> None:
        super().__init__(192)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - 0.1) / torch.tensor([0.5, 0.4, 0.3])[:, None, None])


class NormalisesEach(Residual):
    """The same network, which sees differences of values to their mean, so that the mean is lost."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True))


class Behind(nn.Module):
    """A network with ReLU behind its first layer, and behind it normalisation of examples or batches, or sums of neurons."""

    def __init__(self, size: int, behind: nn.Module, width: int = 64) -> None:
        super().__init__()
        self.first, self.behind = nn.Linear(size, width), behind
        self.second, self.head = nn.LazyLinear(32), nn.Linear(32, 5)
        self(torch.zeros(2, size))

    def forward(self, x: Tensor) -> Tensor:
        h = self.behind(nn.functional.relu(self.first(x.flatten(1)))[:, None])[:, 0]
        logits: Tensor = self.head(nn.functional.gelu(self.second(h)))
        return logits


class NormedExamples(Behind):
    def __init__(self) -> None:
        super().__init__(20, nn.LayerNorm(64))


class NormedBatch(Behind):
    def __init__(self) -> None:
        super().__init__(20, nn.Sequential(nn.Flatten(1), nn.BatchNorm1d(64), nn.Unflatten(1, (1, 64))))


class SummedNeurons(Behind):
    """Pairs of neurons have equal gradients for all examples, and the rows of a pair are parallel whatever turns them on."""

    def __init__(self) -> None:
        super().__init__(192, nn.AvgPool1d(2), 48)


class DropsInputs(Residual):
    def __init__(self) -> None:
        super().__init__(drop=0.3)


class WithoutHead(Residual):
    """The same network, whose logits are not the outputs of a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = torch.tanh(super().forward(x)).roll(1, dims=1)
        return logits


def name(network: type[nn.Module]) -> ModelSpec:
    spec = ModelSpec(name=f"{__name__}:{network.__name__}")
    models.admit(spec.name)
    return spec


def draw(data: DataSpec, count: int = 1) -> Tensor:
    return torch.rand(count, *data.shape, generator=seeded(5))


def attack(observation: Observation) -> Reconstruction:
    return exact(fallback="none")([Case((observation,))], rng=seeded())[0]


@pytest.mark.parametrize(("network", "data"), [(Residual, ROWS), (WithoutHead, ROWS), (NormalisesInside, IMAGES)])
@pytest.mark.parametrize("label", [0, 3])
def test_a_single_example_and_its_label_are_exact(network: type[nn.Module], data: DataSpec, label: int) -> None:
    x = draw(data)
    found = attack(observe_steps((x, torch.tensor([label])), model=name(network), data=data))
    torch.testing.assert_close(found.x, x, rtol=0, atol=1e-4)
    assert (found.y.tolist(), found.route) == ([label], "linear")
    assert float(found.confidence[0]) >= 0.9


def test_several_steps_on_one_example_still_give_it() -> None:
    x, y = draw(ROWS), torch.tensor([1])
    one = observe_steps((x, y), (x, y), model=name(Residual), data=ROWS)
    found = attack(replace(one, num_examples=1))
    torch.testing.assert_close(found.x, x, rtol=0, atol=1e-4)


def test_two_examples_reported_as_one_are_not_certain() -> None:
    one = observe_steps((draw(ROWS, 2), torch.tensor([1, 2])), model=name(Residual), data=ROWS)
    found = attack(replace(one, num_examples=1))
    assert not float(found.confidence[0]) >= 0.5
    assert "cannot invert this network" in exact(fallback="none").plan(Case((one,))).reasons["linear"]


@pytest.mark.parametrize("network", [NormedExamples, NormedBatch])
@pytest.mark.parametrize("count", [2, 4])
def test_a_batch_before_relu_and_normalisation_is_exact(network: type[nn.Module], count: int) -> None:
    x, y = draw(replace(ROWS, num_classes=5), count), torch.tensor([1, 2, 0, 4])[:count]
    one = observe_steps((x, y), model=name(network), data=replace(ROWS, num_classes=5))
    model = models.build(one.model, one.data, seed=0).train()
    weights = {name: w.clone().requires_grad_() for name, w in one.weights.items()}
    logits = torch.func.functional_call(model, weights, (ROWS.normalise(x),))
    gradients = torch.autograd.grad(nn.functional.cross_entropy(logits, y), list(weights.values()))
    update = {name: -one.training.learning_rate * g for name, g in zip(weights, gradients, strict=True)}
    found = attack(replace(one, payload=encode(update), training=replace(one.training, mode="train")))
    gaps = torch.cdist(found.x.double(), x.double())
    assert float(gaps.amin(dim=0).max()) < 1e-3
    assert found.y[gaps.argmin(dim=0)].tolist() == y.tolist()
    assert bool((found.confidence >= 0.9).all())


@pytest.mark.parametrize("seed", range(6))
def test_mixtures_behind_sums_of_neurons_are_never_certain(seed: int) -> None:
    data, rng = replace(IMAGES, num_classes=5), torch.Generator().manual_seed(seed)
    x = 0.5 + 0.2 * torch.rand(1, *data.shape, generator=rng) + 0.1 * torch.rand(6, *data.shape, generator=rng)
    one = observe_steps((x, torch.arange(6) % 5), model=name(SummedNeurons), data=data, seed=seed)
    observed = stack([Case((one,))])
    layer = find_direct_layer(observed, 0)
    assert layer is not None
    found = recover_direct_batch(observed, layer, 0, rng)
    wrong = (found.x[:, None] - x[None]).flatten(2).square().mean(dim=2).amin(dim=1) > 1e-4
    certain = torch.zeros(0) if found.stays is None else found.stays
    assert not bool((wrong & (certain >= 0.5)).any())


def test_an_example_behind_dropout_is_not_certain() -> None:
    one = observe_steps((draw(ROWS), torch.tensor([1])), model=name(DropsInputs), data=ROWS)
    found = attack(replace(one, training=replace(one.training, mode="train")))
    assert bool(found.confidence.isnan().all())
    assert any("dropout of inputs" in note for note in found.notes)


def test_a_layer_that_does_not_see_the_example_itself_is_not_used() -> None:
    for network, data in ((NormalisesEach, ROWS), (Residual, ROWS)):
        one = observe_steps((draw(data), torch.tensor([1])), model=name(network), data=data)
        layer = find_direct_layer(stack([Case((one,))]), 0)
        assert (layer is None) == (network is NormalisesEach)


def test_noise_leaves_the_answer_to_a_search() -> None:
    one = observe_steps((draw(ROWS), torch.tensor([1])), model=name(Residual), data=ROWS, defense="gaussian(0.01)")
    found = attack(one)
    assert not float(found.confidence[0]) >= 0.9
