"""Score rows: typed and versioned records with the scores of one true example in one case.

A case is the observations that are attacked together: one round of a client, or several.
"""

import csv
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from attacker.scoring.states import FINISHED_STATES, CaseState
from fedsim.recording.files import read_json_lines, update_json_lines, write_bytes
from fedsim.recording.safe_files import DamagedFile, parse_json

if TYPE_CHECKING:
    import pandas

MAX_CHANCE = 0.01
"""Largest `chance` of an identified reconstruction, see `ScoreRow.identified`: about 1 % of reconstructions by nulls pass it."""
FORMAT_VERSION = 1
"""Format version of a row; increased whenever the meaning of a field changes."""


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """The scores of one true example, the original, in one case: one or several observations that are attacked together.

    A measure that cannot be computed is None, and so is every measure of a case that has not been attacked yet. The fields are:

    run, source: name of the run, and name of the folder of the attack's reconstructions. data: name of the data set.
    mismatch: why the update cannot be that of the true examples, see `UpdateCheck`; "" if it can be, or was not compared.
    attack, spec, seed: name of the attack, the attack with its arguments as text, and its random seed. null: whether the row is
    of the attack's null, the same attack without the client's update. knows_defense: whether the attack models the clients'
    defense. oracles: names of information that no server has and that the attack was given. withheld: names of information that
    the server has and that the attack was not given, such as "client names".
    network_code, attack_code: digests of code that is not part of this project; "" without such code.
    model, defense, secure_aggregation: public settings of the run, see `Manifest`. gradient, network, inputs: names of defenses
    that change how clients compute gradients, their network, and their examples before training. ranges_from: source of the
    ranges of table columns, see `DataSpec`. codec: lossless packing of the update for transport. rounded: whether the client sent
    whole weights, so that the update is rounded to the weights' precision. limits: sentences on properties of the local training
    that no attack simulates exactly.
    threat: class of the attacker in the threat model, a letter, and concessions: training settings that make attacks easier, see
    `attacker.scoring.threat`.
    case, client, state: key of the case, the client, and the state of the case, see `states.CaseState`.
    rounds: rounds of the case in which the example was used. batch, position: local step, from 1, and position in its batch, from
    0, of the first use. index: index of the example in the data set.
    rounds_claimed, link_correct: rounds to which the attack assigns its reconstruction of the example, and whether the example
    was used in all of them; `link_correct` is None if the attack claims at most one round.
    iterations, evaluations, restarts, seconds, route, interrupted, notes: effort, method and remarks of the attack on this case,
    see `Reconstruction`; None without a reconstruction of the case. surplus: number of reconstructed examples beyond those that
    the case can have; these, which the attack ranks lowest, were dropped before the comparison with originals.
    mse, psnr, ssim, ssim_global, lpips: errors and similarities, see `metrics`. Table rows have only `mse` of these. `mse_raw` is
    the mean squared error before the reconstruction is clamped to [0, 1]. continuous_error, categorical_right: measures of table
    rows only.
    flat: whether the original is nearly of one colour. exact_match: whether every category of a table row is right, and every
    number to 0.1 % of its range.
    bound_mse: lower bound on the expected `mse` of any attack, see `attacker.bounds`; None if it was not asked for, or no bound
    is known.
    lpips_net, lpips_reason: the backbone of LPIPS, or the reason why there is no LPIPS.
    tags_true, tags_recovered, tag_jaccard: tags that a classifier gives to the original and to the reconstruction, and the
    Jaccard similarity of both, which is 0 without a reconstruction. tagger, tag_reason: name of the tagger, or the reason why
    there are no tags. See `semantic`.
    other_success, other_psnr, other_lpips, other_categorical_right: `success`, `psnr`, `lpips` and `categorical_right` of what
    the same attack found in another client's update, see `comparison`.
    success: whether the example counts as recovered, see `metrics.is_recovered`. failure: the reason why there is no
    reconstruction; None if there is one, or the case has not been attacked yet.
    rank, gallery: rank of the original by its distance to the reconstruction, 1 for the nearest, and the number of ranked
    examples: the original and random examples of the data set. rank_share: share of these other examples that are nearer than the
    original. chance: estimated upper bound on the probability that at least one of the case's reconstructions would be this near
    without any information. case_chance: estimated probability that random other examples are as near to all reconstructions of
    the case as the originals are. See `Gallery.compare`.
    label_true, label_recovered: labels of the original and of its reconstruction. label_success: whether the true label is among
    the labels recovered for the case, where each recovered label serves one original only (`comparison.match_labels`).
    label_true_name, label_recovered_name: names of the classes.
    confidence: the attack's estimate of the probability that `success` is true. explained: share of the squared norm of the
    observed gradient that the reconstruction explains. Both are None if the attack does not compute them.
    pair: file with original and reconstruction, relative to the run.
    constant: dict of the scores of the best image of one colour or of the mean table row (`Gallery.constant`), which count if
    there is no reconstruction; None if there is a reconstruction. environment: versions of packages, machine, and commit of the
    code that scored.
    """

    run: str = ""
    source: str = ""
    attack: str = ""
    spec: str = ""
    null: bool = False
    knows_defense: bool = True
    oracles: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
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
    threat: str = ""
    concessions: tuple[str, ...] = ()
    data: str = ""
    mismatch: str = ""
    case: str
    state: CaseState = "done"
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
    tags_true: tuple[str, ...] | None = None
    tags_recovered: tuple[str, ...] | None = None
    tag_jaccard: float | None = None
    tagger: str | None = None
    tag_reason: str | None = None
    continuous_error: float | None = None
    categorical_right: float | None = None
    exact_match: bool | None = None
    bound_mse: float | None = None
    flat: bool | None = None
    success: bool | None = None
    other_success: bool | None = None
    other_psnr: float | None = None
    other_lpips: float | None = None
    other_categorical_right: float | None = None
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
    def identified(self) -> bool | None:
        """Return whether `chance` is at most 1 % (`MAX_CHANCE`), so that guesses would hardly be as near to the original.

        The result is False if `failure` is not None, since there is no reconstruction then; otherwise None if `chance` is None.
        """
        return False if self.failure is not None else None if self.chance is None else self.chance <= MAX_CHANCE

    @property
    def is_finished(self) -> bool:
        """Return whether the case is done or has failed, and is neither waiting nor interrupted.

        Shares and means are over finished rows only.
        """
        return self.state in FINISHED_STATES

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a dict of plain JSON values, with the format version."""
        values = {name: getattr(self, name) for name in FIELD_NAMES}
        return {"version": FORMAT_VERSION, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ScoreRow":
        """Build a row from the output of `to_dict`. Unknown keys are ignored.

        Raises ValueError, naming the field, if a value is missing or has the wrong type, or if there is an entry `version` other
        than `FORMAT_VERSION`.
        """
        version = values.get("version", FORMAT_VERSION)
        if version != FORMAT_VERSION or type(version) is not int:
            raise ValueError(f"score row has version {version!r}, and this program reads version {FORMAT_VERSION}")
        try:
            return _get_adapter().validate_python(dict(values))
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"]))
            raise ValueError(
                f"the field {field} of a score row is invalid: {problem['msg']}, got {problem['input']!r:.200}"
            ) from None

    def flatten_values(self) -> dict[str, Any]:
        """Return a dict from the name of a table column to a plain value.

        The mappings `environment` and `constant` become one column per key, such as `environment.torch`. Other mappings become
        JSON, and sequences are joined by "; ".
        """
        flat: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if name in ("environment", "constant"):
                flat |= {f"{name}.{key}": inner for key, inner in (value or {}).items()}
            elif isinstance(value, list):
                flat[name] = "; ".join(map(str, value))
            else:
                flat[name] = json.dumps(value) if isinstance(value, dict) else value
        return flat


FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in fields(ScoreRow))


@cache
def _get_adapter() -> TypeAdapter[ScoreRow]:
    return TypeAdapter(ScoreRow)


def read_rows(path: Path) -> list[ScoreRow]:
    """Read a file of score rows, as `attacker score` writes it. Return no rows if the file does not exist.

    Raises ValueError, naming the file, if a line is not a score row. An incomplete last line is ignored.
    """
    try:
        return [ScoreRow.from_dict(line) for line in read_json_lines(path, "score again")]
    except DamagedFile:
        raise
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; score again") from None


CASE_PATTERN = re.compile(rb'"case": "([^"\\]*)"')


def replace_rows(path: Path, rows: Sequence[ScoreRow], source: str, only: Container[str] | None) -> None:
    """Write score rows to a file in place of earlier rows with the same source.

    source: name of the attack's folder. only: keys of cases; earlier rows of the source are then replaced only if they are of
    these cases, and others are kept.

    To save time, since a live run is scored after every round, only lines that may be among the rows to replace are parsed.
    Raises DamagedFile if a parsed line is not JSON.
    """
    mark = f'"source": {json.dumps(source)}'.encode()

    def is_stale(line: bytes) -> bool:
        if mark not in line:
            return False
        case = CASE_PATTERN.search(line)
        if only is not None and case is not None and case[1].decode(errors="replace") not in only:
            return False
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DamagedFile(
                path,
                f"the scores of the attack in reconstructions/{source} cannot be read: {error}; delete {path.name} and score "
                "again",
            ) from None
        return bool(isinstance(row, dict) and row.get("source") == source and (only is None or row.get("case") in only))

    update_json_lines(path, is_stale, *(row.to_dict() for row in rows))


def write_csv(rows: Iterable[ScoreRow], path: Path) -> None:
    """Write rows as CSV with a header, see `ScoreRow.flatten_values`. A missing value becomes an empty cell."""
    flat = [{name: _to_cell(value) for name, value in row.flatten_values().items()} for row in rows]
    columns = list(dict.fromkeys(("version", *NAMES_OF_PLAIN, *(name for row in flat for name in row))))
    text = StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(flat)
    write_bytes(path, text.getvalue().encode())


def _to_cell(value: Any) -> Any:
    """Return a table cell for `value`; formulas, which untrusted clients may send, get an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


NAMES_OF_PLAIN = tuple(name for name in FIELD_NAMES if name not in ("environment", "constant"))


def to_pandas(rows: Iterable[ScoreRow]) -> "pandas.DataFrame":
    """Return rows as a data frame with the columns of `ScoreRow.flatten_values`. Raises ImportError without pandas."""
    return import_pandas().DataFrame([row.flatten_values() for row in rows])


def import_pandas() -> Any:
    """Return the module pandas, an optional dependency. Raises ImportError, with advice, if it is not installed."""
    try:
        import pandas
    except ImportError:
        raise ImportError("pandas is not installed: run pip install pandas; scores can be written as CSV without it") from None
    return pandas
