"""Settings of a federation: read from TOML, validated, and frozen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from defenses.gradients import GradientSpec
from defenses.inputs import InputsSpec
from defenses.networks import NetworkSpec
from defenses.registry import references, suggest_name
from defenses.spec import DefenseSpec
from fedsim.recording.array_archives import read_toml
from fedsim.recording.selection import parse_clients, parse_rounds
from fedsim.recording.training import Training
from fedsim.secagg.protocol.terms import Agreement, SecureAggregationTable

DATASETS_WITH_PATH = ("npz", "imagefolder", "csv", "part")
"""Data sets whose name may be followed by a path: `npz:train` does not name code."""
EXCLUSIVE_KEYS = ("steps", "epochs", "gradient_squeezing")
"""Mutually exclusive keys of `training`: overriding one removes the others."""


class ExperimentError(ValueError):
    """Error for a missing or invalid experiment or settings of an import.

    The message names the file, or `OVERRIDE_SOURCE` for an overridden key, and any wrong key.
    """


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the value. Raises ValueError for a boolean in place of a number, which pydantic would take for 1 or 0."""
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation in (int, float):
            raise ValueError(f"must be a number, got {str(value).lower()}")
        return value


class NamedSetting(_Frozen):
    """A name with arguments: `"mlp"`, or `{ name = "mlp", hidden = [256] }`."""

    name: str
    arguments: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            return {"name": value["name"], "arguments": {k: v for k, v in value.items() if k != "name"}}
        raise ValueError(
            'this setting must be a name in quotes, or a table with the key `name`, such as { name = "photos", size = 64 }, got '
            f"{value!r}"
        )

    def to_toml(self) -> Any:
        return {"name": self.name, **self.arguments} if self.arguments else self.name


class Clients(_Frozen):
    """Clients of a federation.

    count:    number of clients.
    fraction: share of the clients that is drawn in each round, in (0, 1], see `drawn`.
    canaries: number of pairs of examples per client for an audit. The client trains on one example of each pair, chosen by a
              secret coin. The share of coins that the audit guesses right gives a lower bound on epsilon.
    """

    count: int = Field(gt=0)
    canaries: int = Field(default=0, ge=0, le=1_000_000)
    fraction: float = Field(default=1.0, gt=0, le=1)

    @property
    def drawn(self) -> int:
        """Number of clients that are drawn in each round: the float `count * fraction` rounded down, but at least 1."""
        return max(1, int(self.count * self.fraction))


def _make_validator(parse: Callable[[str], Any]) -> Callable[[Any], str]:
    """Return a function that returns its argument as text if `parse` can read it, and raises the error of `parse` otherwise."""

    def check(value: Any) -> str:
        text = str(value)  # `--set record.rounds=3` is a number to TOML
        parse(text)
        return text

    return check


class RecordSettings(_Frozen):
    """Selection of the rounds and clients whose messages are recorded.

    rounds:  `"all"`, or rounds counted from 1, such as `"3"`, `"1-8"` or `"1-3,7"`; both ends of a range are included.
    clients: `"all"`, names separated by commas, or a number n such as `"5"`: the n clients whose first update in a recorded round
             comes in the earliest rounds; of clients with the same first round, those with the alphabetically first names. The
             same n clients are recorded in all recorded rounds.
    """

    rounds: Annotated[str, BeforeValidator(_make_validator(parse_rounds))] = "all"
    clients: Annotated[str, BeforeValidator(_make_validator(parse_clients))] = "all"


class Privacy(_Frozen):
    """Parameters of the accounting of differential privacy.

    delta: the delta of every (epsilon, delta) guarantee that the run reports: for a client, an example, and the global model.
    prior: assumed probability that an attacker who sees no message reconstructs an example. The reported upper bound on the
           probability that an attacker who sees all messages reconstructs it is computed from `prior`.
    """

    delta: float = Field(default=1e-5, gt=0, lt=1)
    prior: float = Field(default=0.01, gt=0, lt=1)


