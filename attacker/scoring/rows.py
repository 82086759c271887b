"""The score row: what scoring says of one true example in one case, as a typed and versioned record."""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from attacker.scoring.states import FINISHED, State, state_of
from fedsim.recording.files import read_json_lines, write_bytes

if TYPE_CHECKING:
    import pandas

FORMAT_VERSION = 1
"""Of a row; rows of earlier programs carry no version and are read as version 0."""


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One true example in one case. A measure that cannot be taken is None; so is everything of a case that still waits.

    run, source: the run, and the folder of the attack's reconstructions. data: name of the data set.
    attack, spec, seed, null, knows_defense, oracles: the attack and what it was told; null: the gradient was withheld.
    network_code, attack_code: digests of code that is not part of this project.
    model ... secure_aggregation, ranges_from: public facts of the federation. codec, rounded: packing of the update, and
    whether whole weights were sent, so that the client's rounding is in them.
    limits: what of the training no attack simulates exactly.
    case, client, state: the case, whose examples, and what became of it, see `states.State`.
    rounds, batch, position, index: rounds of the case in which the example was used, its place at the first use, and its index in
    the data set. rounds_claimed, link_correct: the rounds that the attack says it was in, and whether it was in all of these.
    iterations ... interrupted, notes, surplus: effort and remarks of the case's answer; candidates that were left out.
    mse ... categorical_right: distances; `mse_raw` before clamping. flat: whether the original is nearly of one colour.
    lpips_net, lpips_reason: the network of LPIPS, or why there is none.
    success, failure: whether the example counts as recovered; why there is no reconstruction.
    rank, gallery, rank_share, chance, case_chance: re-identification, see `Gallery.compare`.
    label_true, label_recovered, label_success: labels, and whether the true one was read; names beside them.
    confidence, explained: as in `Reconstruction`, None where undecided. pair: file of original and reconstruction, below the run.
    constant: scores of the best constant image, which stand in for a missing answer. environment: versions, machine, commit.
    """

    run: str = ""
    source: str = ""
    attack: str = ""
    spec: str = ""
    null: bool = False
    knows_defense: bool = True
    oracles: tuple[str, ...] = ()
    seed: int = 0
    network_code: str = ""
    attack_code: str = ""
    model: str = ""
    defense: str = ""
    gradient: str = "plain"
    network: str = ""
    inputs: str = ""
    secure_aggregation: Mapping[str, Any] | bool = False
    ranges_from: str = ""
    limits: tuple[str, ...] = ()
    data: str = ""
    case: str
    state: State = "done"
    client: str = ""
    codec: str | None = None
    rounded: bool = False
    iterations: int | None = None
    evaluations: int | None = None
    restarts: int | None = None
    seconds: float | None = None
    route: str | None = None
    interrupted: bool | None = None
    notes: tuple[str, ...] | None = None
    surplus: int | None = None
    rounds: tuple[int, ...] = ()
    batch: int = 1
    position: int = 0
    index: int
    rounds_claimed: tuple[int, ...] | None = None
    link_correct: bool | None = None
    label_true: int | None = None
    label_true_name: str | None = None
    label_recovered: int | None = None
    label_recovered_name: str | None = None
    label_success: bool | None = None
    mse: float | None = None
    mse_raw: float | None = None
    psnr: float | None = None
    ssim: float | None = None
    ssim_global: float | None = None
    lpips: float | None = None
    lpips_net: str | None = None
    lpips_reason: str | None = None
    continuous_error: float | None = None
    categorical_right: float | None = None
    flat: bool | None = None
    success: bool | None = None
    failure: str | None = None
    rank: int | None = None
    gallery: int | None = None
    rank_share: float | None = None
    chance: float | None = None
    case_chance: float | None = None
    confidence: float | None = None
    explained: float | None = None
    pair: str | None = None
    constant: Mapping[str, float] | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether the attack on its case came to its end: shares and means are of these rows alone."""
        return self.state in FINISHED

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the version of the format."""
        values = {name: getattr(self, name) for name in NAMES}
        return {"version": FORMAT_VERSION, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ScoreRow":
        """Read what `to_dict` gives, or a row of an earlier program. Keys that are no field are left aside.

        Raises ValueError, naming the field, where a value is of another type, or the row is of a later version.
        """
        version = values.get("version", 0)
        if type(version) is not int or version > FORMAT_VERSION:
            known = f"this program reads up to {FORMAT_VERSION}; install a newer one"
            raise ValueError(f"score row of version {version!r}, and {known}")
        try:
            return _adapter().validate_python({**values, "state": state_of(values)})
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise ValueError(f"score row: {where}: {problem['msg']}, got {problem['input']!r:.200}") from None

    def flat_values(self) -> dict[str, Any]:
        """Return one plain value for each column of a table: mappings spread out, sequences joined by "; "."""
        found: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if name in ("environment", "constant"):
                found |= {f"{name}.{key}": inner for key, inner in (value or {}).items()}
            elif isinstance(value, list):
                found[name] = "; ".join(map(str, value))
            else:
                found[name] = json.dumps(value) if isinstance(value, dict) else value
        return found


NAMES: tuple[str, ...] = tuple(one.name for one in fields(ScoreRow))


@cache
def _adapter() -> TypeAdapter[ScoreRow]:
    return TypeAdapter(ScoreRow)


def read_rows(path: Path) -> list[ScoreRow]:
    """Read a file of score rows, as `attacker score` writes it; none where it does not exist.

    Raises ValueError, naming the file, where a line is no score row.
    """
    try:
        return [ScoreRow.from_dict(line) for line in read_json_lines(path)]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; score again") from None


def write_csv(rows: Iterable[ScoreRow], path: Path) -> None:
    """Write rows as CSV with a header; see `ScoreRow.flat_values`. A value that is missing is an empty cell."""
    flat = [row.flat_values() for row in rows]
    columns = list(dict.fromkeys(("version", *NAMES_OF_PLAIN, *(name for row in flat for name in row))))
    text = StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(flat)
    write_bytes(path, text.getvalue().encode())


NAMES_OF_PLAIN = tuple(name for name in NAMES if name not in ("environment", "constant"))


def to_pandas(rows: Iterable[ScoreRow]) -> "pandas.DataFrame":
    """Return rows as a table with a column for each of `ScoreRow.flat_values`. Raises ImportError without pandas."""
    return import_pandas().DataFrame([row.flat_values() for row in rows])


def import_pandas() -> Any:
    """Return the module. Raises ImportError, with the mend, where it is not installed: nothing else here needs it."""
    try:
        import pandas
    except ImportError:
        raise ImportError("pandas is not installed: pip install pandas; rows are written without it as CSV or JSON") from None
    return pandas
