"""Tests of ranks and chances of reconstructions in a gallery of other examples."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from attacker.scoring.gallery import Gallery
from fedsim.data import Dataset
from fedsim.data.base import Examples
from fedsim.recording import DataSpec


def make_planar_gallery(distances: Sequence[float]) -> Gallery:
    """Return a gallery of vectors of length 1 in the plane at the given distances, 1 minus cosine, to the vector (1, 0)."""
    return Gallery(to_vectors(distances), torch.arange(len(distances)), torch.zeros(2), torch.zeros(2), (2,))


def to_vectors(distances: Sequence[float]) -> torch.Tensor:
    cosine = 1 - torch.tensor(distances, dtype=torch.float64)
    return torch.stack([cosine, (1 - cosine.square()).sqrt()], dim=1).float()


@pytest.mark.parametrize("answers", [1, 2])
def test_ranks_and_chances_by_hand(answers: int) -> None:
    """One example is nearer, one is tied, and 18 are farther; a chance counts for each reconstruction."""
    gallery = make_planar_gallery([0.1, 0.2, *np.linspace(0.3, 1.5, 18)])
    x = to_vectors([0.0]).expand(answers, 2)
    (row,) = gallery.compare(x, to_vectors([0.2]), [0], [1000])
    assert (row["rank"], row["gallery"]) == (2, 21)
    assert row["rank_share"] == pytest.approx(1.5 / 20)
    assert row["chance"] == pytest.approx(answers * 3 / 21)


def test_extrapolated_chances_are_upper_bounds_for_most_galleries() -> None:
    """If distances are uniform in [0, 1], a random example is nearer than d with probability d; the estimate is higher."""
    rng, own, held = np.random.default_rng(0), 5e-4, 0
    for _ in range(100):
        gallery = make_planar_gallery(rng.uniform(2 * own, 1, size=300).tolist())
        (row,) = gallery.compare(to_vectors([0.0]), to_vectors([own]), [0], [1000])
        held += row["chance"] >= own
    assert held >= 70


@pytest.fixture
def gallery() -> Gallery:
    rng = np.random.default_rng(0)
    examples = Examples(values=rng.integers(0, 256, (300, 3, 8, 8), dtype=np.uint8), labels=np.zeros(300, dtype=np.int64))
    spec = DataSpec(shape=(3, 8, 8), num_classes=2)
    return Gallery.of(Dataset(name="noise", spec=spec, class_names=("a", "b"), train=examples, test=examples))


def test_exact_answer_has_rank_one_in_the_gallery(gallery: Gallery) -> None:
    truth = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for row in gallery.compare(truth + 1e-4, truth, [0, 1], [1000, 1001]):
        assert (row["rank"], row["gallery"], row["rank_share"]) == (1, 301, 0.0)
        assert row["chance"] < 1e-6
        assert row["case_chance"] < 0.01


def test_ranks_of_random_answers_are_uniform(gallery: Gallery) -> None:
    rng = torch.Generator().manual_seed(2)
    found = [
        gallery.compare(torch.rand(2, 3, 8, 8, generator=rng), torch.rand(2, 3, 8, 8, generator=rng), [0, 1], [1000, 1001])
        for _ in range(150)
    ]
    shares = [row["rank_share"] for case in found for row in case]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.06)
    chances = np.array([case[0]["case_chance"] for case in found])
    assert np.mean(chances <= 0.1) <= 0.17
    assert np.mean(chances) == pytest.approx(0.5, abs=0.08)


def test_gallery_excludes_the_original_and_its_copies(gallery: Gallery) -> None:
    copied = Gallery(gallery.examples, gallery.indices, gallery.centre, gallery.constant, gallery.shape)
    direction = copied.examples[3:4].reshape(1, 3, 8, 8)
    truth = direction + copied.centre.reshape(1, 3, 8, 8)
    (row,) = copied.compare(truth, truth, [0], [1000])
    assert (row["rank"], row["gallery"]) == (1, 300)
