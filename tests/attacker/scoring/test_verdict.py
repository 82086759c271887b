"""Tests of the verdict on an attack compared with its null."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm

from attacker.scoring import ScoreRow, summarise
from attacker.scoring.row_pairs import PSNR_OF_8_BITS, pair_rows
from attacker.scoring.significance import (
    adjust_for_multiple_tests,
    bound_single_example,
    find_detectable_share,
    run_fisher_test,
    run_reidentification_test,
    run_sign_flip_test,
    run_t_test,
)
from attacker.scoring.verdict import Verdict, judge_attack


def rows(psnr: Sequence[float | None], *, null: bool = False, size: int = 1, **fields: Any) -> list[ScoreRow]:
    """Return one score row for each PSNR, in cases of `size` examples; None gives a failure."""
    return [
        ScoreRow.from_dict(
            {
                "run": "run",
                "source": "null" if null else "attack",
                "attack": "cpl",
                "knows_defense": True,
                "defense": "",
                "spec": "cpl() without gradient" if null else "cpl()",
                "null": null,
                "seed": 0,
                "oracles": [],
                "case": str(i // size),
                "index": i,
                "state": "done",
                "failure": "gave up" if value is None else None,
                "psnr": value,
                "mse": None if value is None else 10 ** (-value / 10),
                "success": value is not None and value >= 20.5,
                "label_success": False,
                **{key: values[i] if isinstance(values, list) else values for key, values in fields.items()},
            }
        )
        for i, value in enumerate(psnr)
    ]


def around(centre: float, count: int, seed: int, spread: float = 1.5) -> list[float]:
    return np.random.default_rng(seed).normal(centre, spread, count).tolist()


def verdict(attack: Sequence[float | None], null: Sequence[float | None], **fields: Any) -> Verdict:
    return judge_attack(rows(attack, **fields), rows(null, null=True))


def test_chances_of_independent_cases_are_combined_as_normal_scores() -> None:
    """K cases with the chance p have the sum of normal scores sqrt(K) z(p); only a positive sum of the null is subtracted."""

    def test(mine: float, its: float) -> float:
        pairs = pair_rows(
            rows([12.0] * 4, rank_share=0.1, case_chance=mine), rows([9.0] * 4, null=True, rank_share=0.5, case_chance=its)
        )
        found = run_reidentification_test(pairs, pairs.clusters)
        return float(found["p"])

    alone = norm.sf(2 * norm.isf(0.1))
    assert test(0.1, 0.5) == pytest.approx(alone)
    assert test(0.1, 0.9) == pytest.approx(alone)
    assert test(0.1, 0.2) == pytest.approx(norm.sf(2 * (norm.isf(0.1) - norm.isf(0.2))))


@pytest.mark.parametrize("seed", range(5))
def test_higher_psnr_than_the_null_is_a_partial_leak(seed: int) -> None:
    found = verdict(around(13.2, 12, seed), around(8.5, 12, 100 + seed))
    assert found.outcome == "partly leaked"
    assert [one.score for one in found.leaked] == ["psnr"]
    assert "PSNR 1" in found.words
    assert found.leaked[0].difference.low > 0


def test_categories_show_a_leak_only_beyond_those_right_in_another_clients_update() -> None:
    """A null's row of one value names no category, and noise names some by chance."""
    empty, chance, half, most = [None] * 24, [0.0, 1.0] * 12, [1.0, 0.0] * 12, [1.0] * 23 + [0.0]
    null = rows(empty, null=True, failure=None, categorical_right=0.0)

    def judge(right: list[float], **fields: list[float]) -> Verdict:
        return judge_attack(rows(empty, failure=None, categorical_right=right, **fields), null)

    assert not judge(half, other_categorical_right=chance).leaks
    assert [one.score for one in judge(most, other_categorical_right=chance).leaked] == ["categorical_right"]
    assert not judge(most).leaks  # no other client was attacked


