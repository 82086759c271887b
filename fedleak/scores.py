"""Scores of attacks: comparison of reconstructions with the true examples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attacker.attacks import AttackSpec
from attacker.attacks.learned.perceptual import load_lpips
from attacker.replay.environment import describe_environment
from attacker.report.pairs import read_pair_tensors
from attacker.scoring import Scorer, ScoreRow, Summary, summarise, to_pandas, write_csv
from attacker.scoring.comparison import compare_examples
from attacker.scoring.measures import make_empty_measures
from attacker.scoring.score import EFFORT_FIELDS
from attacker.scoring.states import REASON_UNMATCHED
from fedleak import figures
from fedleak.federations import find_run
from fedleak.results import AttackResult
from fedsim.recording import DataSpec, Recording

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

ImagePair = tuple[Tensor, Tensor | None]
"""An original and its reconstruction, each of the shape of one example."""
RANGE_TOLERANCE = 1e-3
"""Largest distance to [0, 1] of the values of true images, which may have rounding errors of a normalisation."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoreTable:
    """Scores of attacks: one row for each attack or null (the attack without the gradient), each case and each true example.

    A case is the observations that were attacked together.
    pairs: for observations in memory, the original and its reconstruction (None if it has none) of each row, in the order of
           `rows`; empty for a recording.
    data:  what the server knows of the data: shape, number of classes, normalisation.
    run:   for a recording, the folder of its run, from which originals and reconstructions are read; None in memory.
    """

    rows: tuple[ScoreRow, ...]
    data: DataSpec
    pairs: tuple[ImagePair, ...] = ()
    run: Path | None = None

    @property
    def summaries(self) -> list[Summary]:
        """The summary of each attack, with a verdict on what leaked.

        The field `null` of a summary is the summary of the attack's null (the attack without the gradient); None if the null was
        not scored.
        """
        return summarise(self.rows)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with one row for each score row. Raises ImportError without pandas."""
        return to_pandas(self.rows)

    def to_csv(self, path: Path | str) -> None:
        """Write the score rows to the file `path` as CSV with a header. A missing value becomes an empty cell."""
        write_csv(self.rows, Path(path))

    def plot(self, *, most: int = figures.MAX_EXAMPLES) -> "Figure":
        """Draw the first `most` rows: the originals, and their reconstructions below them.

        Rows of a null are left out for a recording, and drawn like other rows for observations in memory. Raises ImportError
        without Matplotlib, and ValueError if there is no row to draw.
        """
        shown = [(row, pair) for row, pair in zip(self.rows, self._read_pairs(), strict=True) if not row.null or self.run is None]
        rows, pairs = zip(*shown[:most], strict=True) if shown else ((), ())
        captions = ["no reconstruction" if row.failure else "" if row.psnr is None else f"{row.psnr:.1f} dB" for row in rows]
        pictures = {"original": [truth for truth, _ in pairs], "reconstruction": [x for _, x in pairs]}
        return figures.draw_grid(pictures, self.data, captions)

    def _read_pairs(self) -> Sequence[ImagePair]:
        if self.run is None:
            return self.pairs
        blank = torch.zeros(self.data.shape)
        return [(blank, None) if row.pair is None else read_pair_tensors(self.run, row.pair) for row in self.rows]

    def __repr__(self) -> str:
        return f"<ScoreTable {len(self.rows)} rows: {'; '.join(map(_describe, self.summaries)) or 'nulls only'}>"

    def _repr_png_(self) -> bytes | None:
        return figures.to_png(self.plot()) if self.rows and figures.can_draw() else None

    def _repr_html_(self) -> str:
        return figures.to_html(escape(repr(self)), self._repr_png_())


def score(
    target: AttackResult | Recording,
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    truth: Sequence[Path | str] | None = None,
) -> ScoreTable:
    """Compare reconstructions with originals, and return a table of scores.

    For a recording, the rows also replace the earlier rows of these attacks in `scores.jsonl` in the folder of the run, and pairs
    of original and reconstruction are written to its folder `pairs`. Cases whose originals are not noted get no rows.
    target: the result of one attack, on observations in memory or on a recording; or a recording, to score all attacks on it
            whose reconstructions are in the folder `reconstructions` of its run.
    x, y:   for observations in memory, the true examples (N, *shape) in [0, 1] and labels (N,). Leave them out for a recording.
    truth:  for a recording, the folders in which its clients noted their true examples; by default the folder `truth` of the run.

    Raises ValueError if x and y are missing, or have wrong shapes or values, for observations in memory; for a recording, if x or
    y is given, if a folder of truth or all reconstructions are missing, or if an attack has no case whose originals are noted.
    """
    if isinstance(target, AttackResult) and target.run is None:
        if x is None or y is None:
            raise ValueError("give x and y, the examples behind the observation")
        return _score_in_memory(target, x, y)
    if x is not None or y is not None:
        raise ValueError(
            "x and y must be left out for a recording, which is compared with the examples that its clients stored in the run's "
            "folder truth, or in the folders that the argument truth names"
        )
    run = target.run if isinstance(target, AttackResult) else find_run(target)
    assert run is not None
    data = target.data if isinstance(target, AttackResult) else target.manifest.data
    folders = [Path(folder) for folder in truth or [run / "truth"]]
    if missing := next((folder for folder in folders if not folder.is_dir()), None):
        raise ValueError(f"{missing} does not exist: give truth=[FOLDER, ...], where clients noted their examples")
    if isinstance(target, AttackResult):
        sources = [target.folder] if target.folder else []
    else:
        sources = sorted(path.parent for path in (run / "reconstructions").glob("*/attack.json"))
    if not sources:
        raise ValueError(f"{run} holds no reconstructions: call fedleak.attack first")
    scorer = Scorer(run, folders)
    return ScoreTable(rows=tuple(row for source in sources for row in scorer.score(source)), data=data, run=run)


def _score_in_memory(result: AttackResult, x: Tensor, y: Tensor) -> ScoreTable:
    (reconstruction,) = result.reconstructions
    x, labels = x.detach().cpu().float(), [int(label) for label in y]
    if tuple(x.shape[1:]) != result.data.shape or len(x) != len(labels):
        shape = (len(labels), *result.data.shape)
        raise ValueError(
            f"x must have the shape {shape}, one example for each of the {len(labels)} labels in y, got {tuple(x.shape)}"
        )
    if result.data.is_image and not float((x - x.clamp(0, 1)).abs().max()) <= RANGE_TOLERANCE:  # also if NaN
        raise ValueError(
            f"x must hold the images in [0, 1], before normalisation with mean and std, got values from {float(x.min()):.3g} to "
            f"{float(x.max()):.3g}; divide 8-bit images by 255"
        )
    compared = compare_examples(reconstruction, x, labels, result.data, lpips=load_lpips(result.data))
    spec: AttackSpec = result.spec
    common = ScoreRow(
        source="memory",
        attack=spec.name,
        spec=str(spec),
        null=spec.null,
        knows_defense=spec.knows_defense,
        oracles=reconstruction.oracles,
        seed=reconstruction.seed,
        case=reconstruction.case,
        **{name: getattr(reconstruction, name) for name in EFFORT_FIELDS},
        state="interrupted" if reconstruction.interrupted else "done",
        notes=reconstruction.notes,
        surplus=compared.surplus,
        rounds=(1,),
        index=0,
        environment=describe_environment(),
    )
    rows = []
    for i, (label, fields) in enumerate(zip(labels, compared.fields, strict=True)):
        known: dict[str, Any] = {"index": i, "position": i, "label_true": label, "label_true_name": str(label)}
        known |= fields or {**make_empty_measures(REASON_UNMATCHED, result.data), "label_success": False}
        if fields is not None:
            known["label_recovered_name"] = str(fields["label_recovered"])
        rows.append(replace(common, **known))
    pairs = tuple((x[i], None if place is None else compared.x[place]) for i, place in enumerate(compared.assigned))
    return ScoreTable(rows=tuple(rows), data=result.data, pairs=pairs)


def _describe(summary: Summary) -> str:
    if summary.success is None:
        return f"{summary.spec} not finished"
    quality = f", median PSNR {summary.psnr.median:.1f} dB" if summary.psnr else ""
    share = f"{summary.spec} recovered {summary.success.value:.0%} of {summary.success.count:.0f} examples{quality}"
    return f"{share} ({summary.verdict.words})" if summary.verdict and summary.verdict.outcome != "no verdict" else share
