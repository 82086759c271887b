"""Tests of systematic.py: the paper's numbers stand beside the right rows, and errors are of the assigned images."""

from pathlib import Path

import pytest
import systematic
import torch
from support.contract import Options
from support.splits import Images
from support.systematic import features, grid
from support.systematic.features import count_local_steps, get_defense, make_cases
from support.systematic.paper import (
    DEFENSES,
    FEATURE_DEFENSES,
    FEATURE_ERRORS,
    PER_TENSOR,
    PUBLISHED,
    find_feature_error,
    find_published,
)

from attacker.attacks import AttackSpec, find_unmet
from attacker.reconstruction import Reconstruction
from defenses import DefenseSpec
from fedsim.recording import DataSpec

DATA = DataSpec(shape=(3, 32, 32), num_classes=10)
ASKED = Options(quick=True, json=False, data=None, device="cpu", seed=0, table=None)


def draw_images(labels: list[int]) -> Images:
    x = torch.rand(len(labels), *DATA.shape, generator=torch.Generator().manual_seed(0))
    return Images("drawn", x, torch.tensor(labels), DATA)


def test_every_column_of_the_paper_is_a_defense_of_the_grid() -> None:
    listed = [defense for family in grid.FAMILIES.values() for defense in family]
    assert set(DEFENSES) | {"none", "3 local steps", "5 local steps"} == set(listed)
    assert len(listed) == len(set(listed))
    assert set(listed) >= grid.SMALL
    assert tuple(grid.FAMILIES) == systematic.TABLES[1:]
    for defense in listed:
        assert (get_defense(defense) == "") == (defense == "none" or count_local_steps(defense) > 1)
        DefenseSpec.parse(get_defense(defense), learning_rate=1.0)


def test_published_numbers_are_complete_and_stand_by_rank() -> None:
    assert all(len(row) == len(DEFENSES) for rows in PUBLISHED.values() for row in rows)
    assert all(len(rows) == len(grid.BATCHES) for rows in PUBLISHED.values())
    assert all(len(row) == len(FEATURE_DEFENSES) for row in FEATURE_ERRORS.values())
    assert tuple(FEATURE_ERRORS) == features.BATCHES
    assert find_feature_error("gaussian(0.1)", 8) == 0.953
    for each, every in PER_TENSOR.items():
        assert find_feature_error(each, 2) == find_feature_error(every, 2)
        kept, pruned = (DefenseSpec.parse(one, learning_rate=1.0).build() for one in (each, every))
        update = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
        sent = [built.apply(update, built.init(update), torch.Generator().manual_seed(0))[0]["w"] for built in (kept, pruned)]
        assert torch.equal(*sent)  # of a single tensor, both leave the same entries
    assert find_published("loss", "gaussian(0.1)", 2) == 1.540
    assert find_published("strongest", "none", 0) is None
    for defense in DEFENSES:  # the smallest of four errors is at most that of the paper's own attack
        for rank in range(3):
            assert find_published("strongest", defense, rank) <= find_published("feature_reconstruction", defense, rank)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_batches_of_distinct_labels_are_drawn_in_whole(batch: int) -> None:
    chosen = features._draw(draw_images([3, 3, 1, 3, 1, 2, 0]), batch, distinct=True)
    assert len(chosen) % batch == 0
    assert all(len(set(y.tolist())) == batch for y in chosen.y.split(batch))
    assert len(chosen) >= 4


def test_every_attack_of_the_grid_fits_its_network() -> None:
    attackers = grid.list_attackers(grid.choose_scale(ASKED))
    assert [one.name for one in attackers if one.papers] == [
        "feature_reconstruction", "inverting_gradients", "cocktail_party", "robbing_the_fed",
    ]  # fmt: skip
    assert len({one.title for one in attackers}) == len(attackers)
    for one in attackers:
        (case,) = make_cases(one.network, one.network_arguments, draw_images([1, 2]), "none", 2)
        assert find_unmet(AttackSpec(name=one.name, arguments=one.arguments).build(), case) == []


def test_found_images_take_the_places_of_those_that_they_are_assigned_to(tmp_path: Path) -> None:
    images = draw_images([1, 2, 3])
    (case,) = make_cases("mlp", {}, images, "none", 3)
    (found,) = AttackSpec(name="exact", arguments={"fallback": "none"}).build()([case], rng=torch.Generator().manual_seed(0))
    assert isinstance(found, Reconstruction)
    torch.testing.assert_close(grid._assign({case.key: found}, case, images.x), images.x, rtol=0, atol=1e-3)
    assert torch.equal(grid._assign({}, case, images.x), torch.full_like(images.x, 0.5))


def test_summary_counts_rows_in_which_another_attack_is_stronger() -> None:
    rows = [
        {"rmse": 0.1, "rmse_papers": 0.2, "published": 0.16},
        {"rmse": 0.2, "rmse_papers": 0.2, "published": 0.16},
        {"rmse": 0.2, "rmse_papers": 0.3, "published": None},
        {"rmse": 1e-10, "rmse_papers": 2e-10, "published": None},  # nothing is left to gain
    ]
    assert systematic.summarise(rows) == {
        "strongest_beats_papers_four": pytest.approx(2 / 3),
        "rows_with_an_error": 3,
        "below_published": pytest.approx(1 / 2),
        "rows": 4,
    }
