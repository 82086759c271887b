"""Tests of `is_eight_bit`: images of 8 bits per value are told from mixtures and from answers with errors."""

import torch
from torch import Tensor

from attacker.attacks.confidence.eight_bit import MIN_GRID_VALUES, is_eight_bit
from attacker.attacks.confidence.estimates import CERTIFIED_CONFIDENCE, judge_closed_form
from fedsim.recording import DataSpec

SHAPE = (1, 8, 8)


def draw_images(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, *SHAPE), generator=torch.Generator().manual_seed(seed)) / 255


def test_stored_images_pass_also_with_rounding_errors() -> None:
    x = draw_images(5)
    assert bool(is_eight_bit(x).all())
    assert bool(is_eight_bit(x + 1e-4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).all())


def test_mixtures_and_inexact_answers_do_not_pass() -> None:
    first, second = draw_images(5), draw_images(5, seed=1)
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(2))
    for share in (0.5, 0.9, 0.99):
        assert not bool(is_eight_bit(share * first + (1 - share) * second).any())
    assert not bool(is_eight_bit(first + 2e-3 * noise).any())
    assert not bool(is_eight_bit(first + 1).any())  # on the grid, but no image


def test_answers_with_too_few_values_between_black_and_white_do_not_pass() -> None:
    x = (draw_images(1) > 0.5).float()
    assert not bool(is_eight_bit(x))
    x.flatten()[:MIN_GRID_VALUES] = 17 / 255  # a single level
    assert not bool(is_eight_bit(x))
    x.flatten()[:MIN_GRID_VALUES] = torch.arange(1, MIN_GRID_VALUES + 1) / 255
    assert bool(is_eight_bit(x))
    x.flatten()[MIN_GRID_VALUES - 1] = 0
    assert not bool(is_eight_bit(x))


def test_quotients_of_a_coarsely_quantised_update_do_not_pass() -> None:
    levels = torch.randint(0, 18, (4, *SHAPE), generator=torch.Generator().manual_seed(4))
    for largest in (17, 15):
        assert not bool(is_eight_bit(levels.clamp(max=largest) / largest).any())


def test_eight_bit_answer_of_a_closed_form_is_certified_although_the_batch_is_not_whole() -> None:
    x = torch.cat([draw_images(1), 0.5 * draw_images(1) + 0.5 * draw_images(1, seed=1)])
    judged = judge_closed_form("linear", x, 0.5, torch.full((2,), 0.5), DataSpec(shape=SHAPE, num_classes=10), examples=8)
    assert judged.confidence[0] >= CERTIFIED_CONFIDENCE - 1e-6
    assert not bool(judged.confidence[1] >= CERTIFIED_CONFIDENCE)
    assert any("1 of 2 examples are certified by their values" in note for note in judged.notes)


def test_certified_images_have_no_note_that_they_are_undecided() -> None:
    """The confidence of `peeled` is undecided from 0.1 to 0.9, and otherwise for images of a size that was not calibrated."""
    x = torch.randint(0, 256, (2, 1, 28, 96), generator=torch.Generator().manual_seed(2)).double() / 255
    data = DataSpec(shape=(1, 28, 96), num_classes=4)
    sure = judge_closed_form("peeled", x, 1e-5, torch.ones(2), data, 2)
    assert bool((sure.confidence >= 0.9).all())
    assert not any("undecided" in note for note in sure.notes)
    x[1] += 1e-2 * torch.randn(x[1].shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    mixed = judge_closed_form("peeled", x.clamp(0, 1), 1e-5, torch.ones(2), data, 2)
    assert mixed.confidence.isnan().tolist() == [False, True]
    assert any("undecided" in note for note in mixed.notes)