def _refuse_switches(training: Any) -> Any:
    """Return the table `training`. Raises ValueError for a boolean in place of a number, which pydantic would take for 1 or 0."""
    kinds = get_type_hints(Training)
    for key, value in training.items() if isinstance(training, dict) else ():
        if isinstance(value, bool) and kinds.get(key, bool) is not bool:
            raise ValueError(f"training.{key} must not be true or false, got {str(value).lower()}")
    return training


def _rename_squeezing(training: Any) -> Any:
    """Return the table `training` with the key `gradient_squeezing`, if it is there, renamed to `steps`.

    `gradient_squeezing` is the name in the CPL paper (Wei et al. 2020) for local steps per update.
    Raises ValueError if it is given together with another of `EXCLUSIVE_KEYS`, or is not a whole number of at least 1.
    """
    if not isinstance(training, dict) or "gradient_squeezing" not in training:
        return training
    given = [key for key in EXCLUSIVE_KEYS if key in training]
    if len(given) > 1:
        raise ValueError(f"give only one of {', '.join(EXCLUSIVE_KEYS)}, got {' and '.join(given)}")
    squeezing = training["gradient_squeezing"]
    if type(squeezing) is not int or squeezing < 1:
        raise ValueError(f"gradient_squeezing must be a whole number of at least 1, got {squeezing!r}")
    return {("steps" if key == "gradient_squeezing" else key): value for key, value in training.items()}


class Experiment(_Frozen):
    """Settings of a complete federation, as its TOML file states them.

    partition: distribution of the training examples among the clients. strategy: Flower's aggregation strategy.
    secure_aggregation: its settings; False without secure aggregation. record: rounds and clients that are recorded.
    timeout: seconds that the server waits for clients to connect before each round, and again for their replies in the round.
    defense, gradient, network, inputs: defenses of the update, the gradient's computation, the network and the training examples.
    seed: determines the data split, the clients drawn in each round, the initial weights, and the server's noise of central
          differential privacy. The clients' secrets, such as the order of their examples, do not depend on it.
    """

    seed: int = Field(default=0, ge=0, lt=2**32)
    rounds: int = Field(gt=0, le=10_000_000)
    model: NamedSetting
    data: NamedSetting
    partition: NamedSetting = NamedSetting(name="iid")
    clients: Clients
    strategy: NamedSetting = NamedSetting(name="FedAvg")
    training: Annotated[Training, BeforeValidator(_rename_squeezing), BeforeValidator(_refuse_switches)]
    defense: str = ""
    gradient: Annotated[str, AfterValidator(_make_validator(GradientSpec.parse))] = "plain"
    network: Annotated[str, AfterValidator(_make_validator(NetworkSpec.parse))] = ""
    inputs: Annotated[str, AfterValidator(_make_validator(InputsSpec.parse))] = ""
    secure_aggregation: Annotated[
        SecureAggregationTable | Literal[False], BeforeValidator(lambda value: SecureAggregationTable.parse(value) or False)
    ] = False
    privacy: Privacy = Privacy()
    record: RecordSettings = RecordSettings()
    timeout: float = Field(default=3600.0, gt=0)

    @model_validator(mode="after")
    def _check_defense(self) -> "Experiment":
        try:
            self.parse_defense()
        except ValueError as error:
            raise ValueError(f"defense = {self.defense!r}: {error}") from None
        return self

    def parse_defense(self) -> DefenseSpec:
        """Return the clients' defense; parts that need a learning rate and state none get `training.learning_rate`."""
        return DefenseSpec.parse(self.defense, learning_rate=self.training.learning_rate)

    def state_mode(self) -> "Experiment":
        """Return the experiment with `training.mode` filled in: "eval" if none is given. The network is not checked."""
        if self.training.mode != "unstated":
            return self
        return self.model_copy(update={"training": replace(self.training, mode="eval")})

    @model_validator(mode="after")
    def _check_training(self) -> "Experiment":
        """Raise ValueError if a field of `Training` is set that an experiment's clients do not implement, such as `accumulation`.

        A field is set if its value is not the default. Such fields only describe recordings that other Flower apps made.
        """
        training, plain = self.training, {field.name: field.default for field in fields(Training)}
        for key in ("accumulation", "round_decay", "frozen", "precision", "augmentation", "examples"):
            if getattr(training, key) != plain[key]:
                raise ValueError(
                    f"training.{key} = {getattr(training, key)!r} is not implemented by the clients of an experiment; it only "
                    "describes recordings that other Flower apps made. Leave it out"
                )
        return self

    @model_validator(mode="after")
    def _check_inputs(self) -> "Experiment":
        mixing = InputsSpec.parse(self.inputs).build()
        if mixing is not None and self.training.batch_size < mixing.min_batch_size:
            raise ValueError(
                f"inputs = {self.inputs!r} mixes the examples of a batch: training.batch_size must be at least "
                f"{mixing.min_batch_size}, got {self.training.batch_size}; raise it, or set inputs = ''"
            )
        return self

    @model_validator(mode="after")
    def _check_secure_aggregation(self) -> "Experiment":
        self.settle_agreement()
        return self

    def settle_agreement(self) -> Agreement | None:
        """Return the settings of secure aggregation with all defaults filled in; None without secure aggregation.

        Raises ValueError for settings that secure aggregation rules out, see `SecureAggregationTable.settle`.
        """
        terms, strategy = self.secure_aggregation, self.strategy
        if not terms:
            return None
        central = "central" in strategy.arguments
        return terms.settle(clients=self.clients.drawn, training=self.training, strategy=strategy.name, central=central)

    @model_validator(mode="after")
    def _check_record(self) -> "Experiment":
        wanted = parse_rounds(self.record.rounds)
        if wanted is not None and wanted.ranges[0].start > self.rounds:
            raise ValueError(
                f"record.rounds = {self.record.rounds!r} selects none of the run's rounds; name rounds from 1 to {self.rounds}"
            )
        return self

    def to_toml(self) -> str:
        """Return TOML text from which `read` gives an equal experiment."""
        tables = {
            key: value.to_toml() if isinstance(value, NamedSetting) else self.model_dump(exclude_none=True)[key]
            for key, value in ((key, getattr(self, key)) for key in type(self).model_fields)
        }
        if self.training.mode == "unstated":
            del tables["training"]["mode"]
        return tomli_w.dumps(tables)