def test_lpips_shows_a_leak_only_beyond_that_of_another_clients_update() -> None:
    """Noise brings LPIPS below that of a smooth null for any original, and its PSNR is lower than the null's."""
    noisy, smooth, apart = around(0.29, 8, 0, 0.02), around(0.52, 8, 1, 0.02), around(0.4, 8, 2, 0.02)
    psnr, null = around(10.0, 8, 3), rows(around(13.0, 8, 4), null=True, lpips=smooth)

    def judge(**fields: list[float]) -> Verdict:
        return judge_attack(rows(psnr, lpips=noisy, **fields), null)

    def list_scores(found: Verdict) -> list[str]:
        return [one.score for one in found.comparisons]

    assert not judge(other_lpips=around(0.29, 8, 5, 0.02)).leaks
    assert [one.score for one in judge(other_lpips=apart).leaked] == ["lpips"]
    assert not judge_attack(rows(psnr, lpips=noisy, other_lpips=apart), rows(around(13.0, 8, 4), null=True, lpips=noisy)).leaks
    assert "lpips" in list_scores(judge(other_lpips=apart))
    assert "lpips" not in list_scores(judge())  # no other client was attacked


def test_eight_clients_at_17_db_against_12_are_a_leak() -> None:
    """These are the values of the README's example of another app."""
    assert verdict(around(17.3, 8, 0), around(11.6, 8, 1)).outcome == "partly leaked"


@pytest.mark.parametrize("count", [1, 2, 8])
def test_one_exact_answer_gives_the_verdict_recovered(count: int) -> None:
    nothing = [0.5] * (count - 1)
    ranks = {"rank_share": [0.0, *nothing], "chance": [1e-12, *nothing], "case_chance": [1 / 401, *nothing]}
    attack = rows([60.0, *around(9, count - 1, 0)], **ranks)
    null = rows([13.0, *around(9, count - 1, 1)], null=True, rank_share=0.5, chance=0.5, case_chance=0.5)
    found = judge_attack(attack, null)
    assert found.outcome == "recovered"
    assert (found.recovered, found.examples) == (1, count)
    assert f"recovered: 1 of {count} example" in found.words


def test_exact_answers_are_recovered_although_the_null_is_near_enough_too() -> None:
    """An image of little contrast is within the threshold of a grey one; only an answer nearer than the null's counts."""
    null = rows([28.0] * 3, null=True, chance=0.4, flat=True)

    def judge(psnr: float, chance: float) -> str:
        return judge_attack(rows([psnr, psnr + 0.5, psnr - 0.5], chance=chance, flat=True), null).outcome

    assert judge(57.0, 1e-20) == "recovered"
    assert judge(25.0, 1e-20) == "partly leaked"
    assert judge(28.0, 0.4) == "not distinguishable from the null at this sample"
    same = [replace(row, chance=1e-20) for row in null]
    assert judge_attack(rows([29.0, 28.0, 28.1], chance=1e-20), same).outcome != "recovered"


def test_original_near_to_the_nulls_answer_too_is_no_leak() -> None:
    """A null's answer may be near an average original by chance, so that attack and null both rank it first."""
    one = rows([14.0], rank_share=0.0, chance=0.003, case_chance=0.003)
    same = rows([13.9], null=True, rank_share=0.0, chance=0.004, case_chance=0.004)
    assert judge_attack(one, same).outcome == "not distinguishable from the null at this sample"
    far = rows([9.0], null=True, rank_share=0.4, chance=0.4, case_chance=0.4)
    assert judge_attack(one, far).outcome == "partly leaked"


def test_verdict_states_the_smallest_detectable_difference() -> None:
    found = verdict(around(10, 12, 0), around(10, 12, 1))
    assert found.outcome == "not distinguishable from the null at this sample"
    least = found.detectable["psnr"]
    assert 1 < least < 6
    assert f"a mean difference of less than {least:.1f} dB PSNR" in found.words
    assert "12 examples in 12 independent groups" in found.words
    assert "the attack recovered 0 and the null 0" in found.words
    assert f"12 independent groups were compared; a mean difference of less than {least:.1f} dB PSNR" in found.caveat
    more = verdict(around(10, 100, 0), around(10, 100, 1)).detectable["psnr"]
    assert more < least / 2


