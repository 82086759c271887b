"""Tests of figure 9 in the ROG benchmark: its comparison of attacks, and its picture."""

from support.rog.tradeoff import ATTACKS, compare_attacks, draw_regions

ROWS = [
    {"defense": defense, "accuracy": accuracy, "attack": attack, "lpips": lpips, "psnr": 10 - lpips}
    for defense, accuracy, own, other in (("none", 0.5, 0.2, 0.6), ("sign: sign()", 0.4, 0.7, 0.6), ("top-k", 0.45, 0.3, 0.5))
    for attack, lpips in zip(ATTACKS, (own, other), strict=True)
]


def test_rog_is_better_where_its_distance_is_lower_or_its_psnr_higher() -> None:
    found = compare_attacks(ROWS, "lpips")
    assert (found["defenses"], found["rog_better"]) == (3, 2)
    assert round(found["mean_difference"], 6) == round((-0.4 + 0.1 - 0.2) / 3, 6)
    assert compare_attacks(ROWS, "psnr")["rog_better"] == 2


def test_picture_has_a_region_for_each_attack_unless_its_points_are_on_a_line() -> None:
    drawn = draw_regions(ROWS, "lpips")
    flat = draw_regions([{**row, "accuracy": 0.5} for row in ROWS], "lpips")
    assert drawn.startswith("<svg")
    assert all(name in drawn for name in ("sign", "top-k", *ATTACKS))
    assert drawn.count("opacity: 0.15") == 2
    assert flat.count("opacity: 0.15") == 0
    assert drawn == draw_regions(ROWS, "lpips")