OVERRIDE_SOURCE = "override"
"""What messages name instead of the file for a key that the command line or the caller changed."""
CODE_KEYS = ("model", "data", "partition", "defense", "gradient", "network", "inputs")
"""Keys that may name code as `module:function`."""


def read(path: Path, overrides: Sequence[tuple[str, Any]] = (), *, trusted: bool = False) -> Experiment:
    """Read an experiment from a TOML file.

    overrides: pairs (key, value) that replace values of the file, with dots between the keys of tables: "clients.count".
    trusted:   whether the local user wrote or named the file. If so, code that it names as `module:function` is imported and
               allowed. If not, nothing is imported, and such a name is an error, here or when it is used, unless the user allowed
               it before, for example with --code.

    Raises ExperimentError for a missing file, a file that is not TOML, unknown keys, wrong values, and code that cannot be
    imported. The message names the file and any wrong key; for an overridden key it names `OVERRIDE_SOURCE` instead of the file.
    """
    try:
        raw = read_toml(path)
    except FileNotFoundError:
        raise ExperimentError(f"{path}: no such file; examples are in deploy/experiments/") from None
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    for key, value in overrides:
        _override(raw, key, value)
    changed = tuple(key for key, _ in overrides)
    for key in (key for key in CODE_KEYS if trusted and key in raw):
        try:
            admit_code({key: raw[key]})
        except ValueError as error:
            raise ExperimentError(f"{_find_source(key, str(path), changed)}: {key}: {error}") from None
    return validate(raw, source=str(path), changed=changed)


