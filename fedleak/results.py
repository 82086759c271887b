"""Result of an attack, with a table and a picture for notebooks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from attacker.attacks import AttackSpec
from attacker.reconstruction import Reconstruction
from attacker.scoring.rows import import_pandas
from fedleak import figures
from fedsim.recording import DataSpec

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ReconstructionFiles(Sequence[Reconstruction]):
    """Sequence of reconstructions on disk. Each is read every time that it is accessed."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Reconstruction: ...
    @overload
    def __getitem__(self, index: slice) -> "ReconstructionFiles": ...
    def __getitem__(self, index: int | slice) -> "Reconstruction | ReconstructionFiles":
        if isinstance(index, slice):
            return ReconstructionFiles(self.paths[index])
        return Reconstruction.read(self.paths[index])


@dataclass(frozen=True, kw_only=True, repr=False)
class AttackResult:
    """Reconstructions of an attack: a single one for observations in memory; for a recording, one for each case that has one.

    A case is the observations that are attacked together: one round of a client, or several.
    spec:   the attack with its arguments. data: what the server knows of the data: shape, number of classes, normalisation.
    failed: for a recording, dict from the key of each case that could not be attacked to the reason; for an observation that
            cannot be read, the key is a text with its round and client.
    folder: folder of the reconstructions. run: folder of the run. Both are None for observations in memory.
    """

    spec: AttackSpec
    data: DataSpec
    reconstructions: Sequence[Reconstruction]
    failed: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    run: Path | None = None

    @property
    def x(self) -> Tensor:
        """Reconstructed examples of all cases, (N, *shape), not clamped to [0, 1]."""
        found = [reconstruction.x for reconstruction in self.reconstructions]
        return torch.cat(found) if found else torch.empty(0, *self.data.shape)

    @property
    def y(self) -> Tensor:
        """Reconstructed labels of all cases, (N,) int64, in the order of `x`."""
        found = [reconstruction.y for reconstruction in self.reconstructions]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with one row for each reconstructed example. Raises ImportError without pandas.

        case, example: name of the case (the observations that were attacked together), and number of the example in it, from 0.
        label: reconstructed label.
        confidence: estimated probability that scoring counts the example as recovered; NaN if the attack gives no estimate.
        explained: share of the observed gradient's squared norm that the gradient of the reconstruction explains; NaN if unknown.
        route: the method that produced the example, such as a closed form or a search. seconds: wall time of the case. The time
        of a search of several cases at once is divided equally among the cases.
        """
        return import_pandas().DataFrame(
            [
                {
                    "case": reconstruction.case,
                    "example": i,
                    "label": int(reconstruction.y[i]),
                    "confidence": float(reconstruction.confidence[i]),
                    "explained": float("nan") if reconstruction.explained is None else float(reconstruction.explained[i]),
                    "route": reconstruction.route,
                    "seconds": reconstruction.seconds,
                }
                for reconstruction in self.reconstructions
                for i in range(len(reconstruction.x))
            ]
        )

    def plot(self, x: Tensor | None = None, *, most: int = figures.MAX_EXAMPLES) -> "Figure":
        """Draw the first `most` reconstructed examples, and above them the originals x, if given, in the given order.

        An original need not stand above its own reconstruction, since a gradient does not depend on the order of examples in the
        batch. `fedleak.score` assigns originals to reconstructions.
        Raises ImportError without Matplotlib, and ValueError if there is no reconstruction.
        """
        rows = {} if x is None else {"original": x[:most]}
        return figures.draw_grid({**rows, "reconstruction": _read_first(self, most)}, self.data)

    def __repr__(self) -> str:
        answers = f"{len(self.reconstructions)} case{'s' * (len(self.reconstructions) != 1)}"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        shape = "x".join(map(str, self.data.shape))
        return f"<AttackResult {self.spec}: {answers}{failed}, examples of {shape}>"

    def _repr_png_(self) -> bytes | None:
        return figures.to_png(self.plot()) if len(self.reconstructions) and figures.can_draw() else None

    def _repr_html_(self) -> str:
        return figures.to_html(escape(repr(self)), self._repr_png_())


def _read_first(result: AttackResult, limit: int) -> Tensor:
    """Return the first `limit` reconstructed examples, (N, *shape), reading only as many files as needed.

    Raises ValueError if there are no reconstructions.
    """
    found: list[Tensor] = []
    for reconstruction in result.reconstructions:
        found.append(reconstruction.x)
        if sum(map(len, found)) >= limit:
            break
    if not found:
        raise ValueError(
            f"there is nothing to draw, since the attack {result.spec} reconstructed none of the observations; the attribute "
            "`failed` of the result lists the reasons"
        )
    return torch.cat(found)[:limit]
