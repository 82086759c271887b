"""The grid of a sweep: a TOML file, validated strictly, and expanded into federations and attacks."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attacker.attacks import AttackSpec
from attacker.attacks.base import estimate_effort
from fedsim.config import experiment as experiments
from fedsim.config.experiment import Experiment
from fedsim.recording.array_archives import read_toml

UNDEFENDED = "none"
"""Name of the federation without a defense, which every grid has as its baseline."""
Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Strength = str | dict[Literal["defense", "gradient", "network", "inputs", "secure_aggregation", "strategy"], Any]


class GridError(ValueError):
    """Error for a grid that is not valid. The message names the file, and the key if one is wrong."""


class _FrozenTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AttackedUpdates(_FrozenTable):
    """Selection of the updates that are attacked.

    rounds:  "1" or "1-5" or "all"; only these rounds are recorded. clients: largest number of clients that are reported.
    tuning_clients: number of further clients whose updates only choose the settings of the attacks.
    """

    rounds: str = "1"
    clients: Positive = 16
    tuning_clients: Annotated[int, Field(ge=0)] = 0


class _GridFile(_FrozenTable):
    experiment: Path
    seeds: list[Seed] = Field(default=[0], min_length=1)
    batch_sizes: list[Positive] | None = Field(default=None, min_length=1)
    local_steps: list[Positive] | None = Field(default=None, min_length=1)
    rounds: list[Positive] | None = Field(default=None, min_length=1)
    attacked: AttackedUpdates = AttackedUpdates()
    max_accuracy_loss: float = Field(default=0.05, ge=0, le=1)
    defenses: dict[str, list[Strength]] = Field(min_length=1)
    attacks: dict[str, dict[str, Any]] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_no_second_baseline(self) -> "_GridFile":
        if UNDEFENDED in self.defenses:
            raise ValueError(f"defenses.{UNDEFENDED}: every grid has the undefended federation as its baseline; leave it out")
        if empty := [name for name, strengths in self.defenses.items() if not strengths]:
            raise ValueError(f"defenses.{empty[0]} lists no strength; give at least one")
        return self

    @model_validator(mode="after")
    def _lists_each_value_once(self) -> "_GridFile":
        for key in ("seeds", "batch_sizes", "local_steps", "rounds"):
            values = getattr(self, key) or []
            if twice := [value for place, value in enumerate(values) if value in values[:place]]:
                raise ValueError(f"{key} lists {twice[0]} more than once; list each value once")
        return self


@dataclass(frozen=True, kw_only=True)
class GridAttack:
    """An attack of a grid. name: the name that the grid gives it.

    candidates: the attack with each of its settings; of several, the one that is best on the tuning clients is used.
    """

    name: str
    candidates: tuple[AttackSpec, ...]

    def knows(self, experiment: Experiment, spec: AttackSpec | None = None) -> bool:
        """Return whether the candidate `spec`, by default the first one, models the defense of an experiment.

        A search models the defense if its argument `knows_defense` is true, unless the experiment transforms the inputs (key
        `inputs`), which no attack models. A closed form without a search does not model it, since it uses the update as it was
        received.
        """
        spec = spec or self.candidates[0]
        return spec.knows_defense and estimate_effort(spec.build()).evaluations > 1 and not experiment.inputs


@dataclass(frozen=True, kw_only=True)
class GridFederation:
    """One federation of a grid.

    defense:  name of its defense, "none" for the baseline. strength: position in the list of strengths, from 1; 0 for the
              baseline.
    settings: the keys of the experiment that the defense sets, with their values. experiment: the whole experiment, with these
              settings.
    """

    defense: str
    strength: int
    settings: Mapping[str, Any]
    experiment: Experiment

    @property
    def training(self) -> tuple[int, str, int]:
        """Return batch size, local work as text, and number of rounds; federations with the same three are compared."""
        training = self.experiment.training
        return training.batch_size, _describe_local_work(self.experiment), self.experiment.rounds

    @property
    def name(self) -> str:
        """Return the name of the federation's folder: defense, strength, and a hash of the experiment."""
        digest = hashlib.sha256(self.experiment.to_toml().encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9_-]', '-', self.defense)}-{self.strength}-{digest}"


