"""Comparison of the settings of a sweep: leakage under the strongest attack, Pareto front, and paired tests between defenses.

A setting is one defense at one strength with one choice of training settings. A federation of it is run for each seed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from attacker.scoring.significance import adjust_for_multiple_tests, run_t_test
from attacker.scoring.statistics import MIN_INTERVAL_CLUSTERS, Estimate, estimate_share, find_clusters, mean
from attacker.sweep.federations import FederationResult
from attacker.sweep.grid import UNDEFENDED, GridFederation, SweepGrid, describe_settings

ExampleKey = tuple[int, int]
"""Seed of the federation, and index of the example in the data set."""
FAMILY_ERROR_LEVEL = 0.05
TrainingKey = tuple[int, str, int]


@dataclass(frozen=True, kw_only=True)
class AttackOnSetting:
    """The scores of one attack on one setting (a defense at one strength, with one training), over all seeds.

    rmse:      mean over examples of the root mean squared error of the reconstruction, data in [0, 1]; a small value means that
               much leaks. null_rmse: the same for the attack's null, which does not read the update.
    recovered, null_recovered: shares of recovered examples, by the attack and by its null. psnr: mean in dB; None for tables.
    specs:     the attack with its arguments, as text. The arguments are chosen on the tuning clients, for each seed; if they
               differ between seeds, there is one text for each choice.
    knows:     whether the attack has scores, and modelled the defense in every federation of the setting in which it ran.
    refused:   why the attack could not run, for the first seed where this happened; "" if it ran for all seeds. The scores are
               over the seeds for which it ran, and None if it ran for no seed.
    errors:    dict from an example (`ExampleKey`) to its RMSE. cases: dict from an example to the seed and key of its case.
    """

    name: str
    specs: tuple[str, ...]
    knows: bool
    refused: str = ""
    rmse: Estimate | None = None
    null_rmse: float | None = None
    recovered: Estimate | None = None
    null_recovered: float | None = None
    psnr: float | None = None
    errors: Mapping[ExampleKey, float]
    cases: Mapping[ExampleKey, str]


@dataclass(frozen=True, kw_only=True)
class SettingResult:
    """The results of one setting: one defense at one strength with one choice of training settings, over all seeds.

    training:  batch size, local work and rounds. settings: what the defense sets, as text.
    strength:  position in the defense's list of strengths, from 1; 0 without a defense.
    accuracy, loss, bytes_up: means over the federations counted in `finished`. epsilon: the largest one of these federations;
               None if one of them has an infinite epsilon or none, or if there are no such federations.
    finished, seeds: number of federations that finished without failing, and of all federations of the setting. failed: why a
               federation failed, or "".
    attacks:   dict from an attack's name to its scores.
    strongest: name of the attack with the smallest mean RMSE, by which the setting is judged; "" if no attack has scores.
    audited:   whether `AttackOnSetting.knows` is true for at least one attack; without a defense, whether any attack has scores.
    on_front:  whether the setting is audited, its accuracy is known, and no other audited setting of the same training with a
               known accuracy dominates it. To dominate means to be at least as good in accuracy and in the RMSE of the strongest
               attack, and better in one of the two.
    """

    training: TrainingKey
    defense: str
    strength: int
    settings: str
    finished: int
    seeds: int
    failed: str = ""
    accuracy: float | None = None
    loss: float | None = None
    bytes_up: float | None = None
    epsilon: float | None = None
    attacks: Mapping[str, AttackOnSetting]
    strongest: str = ""
    audited: bool = False
    on_front: bool = False

    @property
    def name(self) -> str:
        """Defense and strength as text, such as "clipping 2"; without a defense, "none"."""
        return self.defense if self.defense == UNDEFENDED else f"{self.defense} {self.strength}"

    @property
    def leak(self) -> AttackOnSetting | None:
        """The scores of the strongest attack; None if no attack has scores."""
        return self.attacks.get(self.strongest)


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """A comparison of the winner (see `compare_settings`) with another setting, by RMSE on the examples attacked in both.

    difference: mean over examples of the RMSE for the winner minus the RMSE for the other setting, each under its strongest
    attack; positive if less leaks under the winner. The level of its interval is 1 - 0.05 / number of comparisons of the training
    (Bonferroni).
    adjusted:   two-sided p-value, adjusted for the number of comparisons (Holm 1979); None if the examples form fewer than
    `MIN_INTERVAL_CLUSTERS` clusters of examples that were attacked together.
    """

    winner: SettingResult
    other: SettingResult
    difference: Estimate
    adjusted: float | None


def compare_settings(
    grid: SweepGrid, results: Iterable[tuple[GridFederation, FederationResult | None]]
) -> tuple[list[SettingResult], list[PairedComparison]]:
    """Return the results of all settings, and for each training the comparisons of its winner with the other acceptable settings.

    A setting without an attacked example in common with the winner is not compared.
    results: each federation with its result; None if it is not finished. Settings are returned in the order of their first
    federation in `results`.
    A setting is acceptable if it is audited, its accuracy is known, and this accuracy is at most `grid.max_accuracy_loss` below
    the accuracy of the undefended setting of the same training. If the undefended accuracy is not known, every known accuracy is
    acceptable. The winner is the acceptable setting with the highest RMSE under its strongest attack.
    """
    groups: dict[tuple[TrainingKey, str, int], list[tuple[GridFederation, FederationResult | None]]] = {}
    for federation, result in results:
        groups.setdefault((federation.training, federation.defense, federation.strength), []).append((federation, result))
    summaries = [_summarise(group) for group in groups.values()]
    settings = [
        replace(setting, on_front=_is_ranked(setting) and not any(_dominates(other, setting) for other in summaries))
        for setting in summaries
    ]
    comparisons = []
    for training in dict.fromkeys(setting.training for setting in settings):
        comparisons += _compare_with_winner(
            [setting for setting in settings if setting.training == training], grid.max_accuracy_loss
        )
    return settings, comparisons


def _summarise(group: Sequence[tuple[GridFederation, FederationResult | None]]) -> SettingResult:
    first = group[0][0]
    done = [(federation, result) for federation, result in group if result is not None and not result.failed]
    names = dict.fromkeys(name for _, result in done for name in result.attacks)
    attacks = {name: _summarise_attack(name, done) for name in names}
    scored = [attack for attack in attacks.values() if attack.rmse is not None]
    strongest = min(scored, key=lambda attack: fmean(attack.errors.values()), default=None)

    def average(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    epsilons = [result.epsilon for _, result in done]
    return SettingResult(
        training=first.training,
        defense=first.defense,
        strength=first.strength,
        settings=describe_settings(first.settings),
        finished=len(done),
        seeds=len(group),
        failed=next((result.failed for _, result in group if result is not None and result.failed), ""),
        accuracy=average(result.accuracy for _, result in done),
        loss=average(result.loss for _, result in done),
        bytes_up=average(result.bytes_up for _, result in done),
        epsilon=max((epsilon for epsilon in epsilons if epsilon is not None), default=None) if None not in epsilons else None,
        attacks=attacks,
        strongest=strongest.name if strongest else "",
        audited=strongest is not None and (first.defense == UNDEFENDED or any(attack.knows for attack in scored)),
    )


def _summarise_attack(name: str, done: Sequence[tuple[GridFederation, FederationResult]]) -> AttackOnSetting:
    results = [(federation.experiment.seed, result.attacks[name]) for federation, result in done if name in result.attacks]
    rows = [
        ((seed, example["index"]), f"{seed}/{example['case']}", example)
        for seed, scores in results
        for example in scores.examples
    ]
    refused = next((scores.refused for _, scores in results if scores.refused), "")
    specs = tuple(dict.fromkeys(scores.spec for _, scores in results))
    knows = all(scores.knows for _, scores in results if not scores.refused)
    errors, cases = {key: example["rmse"] for key, _, example in rows}, {key: case for key, case, _ in rows}
    if not rows:
        return AttackOnSetting(name=name, specs=specs, knows=False, refused=refused, errors={}, cases={})
    clusters = find_clusters((key, case) for key, case, _ in rows)
    groups = [clusters[key] for key, _, _ in rows]
    quality = [example["psnr"] for _, _, example in rows if example["psnr"] is not None]
    return AttackOnSetting(
        name=name,
        specs=specs,
        knows=knows,
        refused=refused,
        rmse=mean(list(errors.values()), groups),
        null_rmse=fmean(example["null_rmse"] for _, _, example in rows),
        recovered=estimate_share([example["success"] for _, _, example in rows], groups),
        null_recovered=fmean(example["null_success"] for _, _, example in rows),
        psnr=fmean(quality) if quality else None,
        errors=errors,
        cases=cases,
    )


def _is_ranked(setting: SettingResult) -> bool:
    return setting.audited and setting.accuracy is not None


def _dominates(other: SettingResult, setting: SettingResult) -> bool:
    """Return whether `other` is at least as accurate and as protective (RMSE) as `setting`, and better in one of the two.

    A setting that is not audited, has no known accuracy, or is of another training dominates none.
    """
    if other.training != setting.training or not _is_ranked(other):
        return False
    ours, theirs = (setting.accuracy, _measure_protection(setting)), (other.accuracy, _measure_protection(other))
    return theirs != ours and all(b >= a for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None)


def _measure_protection(setting: SettingResult) -> float:
    return fmean(setting.leak.errors.values()) if setting.leak else 0.0


def _compare_with_winner(settings: Sequence[SettingResult], max_loss: float) -> list[PairedComparison]:
    """Return the comparisons of the winner among settings of one training with the other acceptable settings.

    Which setting is acceptable, and which is the winner, is defined in `compare_settings`; max_loss: largest loss of accuracy of
    an acceptable setting. Settings without an example in common with the winner are left out.
    """
    plain = next((setting.accuracy for setting in settings if setting.defense == UNDEFENDED), None)
    able = [
        setting
        for setting in settings
        if _is_ranked(setting) and (plain is None or (setting.accuracy is not None and setting.accuracy >= plain - max_loss))
    ]
    if len(able) < 2:
        return []
    winner = max(able, key=_measure_protection)
    comparisons = [
        found for other in able if other is not winner and (found := _compare_pair(winner, other, len(able) - 1)) is not None
    ]
    known = [comparison.adjusted for comparison in comparisons if comparison.adjusted is not None]
    adjusted = iter(adjust_for_multiple_tests(known))
    return [replace(comparison, adjusted=None if comparison.adjusted is None else next(adjusted)) for comparison in comparisons]


def _compare_pair(winner: SettingResult, other: SettingResult, number: int) -> PairedComparison | None:
    """Return the comparison with its p-value before adjustment, or None if no example was attacked in both settings.

    number: number of comparisons of the training, by which the error level of the interval is divided (Bonferroni).
    """
    first, second = winner.leak, other.leak
    assert first is not None  # both are audited
    assert second is not None
    shared = [key for key in first.errors if key in second.errors]
    if not shared:
        return None
    clusters = find_clusters((key, case) for setting in (first, second) for key, case in setting.cases.items())
    groups = [clusters[key] for key in shared]
    values = [first.errors[key] - second.errors[key] for key in shared]
    difference = mean(values, groups, level=1 - FAMILY_ERROR_LEVEL / number)
    p = None
    if len(set(groups)) >= MIN_INTERVAL_CLUSTERS:
        p = min(1.0, 2 * min(run_t_test(values, groups), run_t_test([-value for value in values], groups)))
    return PairedComparison(winner=winner, other=other, difference=difference, adjusted=p)
