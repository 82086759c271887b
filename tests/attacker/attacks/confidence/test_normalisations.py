"""Tests of doubts about the stated normalisation: photographs and digits, read by the right and by a wrong mean and std."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacker.attacks.confidence import find_other_normalisation
from attacker.attacks.confidence.doubts import doubt_normalisation
from attacker.attacks.confidence.normalisations import COLOUR, GREY
from fedsim import data as datasets
from fedsim.recording import DataSpec


def load(name: str, count: int) -> tuple[Tensor, DataSpec]:
    """Return images with errors of one level of 256, so that their values do not show that they were stored with 8 bits."""
    found = datasets.load(name, **({"size": 32} if name == "photos" else {}))
    x, _ = found.train[torch.randperm(len(found.train), generator=torch.Generator().manual_seed(1))[:count].numpy()]
    return (x + torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) / 255).clamp(0, 1), found.spec


def state(data: DataSpec, normalisation: tuple[tuple[float, ...], tuple[float, ...]]) -> DataSpec:
    return replace(data, mean=normalisation[0], std=normalisation[1])


@pytest.mark.parametrize("stated", ["mean 0.5 and std 0.5", "the mean and std of CIFAR-10", "the mean and std of ImageNet"])
@pytest.mark.parametrize("used", ["mean 0 and std 1", "mean 0.5 and std 0.5", "mean 0.5 and std 1"])
def test_photographs_of_another_normalisation_are_doubted_and_others_are_not(stated: str, used: str) -> None:
    x, data = load("photos", 40)
    mine, theirs = state(data, COLOUR[stated]), state(data, COLOUR[used])
    read = mine.denormalise(theirs.normalise(x))
    for eight in range(0, 40, 8):
        assert find_other_normalisation(x[eight : eight + 8], mine) is None
        found = find_other_normalisation(read[eight : eight + 8], mine)
        if stated == used:
            assert found is None
        else:
            assert found.name == used
            wrong = (read - x)[eight : eight + 8].flatten(1).square().mean(dim=1) > 0.009 / 4
            assert found.differing.tolist() == wrong.tolist()


def test_digits_of_another_normalisation_are_doubted() -> None:
    x, data = load("digits", 30)
    mine, theirs = state(data, GREY["the mean and std of MNIST"]), state(data, GREY["mean 0 and std 1"])
    pale = mine.denormalise(theirs.normalise(x))
    assert all(find_other_normalisation(image[None], mine) is None for image in x)
    assert sum(find_other_normalisation(image[None], mine) is not None for image in pale) > 20
    assert all(find_other_normalisation(image[None], theirs) is None for image in x)


def test_values_of_eight_bits_tell_the_normalisation_of_one_image() -> None:
    """A photograph whose values span a third of the range, and that is exact, is right by one normalisation only."""
    x = torch.randint(80, 160, (1, 3, 16, 16), generator=torch.Generator().manual_seed(3)) / 255
    data = DataSpec(shape=(3, 16, 16), num_classes=10)
    mine, theirs = state(data, COLOUR["mean 0.5 and std 0.5"]), state(data, COLOUR["mean 0 and std 1"])
    assert find_other_normalisation(x, mine) is None
    found = find_other_normalisation(mine.denormalise(theirs.normalise(x)), mine)
    assert found.name == "mean 0 and std 1"


def test_only_likely_images_are_judged_and_only_those_that_would_be_others_become_undecided() -> None:
    x, data = load("photos", 8)
    mine, theirs = state(data, COLOUR["the mean and std of CIFAR-10"]), state(data, COLOUR["mean 0.5 and std 0.5"])
    read = mine.denormalise(theirs.normalise(x))
    read[0], read[1] = mine.denormalise(torch.zeros_like(x[0])), x[1]  # nearly the same grey by both, and an unlikely image
    confidence, notes = doubt_normalisation(torch.tensor([0.9, 0.1, *[0.98] * 6]), read, mine)
    assert confidence.isnan().tolist()[:2] == [False, False]
    assert int(confidence.isnan().sum()) >= 5
    assert "mean 0.5 and std 0.5" in notes[0]
    assert doubt_normalisation(torch.full((8,), 0.98), x, mine)[1] == ()


def test_images_that_leave_a_part_of_the_range_to_a_few_values_are_not_doubted() -> None:
    """Spectrograms in decibels: the upper three quarters of the range, a few values below them, and hardly an error."""
    rng = torch.Generator().manual_seed(5)
    x = 0.32 + 0.66 * torch.rand(8, 1, 32, 32, generator=rng)
    x[:, :, 0, ::8] = 0.07
    for std in (0.25, 0.5):
        assert find_other_normalisation(x, DataSpec(shape=(1, 32, 32), num_classes=10, mean=(0.5,), std=(std,))) is None
    half = 0.5 + 0.5 * x
    data = DataSpec(shape=(1, 32, 32), num_classes=10, mean=(0.5,), std=(0.5,))
    assert find_other_normalisation(half, data) is not None
    half[0, 0, 0, 0] = 0.1
    assert find_other_normalisation(half, data) is None