@dataclass(frozen=True, kw_only=True)
class SweepGrid:
    """All federations and attacks of a sweep. source: path of the grid.

    max_accuracy_loss: an acceptable defense has an accuracy at most this number, in [0, 1], below the accuracy of the undefended
    federation.
    """

    source: str
    federations: tuple[GridFederation, ...]
    attacks: tuple[GridAttack, ...]
    attacked: AttackedUpdates
    max_accuracy_loss: float

    @property
    def trials(self) -> int:
        """Return the largest number of candidates (settings to choose from) of an attack."""
        return max(len(attack.candidates) for attack in self.attacks)

    def digest(self, federation: GridFederation) -> str:
        """Return a hash of what determines a federation's results: its experiment, all attacks, and the field `attacked`."""
        attacks = {attack.name: [str(spec) for spec in attack.candidates] for attack in self.attacks}
        facts = [federation.experiment.to_toml(), attacks, self.attacked.model_dump()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _describe_local_work(experiment: Experiment) -> str:
    """Return the local work of a client in one round as text, such as "2 steps" or "1 epoch"."""
    training = experiment.training
    count, unit = (training.steps, "step") if training.steps is not None else (training.epochs or 1, "epoch")
    return f"{count} {unit}{'s' * (count != 1)}"


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as text: key=value for each, and only the value for the key `defense`; separated by commas."""
    return ", ".join(str(value) if key == "defense" else f"{key}={value}" for key, value in settings.items())


def read_grid(path: Path) -> SweepGrid:
    """Read a grid and expand it. Raises GridError if the file, its experiment, a defense or an attack is not valid.

    The path of the experiment is relative to the folder of the grid.
    """
    try:
        file = _GridFile.model_validate(read_toml(path))
    except FileNotFoundError:
        raise GridError(f"{path}: no such file; an example is deploy/grids/digits.toml") from None
    except ValidationError as error:
        raise GridError(experiments.describe_errors(error, str(path), _GridFile)) from None
    except ValueError as error:
        raise GridError(str(error)) from None
    grid = SweepGrid(
        source=str(path),
        federations=tuple(_expand_federations(path, file)),
        attacks=tuple(_read_attack(path, name, table) for name, table in file.attacks.items()),
        attacked=file.attacked,
        max_accuracy_loss=file.max_accuracy_loss,
    )
    _check_tuning(path, grid)
    return grid


def _check_tuning(path: Path, grid: SweepGrid) -> None:
    tuned = {attack.name: len(attack.candidates) for attack in grid.attacks if len(attack.candidates) > 1}
    if tuned and not grid.attacked.tuning_clients:
        raise GridError(
            f"{path}: attacked.tuning_clients is 0, but a client is needed to choose among the settings of {', '.join(tuned)}; "
            "set attacked.tuning_clients to 1, or give each attack one setting"
        )
    if len(set(tuned.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in tuned.items())
        raise GridError(f"{path}: attacks: attacks with several settings must all list the same number of them, got {counts}")


def _expand_federations(path: Path, file: _GridFile) -> Iterator[GridFederation]:
    strengths = [(UNDEFENDED, 0, dict[str, Any]())]
    for name, values in file.defenses.items():
        for place, value in enumerate(values, start=1):
            changes = {"defense": value} if isinstance(value, str) else {str(key): setting for key, setting in value.items()}
            strengths.append((name, place, changes))
    axes = {"training.batch_size": file.batch_sizes, "training.steps": file.local_steps, "rounds": file.rounds}
    varied = {key: values for key, values in axes.items() if values is not None}
    for chosen, (name, place, settings), seed in product(product(*varied.values()), strengths, file.seeds):
        overrides = [*zip(varied, chosen, strict=True), *settings.items(), ("seed", seed)]
        overrides.append(("record.rounds", file.attacked.rounds))
        try:
            experiment = experiments.read(path.parent / file.experiment, overrides, trusted=True)
        except ValueError as error:
            if name == UNDEFENDED:
                tried = f"the experiment {file.experiment}, with batch_sizes, local_steps, rounds and seeds of the grid"
            else:
                tried = f"defenses.{name}, with {describe_settings(settings)}"
            raise GridError(f"{path}: {tried}: {error}") from None
        yield GridFederation(defense=name, strength=place, settings=settings, experiment=experiment)


def _read_attack(path: Path, name: str, table: Mapping[str, Any]) -> GridAttack:
    """Return the attack of the table `attacks.NAME` of a grid; its messages name the grid's `path`. Raises GridError.

    The key `attack` is the registered name, by default `name`. `settings` is a list of tables of arguments to choose from. All
    other keys are arguments that every choice has, unless the choice replaces them.
    """
    fixed = {key: value for key, value in table.items() if key not in ("attack", "settings")}
    choices = table.get("settings", [{}])
    try:
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
            raise ValueError(f"settings must be a list of tables of arguments, got {choices!r}")
        specs = (AttackSpec(name=str(table.get("attack", name)), arguments={**fixed, **choice}) for choice in choices)
        return GridAttack(name=name, candidates=tuple(specs))
    except ValueError as error:
        raise GridError(f"{path}: attacks.{name}: {error}") from None
