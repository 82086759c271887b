"""Tests of attacks on the input layer of networks whose code scales and shifts the examples before it."""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_rounds
from torch import Tensor, nn

from attacker.attacks import Case, cocktail_party, cohort_spans, spans
from attacker.attacks.networks.input_layer import find_input_layer
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.models import ModuleSpec
from fedsim.recording import DataSpec
from fedsim.recording.masked_vectors import SUM_CLIENT

RAW = DataSpec(shape=(3, 6, 6), num_classes=4)
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.3, 0.2)
STATED = replace(RAW, mean=MEAN, std=STD)
TWO_EPOCHS = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8))


class ScalingNet(nn.Module):
    """A perceptron whose code normalises its inputs, by default not at all."""

    def __init__(self, mean: tuple[float, ...] = (0.0,), std: tuple[float, ...] = (1.0,), first: nn.Module | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])
        self.first = first or nn.Identity()
        self.hidden, self.head = nn.Linear(RAW.size, 96), nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first((x - self.mean) / self.std)
        return self.head(torch.relu(self.hidden(x.flatten(1))))


def make_spec(**arguments: object) -> ModuleSpec:
    torch.manual_seed(0)
    return ModuleSpec.of(ScalingNet(**arguments))


def draw_examples(count: int) -> tuple[Tensor, Tensor]:
    return torch.rand(count, *RAW.shape, generator=seeded(5)), torch.arange(count) % 4


def make_case(spec: ModuleSpec, data: DataSpec, order: tuple[tuple[int, ...], ...], *, secure: bool = False) -> Case:
    """Return the updates of a client that takes one step on each batch of `order`.

    secure: whether each update is instead the secure sum of clients with one example each, named after it.
    """
    x, y = draw_examples(1 + max(max(rows) for rows in order))
    case = observe_rounds([[(x[list(rows)], y[list(rows)])] for rows in order], model=spec, data=data)
    rounds = []
    for seen, rows in zip(case.observations, order, strict=True):
        sender = {"client": SUM_CLIENT, "cohort": tuple(map(str, rows))} if secure else {}
        rounds.append(replace(seen, buffers=dict(models.build(spec, data).named_buffers()), **sender))
    return Case(tuple(rounds))


def measure_errors(found: Reconstruction, x: Tensor) -> Tensor:
    """Return the largest difference of each true example to the nearest one that was found."""
    return (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2).amin(dim=0)


@pytest.mark.parametrize("relu", [False, True])
def test_spans_undoes_the_scaling_in_the_networks_code(relu: bool) -> None:
    x, y = draw_examples(9)
    (found,) = spans(relu=relu)([make_case(make_spec(mean=MEAN, std=STD), RAW, TWO_EPOCHS)], rng=seeded())
    assert float(measure_errors(found, x).max()) < 1e-4
    own = (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2).argmin(dim=1)
    assert found.y.tolist() == y[own].tolist()
    assert bool((found.confidence > 0.9).all())


def test_scaling_in_code_and_stated_normalisation_give_the_same_answers() -> None:
    in_code = spans()([make_case(make_spec(mean=MEAN, std=STD), RAW, TWO_EPOCHS[:4])], rng=seeded())[0]
    stated = spans()([make_case(make_spec(), STATED, TWO_EPOCHS[:4])], rng=seeded())[0]
    assert in_code.x.shape == stated.x.shape
    assert float(measure_errors(in_code, stated.x).max()) < 1e-4


def test_cohort_spans_undoes_the_scaling() -> None:
    case = make_case(make_spec(mean=MEAN, std=STD), RAW, ((0, 1), (0, 2), (1, 2), (0, 1)), secure=True)
    (found,) = cohort_spans()([case], rng=seeded())
    assert float(measure_errors(found, draw_examples(3)[0]).max()) < 1e-3


def test_cocktail_party_undoes_the_scaling() -> None:
    rows = (tuple(range(6)),)
    (in_code,) = cocktail_party()([make_case(make_spec(mean=MEAN, std=STD), RAW, rows)], rng=seeded())
    (stated,) = cocktail_party()([make_case(make_spec(), STATED, rows)], rng=seeded())
    assert float(measure_errors(in_code, stated.x).max()) < 1e-3


class Learned(nn.Module):
    """A scale that clients train, one at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(2 * torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


@pytest.mark.parametrize("first", [Learned(), nn.BatchNorm2d(3), nn.Tanh(), nn.Dropout(0.5)])
def test_other_code_before_the_layer_is_refused(first: nn.Module) -> None:
    """The scaling of batch norm and of a learned scale changes with the federation, tanh is none, and dropout is random."""
    spec = ModuleSpec.of(ScalingNet(first=first))
    layer = find_input_layer(spec, RAW)
    assert layer is None or isinstance(first, nn.Dropout)  # dropout is none in evaluation mode, and `spans` names it


def test_a_negative_scale_is_refused() -> None:
    assert find_input_layer(make_spec(std=(-1.0,)), RAW) is None


def test_the_scaling_is_told_as_a_normalisation() -> None:
    layer = find_input_layer(make_spec(mean=(2.0,), std=(4.0,)), STATED)
    (x,) = draw_examples(1)[0]
    torch.testing.assert_close(layer.specify_input(STATED).normalise(x), (STATED.normalise(x) - 2) / 4)
    unscaled = find_input_layer(make_spec(), STATED)
    assert unscaled.specify_input(STATED) is STATED