def test_impossible_differences_are_not_stated_as_detectable() -> None:
    """Three scattered results leave the t-test no power: it would need a difference beyond the scale of the score."""
    found = verdict([38.0, 8.0, 15.0], [9.0, 8.0, 7.0], chance=0.5)
    assert found.outcome == "not distinguishable from the null at this sample"
    assert "psnr" not in found.detectable
    assert "the attack recovered 1 and the null 0; a recovered example shows a leak only if the data set holds" in found.words
    assert "so few cases show a leak only if" in verdict([13.0], [9.0], chance=0.5).words


@pytest.mark.parametrize("size", [1, 4])
def test_stated_detectable_difference_is_detected(size: int) -> None:
    missed = 0
    for seed in range(40):
        null = rows(around(10, 24, 3 * seed), null=True, size=size)
        least = judge_attack(rows(around(10, 24, 3 * seed + 1), size=size), null).detectable["psnr"]
        missed += not judge_attack(rows(around(10 + least, 24, 3 * seed + 2), size=size), null).leaks
    assert missed <= 4


def test_false_positive_rate_is_low() -> None:
    found = [verdict(around(10, 8, 2 * seed), around(10, 8, 2 * seed + 1)).leaks for seed in range(100)]
    assert sum(found) <= 10


def test_without_a_null_or_without_rows_there_is_no_verdict() -> None:
    assert judge_attack(rows([30.0]), []).words == "no verdict: no null was run on these cases"
    assert judge_attack([], []).words == "no verdict: no case is finished"
    partial = judge_attack(rows(around(10, 12, 0)), rows(around(10, 6, 1), null=True))
    assert (partial.outcome, partial.reason) == ("no verdict", "the null was run on only 6 of 12 examples")


def test_an_attack_that_failed_in_every_case_has_no_verdict() -> None:
    """A difference that may have gone unnoticed says nothing if there was no answer to compare."""
    failed = {"state": "failed", "failure": "no memory", "psnr": None, "success": False}
    null = rows(around(10, 12, 1), null=True)
    found = judge_attack([replace(row, **failed) for row in rows(around(10, 12, 0))], null)
    assert found.words == "no verdict: the attack failed in every case"
    assert (found.examples, found.recovered) == (12, 0)
    some = [replace(row, **failed) if i else row for i, row in enumerate(rows(around(10, 12, 0)))]
    assert judge_attack(some, null).outcome == "not distinguishable from the null at this sample"


def test_recovered_images_of_one_colour_are_counted_separately() -> None:
    found = judge_attack(rows([30.0] * 8, flat=[True, *[False] * 7]), rows(around(9, 8, 0), null=True))
    assert found.words.startswith("recovered: 8 of 8 examples, 1 of them nearly of one colour; the null recovered 0")


def test_one_batch_is_one_group() -> None:
    found = judge_attack(rows(around(17, 8, 0), size=8), rows(around(8, 8, 1), null=True, size=8))
    assert (found.examples, found.clusters) == (8, 1)
    assert found.outcome != "partly leaked"


def test_leaked_labels_are_found_and_oracle_labels_not_compared() -> None:
    quality, null = around(10, 8, 0), around(10, 8, 1)
    assert [one.score for one in verdict(quality, null, label_success=True).leaked] == ["label_success"]
    with_oracle = verdict(quality, null, label_success=True, oracles=[["labels"]] * 8)
    assert not with_oracle.leaks