def _find_source(key: str, source: str, changed: Sequence[str]) -> str:
    """Return `OVERRIDE_SOURCE` if the key, a table around it or a key below it is among the `changed` ones, else `source`."""
    near = any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in changed)
    return OVERRIDE_SOURCE if near else source


def admit_code(raw: Mapping[str, Any]) -> None:
    """Import and allow the code that the local user's own experiment names as `module:function`.

    raw: the experiment as parsed TOML. Raises ValueError if an import fails.
    """
    for key in ("model", "data", "partition"):
        value = raw.get(key)
        name = value.get("name") if isinstance(value, Mapping) else value
        built_in = key == "data" and isinstance(name, str) and name.partition(":")[0] in DATASETS_WITH_PATH
        if isinstance(name, str) and references.is_reference(name) and not built_in:
            references.admit(name)
    for key in ("defense", "gradient", "network", "inputs"):
        for reference in references.find_references(str(raw.get(key, ""))):
            references.admit(reference)


def validate(raw: dict[str, Any], *, source: str, changed: Sequence[str] = ()) -> Experiment:
    """Return an experiment from parsed TOML.

    source: the file, for messages. changed: overridden keys, for which messages name `OVERRIDE_SOURCE` instead of the file.
    Raises ExperimentError, naming the source and the key, for unknown or missing keys and wrong values.
    """
    try:
        return Experiment.model_validate(raw)
    except ValidationError as error:
        raise ExperimentError(describe_errors(error, source, Experiment, changed)) from None


def describe_errors(error: ValidationError, source: str, model: type, changed: Sequence[str] = ()) -> str:
    """Return the validation errors of a `model` as text, one line per error, each naming `source` and the key.

    changed: overridden keys, for which `OVERRIDE_SOURCE` is named instead.
    """
    lines = []
    for problem in error.errors():
        key, message = ".".join(map(str, problem["loc"])), _describe_error(problem, model)
        # the message begins with the key, as in "defense = 'clip(0)': ..."
        about = key if problem["loc"] else message.partition(" = ")[0]
        lines.append(f"{_find_source(about, source, changed)}: {key or 'file'}: {message}")
    return "\n".join(lines).replace(f"{OVERRIDE_SOURCE}: file: ", f"{OVERRIDE_SOURCE}: ")


def _describe_error(error: Any, model: type) -> str:
    """Return one validation error as text; for an unknown key, with the most similar known key, if any."""
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        *tables, key = map(str, error["loc"])
        return f"unknown key{(hint := suggest_name(key, _find_keys(model, tables))) and '.'}{hint}"
    message = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    return message if isinstance(given, dict) or error["type"] == "value_error" else f"{message}, got {given!r}"


def _find_keys(model: Any, tables: Sequence[str]) -> list[str]:
    """Return the keys of the table at the path `tables` below `model`; empty if this is not a table with fixed keys."""
    for table in tables:
        field = getattr(model, "model_fields", {}).get(table)
        model = field.annotation if field is not None else None
    if is_dataclass(model):
        return [field.name for field in fields(model)]
    return list(getattr(model, "model_fields", ()))


def _override(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a key of parsed TOML in place. Dots separate the keys of tables.

    A new value of one of `EXCLUSIVE_KEYS` removes the other ones. If `raw` has a name in place of a table on the way to the key,
    such as model = "mlp" for the key "model.hidden", the name becomes a table with the key `name`; true or false becomes an empty
    table.
    """
    *tables, last = key.split(".")
    field = Experiment.model_fields.get(tables[0]) if tables else None
    if field is not None and isinstance(field.default, NamedSetting):
        raw.setdefault(tables[0], field.default.to_toml())
    for table in tables:
        inner = raw.get(table, {})
        raw[table] = inner if isinstance(inner, dict) else {} if isinstance(inner, bool) else {"name": inner}
        raw = raw[table]
    if last in EXCLUSIVE_KEYS and value != raw.get(last):
        for other in EXCLUSIVE_KEYS:
            raw.pop(other, None)
    raw[last] = value
