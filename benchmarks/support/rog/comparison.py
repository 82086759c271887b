"""Attacks on the columns of ROG's figures 3 and 8, and how ROG followed by the enhancer compares with other attacks.

Columns are attacked in worker processes of one thread each. The images of all answers are kept in a folder.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from time import monotonic

from support.contract import Options, ResultRow, TableAndSummary, prepare_worker, read_peak_memory
from support.rog.attacks import PUBLISHED, ColumnTools, choose_scale, load_tools, make_attacks, make_case
from support.rog.columns import COLUMNS, OTHER_COLUMNS, DefendedColumn
from support.rog.outcomes import Similarity, average_similarities, share_of_labels

from attacker.attacks import Case, GradientMatching, rog
from attacker.attacks.learned.enhancer import Enhancer, equalize
from attacker.scoring.statistics import mean

RATIO_STEPS = (10, 20, 30, 40, 60)
"""Numbers of iterations with which ROG is run in the raw column, besides its default, to find the fewest that suffice."""
AIMED_GAP = 0.05
"""Largest difference from the LPIPS of the paper, at its size, that is aimed for."""


@dataclass(frozen=True)
class BatchScores:
    """Similarities of one attack's images to the originals of each batch, and its CPU-seconds for each batch.

    plain: without the enhancer. enhanced: with it. equalized: with `enhancer.equalize` instead; empty where that is not measured.
    """

    plain: list[Similarity]
    enhanced: list[Similarity]
    equalized: list[Similarity]
    cpu_seconds: list[float]

    @property
    def best(self) -> list[Similarity]:
        """The similarities with the enhancer or those without it, whichever are better in the mean over the batches."""
        is_improved = average_similarities(self.enhanced).is_better_than(average_similarities(self.plain))
        return self.enhanced if is_improved else self.plain


@dataclass(frozen=True)
class ColumnResult:
    """The rows of one column, and the scores of its attacks by name.

    summary: additional results. peak_mb: peak memory of the worker process until the end of this column.
    """

    rows: list[ResultRow]
    scores: dict[str, BatchScores]
    part: str
    summary: ResultRow = field(default_factory=dict)
    peak_mb: float = 0.0

    @property
    def is_better_than_pixels(self) -> bool | None:
        """Whether ROG with the enhancer is better than ROG's search in pixels, both without the enhancer and with it.

        Means over the batches are compared. None if that search was not measured.
        """
        return self._is_better(self.scores["ROG"].enhanced, "pixels")

    @property
    def is_not_worse_than_ig(self) -> bool | None:
        """Whether ROG with the enhancer is at least as good as Inverting Gradients, both without the enhancer and with it.

        Means over the batches are compared. None if Inverting Gradients was not measured.
        """
        return self._is_better(self.scores["ROG"].enhanced, "Inverting Gradients", or_equal=True)

    @property
    def is_long_not_worse_than_ig(self) -> bool | None:
        """Whether ROG is at least as good in the CPU time of Inverting Gradients, both without or with the enhancer.

        Of each attack, the better of both counts. Means over the batches are compared. None if one of them was not measured.
        """
        long = self.scores.get("ROG, long")
        return None if long is None else self._is_better(long.best, "Inverting Gradients", or_equal=True)

    def _is_better(self, own: Sequence[Similarity], other: str, *, or_equal: bool = False) -> bool | None:
        if other not in self.scores:
            return None
        theirs = self.scores[other].best
        return average_similarities(own).is_better_than(average_similarities(theirs), or_equal=or_equal)


def measure_columns(options: Options, columns: Sequence[DefendedColumn] = ()) -> TableAndSummary:
    """Attack every column, or the selected one; return the rows and a summary.

    columns: the columns; if there are none, those that `options` selects.
    columns_better_than_identity, columns_not_worse_than_ig, long_columns_not_worse_than_ig: numbers of columns with
    `ColumnResult.is_better_than_pixels`, `is_not_worse_than_ig` and `is_long_not_worse_than_ig`; None if only ROG was measured.
    If the first column is measured, and all attacks are, the summary includes `measure_iterations`. lpips_gap: at the published
    size, the largest difference between ROG's LPIPS with the enhancer and the paper's. columns_within_gap: number of columns
    where it is at most `AIMED_GAP`.
    peak_mb: largest peak memory of a worker process.
    Raises RuntimeError, naming the columns, if columns failed, after all others are finished.
    """
    if not columns:
        columns = COLUMNS if options.table is None else [c for c in (*COLUMNS, *OTHER_COLUMNS) if c.table == options.table]
    results = measure_in_processes(options, columns)
    rows = [row for result in results for row in result.rows]
    counted = {
        "columns_better_than_identity": [result.is_better_than_pixels for result in results],
        "columns_not_worse_than_ig": [result.is_not_worse_than_ig for result in results],
        "long_columns_not_worse_than_ig": [result.is_long_not_worse_than_ig for result in results],
    }
    summary = {name: None if None in are else sum(map(bool, are)) for name, are in counted.items()}
    summary["columns"] = len(results)
    for result in results:
        summary |= result.summary
    gaps = [row["lpips_gap"] for row in rows if row["lpips_gap"] is not None]
    others = {
        "lpips_gap": max(gaps, default=None),
        "columns_within_gap": sum(gap <= AIMED_GAP for gap in gaps) if gaps else None,
        "images": choose_scale(options).images * choose_scale(options).batches,
        "batches": choose_scale(options).batches,
        "part": results[0].part,
        "peak_mb": max(result.peak_mb for result in results),
    }
    return rows, summary | others


def measure_in_processes(options: Options, columns: Sequence[DefendedColumn]) -> list[ColumnResult]:
    """Attack columns in `options.workers` processes, the most expensive ones first; return the results in the order of `columns`.

    Progress is printed to stderr. Raises RuntimeError, naming the columns, if columns failed, after all others are finished.
    """
    started = monotonic()
    pool = ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), initializer=prepare_worker)
    try:
        order = sorted(columns, key=lambda column: -column.cost)
        futures = {pool.submit(measure_column, options, column): column for column in order}
        for count, future in enumerate(as_completed(futures), start=1):
            outcome = f"failed: {future.exception()}" if future.exception() else f"peak {future.result().peak_mb:.0f} MB"
            seconds = monotonic() - started
            line = f"{futures[future].name}: column {count} of {len(futures)} after {seconds:.0f} s, {outcome}"
            print(line, file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    done = {column.name: future for future, column in futures.items()}
    failed = [column.name for column in columns if done[column.name].exception()]
    if failed:
        raise RuntimeError(
            f"columns that failed: {'; '.join(failed)}. Run it again without --fresh, which reuses all finished attacks"
        ) from done[failed[0]].exception()
    return [done[column.name].result() for column in columns]


def measure_column(options: Options, column: DefendedColumn) -> ColumnResult:
    """Attack one column with ROG, a longer search by ROG, its search in pixels, Inverting Gradients, and nulls of two of them.

    The longer search is left out, unless there are several batches or a column is selected. If the scale does not have
    `all_attacks` and no column is selected, only ROG and its null attack. Rows hold means over the batches. The row of ROG also
    holds lpips_minus_ig, the mean over the batches of the difference between LPIPS of ROG with the enhancer and that of
    Inverting Gradients, with the enhancer or without it, whichever is better in the mean. The entries enhanced_lpips and
    lpips_minus_ig come with limits of 95 % intervals (`_low`, `_high`), which are None for few batches.
    """
    scale = choose_scale(options)
    batches = [load_tools(options, batch) for batch in range(scale.batches)]
    cases = [make_case(tools, column) for tools in batches]
    attacks = make_attacks(scale, column)
    if scale.batches == 1 and not options.table:
        attacks.pop("ROG, long")
    if not (scale.all_attacks or options.table):
        attacks = {"ROG": attacks["ROG"]}
    attacks |= {f"{name}, null": attacks[name].null() for name in ("ROG", "Inverting Gradients") if name in attacks}
    scores = {name: score_attack(attack, batches, cases, column) for name, attack in attacks.items()}
    labels = mean([share_of_labels(case, tools.y, tools.options) for tools, case in zip(batches, cases, strict=True)]).value
    rows = []
    for name, own in scores.items():
        lpips = [one.lpips for one in own.enhanced if one.lpips is not None]
        paper = column.paper if name == "ROG" else None
        at_its_size = paper is not None and scale.setting.side == PUBLISHED.setting.side
        rows.append(
            {
                "column": column.name,
                "attack": name,
                "iterations": attacks[name].search.steps,
                **asdict(average_similarities(own.plain)),
                **{f"enhanced_{key}": value for key, value in asdict(average_similarities(own.enhanced)).items()},
                **estimate_mean("enhanced_lpips", lpips),
                **(
                    {f"equalized_{k}": v for k, v in asdict(average_similarities(own.equalized)).items()} if own.equalized else {}
                ),
                **(estimate_mean("lpips_minus_ig", subtract_lpips(own, scores)) if name == "ROG" else {}),
                "labels_if_not_told": labels,
                "paper_lpips_128": paper,
                "lpips_gap": mean(lpips).value - paper if at_its_size and lpips and paper is not None else None,
                "cpu_seconds": mean(own.cpu_seconds).value,
            }
        )
    summary = measure_iterations(batches[0], cases[0]) if column == COLUMNS[0] and scale.all_attacks else {}
    return ColumnResult(rows, scores, batches[0].part, summary, read_peak_memory())


def score_attack(
    attack: GradientMatching, batches: Sequence[ColumnTools], cases: Sequence[Case], column: DefendedColumn
) -> BatchScores:
    """Attack the case of each batch, and measure the images without the enhancer, with it and, if needed, equalised."""
    scores = BatchScores([], [], [], [])
    for tools, case in zip(batches, cases, strict=True):
        answer = tools.folder.attack(attack, case, tools.x, tools.options)
        scores.plain.append(tools.measure(answer.x))
        scores.enhanced.append(tools.measure(tools.enhancer(answer.x)) if tools.enhancer else scores.plain[-1])
        if column.is_equalized:
            scores.equalized.append(tools.measure(Enhancer("equalize", equalize())(answer.x)))
        scores.cpu_seconds.append(answer.cpu_seconds)
    return scores


def subtract_lpips(compared: BatchScores, scores: dict[str, BatchScores]) -> list[float]:
    """Return LPIPS of `compared` with the enhancer minus the best of Inverting Gradients, per batch; [] if one is missing."""
    if "Inverting Gradients" not in scores:
        return []
    pairs = zip(compared.enhanced, scores["Inverting Gradients"].best, strict=True)
    return [a.lpips - b.lpips for a, b in pairs if a.lpips is not None and b.lpips is not None]


def estimate_mean(name: str, values: Sequence[float]) -> ResultRow:
    """Return the mean of values, one per batch, as `name`, with its 95 % interval as `name`_low and `name`_high.

    Values that cannot be estimated are None.
    """
    estimate = mean(values) if values else None
    low, high = (estimate.low, estimate.high) if estimate and estimate.is_interval else (None, None)
    return {name: estimate.value if estimate else None, f"{name}_low": low, f"{name}_high": high}


def measure_iterations(tools: ColumnTools, case: Case) -> ResultRow:
    """Return how many iterations ROG needs for the score of Inverting Gradients in the first column, which has no defense.

    Each ratio is the smallest number of iterations that suffices, of those tried (`RATIO_STEPS` and the default), divided by the
    number of iterations of Inverting Gradients; None if none of them suffices.
    iterations_ratio: for at least the PSNR of Inverting Gradients, both without the enhancer. iterations_ratio_lpips: for a lower
    LPIPS (a higher PSNR where there is no LPIPS), both without the enhancer. iterations_ratio_enhanced: for a lower LPIPS
    likewise, both followed by the enhancer.
    """
    baseline = make_attacks(tools.scale, COLUMNS[0])["Inverting Gradients"]
    aim = tools.folder.attack(baseline, case, tools.x, tools.options).x
    ratios: dict[str, float | None] = dict.fromkeys(("iterations_ratio", "iterations_ratio_lpips", "iterations_ratio_enhanced"))
    for steps in (*(() if tools.options.quick else RATIO_STEPS), tools.scale.steps):
        guess = tools.folder.attack(rog(steps=steps), case, tools.x, tools.options).x
        plain, enhanced = ([tools.measure(x if e is None else e(x)) for x in (guess, aim)] for e in (None, tools.enhancer))
        reached = (plain[0].psnr >= plain[1].psnr, plain[0].is_better_than(plain[1]), enhanced[0].is_better_than(enhanced[1]))
        for name, is_reached in zip(ratios, reached, strict=True):
            if is_reached and ratios[name] is None:
                ratios[name] = steps / baseline.search.steps
    return {**ratios, "iterations_of_ig": baseline.search.steps}