def test_failure_has_the_psnr_of_the_null_or_of_a_constant_image() -> None:
    attack, null = rows([60.0, None, None, 14.0]), rows([10.0, 9.0, None, 10.0], null=True)
    attack = [replace(row, constant={"psnr": 7.0, "mse": 0.2}) for row in attack]
    (summary,) = summarise([*attack, *null])
    assert summary.psnr.count == 4
    assert summary.psnr.value == pytest.approx((PSNR_OF_8_BITS + 9 + 7 + 14) / 4)
    assert summary.psnr.median == pytest.approx(11.5)


def test_the_null_of_an_attack_models_the_defense_if_the_attack_does() -> None:
    attacks = [replace(row, source=f"attack-{knows}", knows_defense=knows) for knows in (False, True) for row in rows([60.0])]
    nulls = [
        replace(row, source=f"null-{knows}", knows_defense=knows) for knows in (True, False) for row in rows([9.0], null=True)
    ]
    found = {one.source: one.null.source for one in summarise([*attacks, *nulls]) if one.null is not None}
    assert found == {"attack-False": "null-False", "attack-True": "null-True"}


def test_psnr_is_limited_in_means() -> None:
    (summary,) = summarise(rows([120.0, 10.0, 10.0, 10.0]))
    assert summary.psnr.value == pytest.approx((PSNR_OF_8_BITS + 30) / 4)
    assert (summary.psnr.p10, summary.psnr.median) == (10, 10)


def test_rows_without_chances_are_summarised_without_a_verdict() -> None:
    """A data set that is no larger than a case has no other examples."""
    attack, null = rows([120.0, 10.0]), rows([9.0, 9.5], null=True)
    (summary,) = summarise([*attack, *null])
    assert "no other examples" in summary.verdict.reason
    json_of = summary.to_json()
    assert json_of["verdict"]["words"].startswith("no verdict")
    assert json_of["null"]["psnr"]["median"] == pytest.approx(9.25)


def test_p_values_by_hand() -> None:
    assert adjust_for_multiple_tests([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert run_sign_flip_test([1, 1, 1, 1, 0], range(5)) == 1 / 16
    assert run_sign_flip_test([-1, 1], range(2)) == 0.75
    assert run_fisher_test([1, 1, 1, 1], [0, 0, 0, 0]) == pytest.approx(1 / 70)
    assert run_fisher_test([1, 0, 0], [1, 1, 0]) == pytest.approx(19 / 20)
    assert run_t_test([1.0, 2.0, 3.0, 4.0], "abcd") == pytest.approx(0.01519, abs=1e-4)


@pytest.mark.parametrize(
    ("mine", "its", "chances", "expected"),
    [
        ([30.0], [30.0], (0.01, 0.1), 0.1),  # the null is near to this original, too
        ([30.0], [9.0], (0.01, 0.1), 0.01),  # only the attack recovers it
        ([9.0], [9.0], (0.01, 0.1), 0.1),
        ([9.0], [9.0], (0.01, 0.001), 1.0),
        ([30.0, 30.0, 30.0], [9.0, 9.0, 9.0], (0.01, 0.1), 0.03),
    ],
)
def test_chance_of_a_single_example_is_divided_by_that_of_the_null(
    mine: list[float], its: list[float], chances: tuple[float, float], expected: float
) -> None:
    found = bound_single_example(pair_rows(rows(mine, chance=chances[0]), rows(its, null=True, chance=chances[1])))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("null", [0.1, 0.4])
def test_stated_detectable_share_is_detected_by_the_sign_test(null: float) -> None:
    count, level = 60, 0.05
    difference = find_detectable_share(null, 10**6, count, level)
    assert difference is not None
    rng = np.random.default_rng(0)

    def measure_power(share: float) -> float:
        mine, its = rng.random((4000, count)) < share, rng.random((4000, count)) < null
        more, less = (mine & ~its).sum(axis=1), (its & ~mine).sum(axis=1)
        return float(np.mean(binom.sf(more - 1, more + less, 0.5) <= level))

    step = (1 - null) / 40
    assert measure_power(null + difference) > 0.94
    assert measure_power(null + difference - step) < 0.96
