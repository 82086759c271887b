"""Tests of experiment files: unknown keys and wrong values are refused with the name of the file and of the key."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedsim import data as datasets
from fedsim.config.experiment import Experiment, ExperimentError, NamedSetting, _override, read, validate
from fedsim.recording.selection import parse_rounds

ROOT = Path(__file__).parents[3]

COMPLETE = """
seed = 0
rounds = 8
model = "lenet_cpl"
data = { name = "photos", size = 32 }
partition = { name = "dirichlet", alpha = 0.5 }
clients = { count = 8, fraction = 1.0 }
strategy = { name = "FedAvg" }
training = { learning_rate = 0.01, batch_size = 1, steps = 1, momentum = 0.0, loss = "cross_entropy", mode = "eval", buffers = "none" }
defense = "clip(1) | gaussian(0.1)"
gradient = "plain"
network = ""
inputs = ""
secure_aggregation = false
privacy = { delta = 1e-5, prior = 0.01 }
record = { rounds = "1-8", clients = "all" }
"""  # noqa: E501 - as documented

SMALL = """
rounds = 1
model = "mlp"
data = "digits"
clients = { count = 2 }
training = { learning_rate = 0.1, batch_size = 1, steps = 1 }
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_the_complete_example_is_understood(tmp_path: Path) -> None:
    (tmp_path / "complete.toml").write_text(COMPLETE)
    e = read(tmp_path / "complete.toml")
    assert (e.seed, e.rounds, e.clients.count, e.clients.fraction) == (0, 8, 8, 1.0)
    assert (e.model, e.data) == (NamedSetting(name="lenet_cpl"), NamedSetting.model_validate({"name": "photos", "size": 32}))
    assert e.partition.arguments == {"alpha": 0.5}
    assert (e.training.learning_rate, e.training.batch_size, e.training.steps, e.training.epochs) == (0.01, 1, 1, None)
    assert (e.defense, e.record.rounds) == ("clip(1) | gaussian(0.1)", "1-8")
    assert set(Experiment.model_fields) == set(tomllib.loads(COMPLETE)) | {"timeout"}


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "experiments").glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_experiments_pass_all_checks(path: Path, tmp_path: Path) -> None:
    from fedsim.engine.run import FederationRun

    FederationRun(experiment=read(path), out=tmp_path / "run", device="cpu").check()
    assert not (tmp_path / "run").exists()


def test_omitted_keys_have_defaults(small: Path) -> None:
    e = read(small)
    assert (e.seed, e.partition.name, e.strategy.name, e.defense, e.record.rounds) == (0, "iid", "FedAvg", "", "all")
    assert (e.training.momentum, e.training.shuffle, e.training.mode) == (0, True, "unstated")
    assert e.state_mode() == e.model_copy(update={"training": replace(e.training, mode="eval")})


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("sede = 1", "sede: unknown key"),
        (
            "client_seed = 1",
            "client_seed: unknown key",
        ),  # the server distributes experiments, and this is a secret of the clients
        ("training.lr = 0.1", "training.lr: unknown key"),
        ("training = { learning_rate = 1, batch_size = 1, steps = 1, epochs = 2 }", "training: training needs either steps or"),
        ("training = { learning_rate = 1, batch_size = 1 }", "training: training needs either steps or epochs"),
        (
            "training = { learning_rate = 1, batch_size = 1, steps = 2, gradient_squeezing = 2 }",
            "training: give only one of steps, epochs, gradient_squeezing, got steps and gradient_squeezing",
        ),
        (
            "training = { learning_rate = 1, batch_size = 1, gradient_squeezing = 0 }",
            "training: gradient_squeezing must be a whole number of at least 1, got 0",
        ),
        ("training.batch_size = 1.5", "training.batch_size: .*got 1.5"),
        ("training.learning_rate = 'fast'", "training.learning_rate: .*got 'fast'"),
        ("training.loss = 'hinge'", "training.loss: .*'cross_entropy'.*got 'hinge'"),
        ("clients.count = 0", "clients.count: .*greater than 0, got 0"),
        ("rounds = 0", "rounds: .*got 0"),
        ("seed = -1", "seed: .*got -1"),
        ("rounds = true", "rounds: must be a number, got true"),
        ("clients.fraction = true", "clients.fraction: must be a number, got true"),
        ("training.steps = true", "training.steps must not be true or false, got true"),
        ("seed = 4294967296", "seed: .*less than 4294967296"),
        ("timeout = 0", "timeout: .*got 0"),
        (
            "gradient = 'dpsgd'",
            "gradient: unknown name 'dpsgd' in the registry defenses.gradients. Did you mean 'dp_sgd'.*plain, soteria",
        ),
        ("network = 'precode(bottleneck=0)'", "network: precode: bottleneck must be a whole number from 1 to 65536, got 0"),
        ("inputs = 'mixup'", "inputs = 'mixup' mixes the examples of a batch: training.batch_size must be at least 2, got 1"),
        ("secure_aggregation = 1", "secure_aggregation: secure_aggregation must be false, true or a table of threshold.*, got 1"),
        ("secure_aggregation = { clop = 1 }", "secure_aggregation: unknown key 'clop'; known: threshold"),
        ("model = 3", "model: this setting must be a name in quotes, or a table .*, got 3"),
        ("defense = 'clop(1)'", "unknown name 'clop'.*Did you mean 'clip'"),
        ("defense = 3", "defense: .*got 3"),
        ("record.rounds = '3-1'", "record.rounds: rounds '3-1': rounds are counted from 1"),
        ("record.rounds = '2-5'", "record.rounds = '2-5' selects none of the run's rounds; name rounds from 1 to 1"),
        ("record.rounds = true", "record.rounds: cannot read rounds 'True'"),
        ("record.clients = '../a'", r"record.clients: '\.\./a' is not a valid client name"),
        ("record.clients = 0", "record.clients: 0 clients"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_file(small: Path, line: str, key: str) -> None:
    name, _, text = line.partition(" = ")
    raw, value = tomllib.loads(SMALL), tomllib.loads(f"value = {text}")["value"]
    with pytest.raises(ExperimentError, match=rf"^override: .*{key}"):
        read(small, [(name, value)])
    _override(raw, name, value)
    small.write_text(tomli_w.dumps(raw))
    with pytest.raises(ExperimentError, match=rf"^{re.escape(str(small))}: .*{key}"):
        read(small)


def test_all_problems_are_reported_at_once(small: Path) -> None:
    with pytest.raises(ExperimentError) as refused:
        read(small, [("sede", 1), ("rounds", 0), ("clients.cuont", 2)])
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("missing", ["rounds", "model", "data", "clients", "training"])
def test_a_missing_key_is_named(missing: str) -> None:
    raw = {key: value for key, value in tomllib.loads(SMALL).items() if key != missing}
    with pytest.raises(ExperimentError, match=f"some.toml: {missing}: Field required"):
        validate(raw, source="some.toml")


@pytest.mark.parametrize("content", [b"rounds = ", b"\xff", b"[a", b"rounds = 1\nrounds = 2"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ExperimentError, match=r"bad\.toml: not a TOML file"):
        read(tmp_path / "bad.toml")


def test_a_file_that_cannot_be_read_is_named_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"none\.toml: no such file; examples are in deploy/experiments/"):
        read(tmp_path / "none.toml")
    with pytest.raises(ExperimentError, match=f"^{tmp_path} is not a regular file; copy its content into one$"):
        read(tmp_path)
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(ExperimentError, match=r"deep\.toml: not a TOML file: it is nested too deeply; settings have only"):
        read(tmp_path / "deep.toml")
    with pytest.raises(NotADirectoryError):  # the command line adds the path and advice
        read(tmp_path / "deep.toml" / "e.toml")


def test_an_experiment_is_frozen(small: Path) -> None:
    with pytest.raises(ValidationError):
        read(small).rounds = 3


# --- overrides ---


@pytest.mark.parametrize(
    ("overrides", "where", "value"),
    [
        ([("rounds", 5)], "rounds", 5),
        ([("training.learning_rate", 2.5)], "training.learning_rate", 2.5),
        ([("clients.fraction", 0.5)], "clients.fraction", 0.5),
        ([("record.rounds", "1-2")], "record.rounds", "1-2"),
        ([("record.rounds", 1)], "record.rounds", "1"),  # as `--set record.rounds=1` reads
        ([("training.epochs", 4)], "training.epochs", 4),  # replaces steps
        ([("training.gradient_squeezing", 4)], "training.steps", 4),  # the name of steps in the CPL paper
        ([("training.gradient_squeezing", 4), ("training.steps", 2)], "training.steps", 2),
        ([("model", "lenet_dlg")], "model", NamedSetting(name="lenet_dlg")),
        ([("model.hidden", [7])], "model", NamedSetting.model_validate({"name": "mlp", "hidden": [7]})),
        ([("data", "photos"), ("data.size", 64)], "data", NamedSetting.model_validate({"name": "photos", "size": 64})),
        ([("partition.name", "dirichlet"), ("partition.alpha", 2)], "partition.arguments", {"alpha": 2}),
        ([("rounds", 5), ("rounds", 6)], "rounds", 6),
        ([("training", {"learning_rate": 1, "batch_size": 2, "epochs": 3})], "training.epochs", 3),
    ],
)
def test_overrides_reach_their_key_and_no_other(small: Path, overrides: list[tuple[str, Any]], where: str, value: Any) -> None:
    plain, changed = read(small), read(small, overrides)
    found: Any = changed
    for key in where.split("."):
        found = getattr(found, key)
    assert found == value
    top = where.split(".")[0]
    assert changed != plain
    assert changed.model_copy(update={top: getattr(plain, top)}) == plain


@pytest.mark.parametrize("key", ["rounds.deep", "a.b", "training.steps.more", "", "."])
def test_an_override_of_an_unknown_key_is_refused(small: Path, key: str) -> None:
    with pytest.raises(ExperimentError, match=r"^override: "):
        read(small, [(key, 1)])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rounds", 0, "override: rounds: Input should be greater than 0"),
        ("training.batch_size", "two", "override: training.batch_size: "),
        ("defense", "clip(0)", "override: defense = 'clip(0)': clip: max_norm must be positive"),
        ("model", "no_such_module:net", "override: model: cannot import no_such_module:net: "),
    ],
)
def test_an_error_in_an_override_does_not_name_the_file(small: Path, key: str, value: Any, words: str) -> None:
    with pytest.raises(ExperimentError, match=f"^{re.escape(words)}") as raised:
        read(small, [(key, value)], trusted=True)
    assert str(small) not in str(raised.value)
    small.write_text(small.read_text().replace("rounds = ", "rounds = -"))
    with pytest.raises(ExperimentError, match=re.escape(f"{small}: rounds: ")):  # an error in the file names the file
        read(small, [("seed", 3)])


# --- printing ---

names = st.text("abcdefgh_", min_size=1, max_size=6)
values = st.one_of(st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.booleans(), st.text(max_size=8))
named = st.one_of(
    names,
    st.dictionaries(names.filter(lambda n: n != "name"), st.one_of(values, st.lists(values, max_size=3)), max_size=3).map(
        lambda arguments: {"name": "mlp", **arguments}
    ),
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=named,
    data=named,
    seed=st.integers(0, 2**32 - 1),
    learning_rate=st.floats(1e-38, 1e38),
    length=st.sampled_from([{"steps": 3}, {"epochs": 2}]),
    fraction=st.floats(0, 1, exclude_min=True),
    record=st.sampled_from(["all", "1-3", "2,5-7"]),
)
def test_what_is_printed_reads_back_as_the_same_experiment(
    tmp_path: Path, model: Any, data: Any, seed: int, learning_rate: float, length: dict[str, int], fraction: float, record: str
) -> None:
    experiment = validate(
        {
            "rounds": 2,
            "seed": seed,
            "model": model,
            "data": data,
            "clients": {"count": 3, "fraction": fraction},
            "training": {"learning_rate": learning_rate, "batch_size": 2, **length},
            "defense": "clip(1e-3) | gaussian(0)",
            "record": {"rounds": record},
        },
        source="drawn",
    )
    (tmp_path / "printed.toml").write_text(experiment.to_toml())
    assert read(tmp_path / "printed.toml") == experiment
    assert read(tmp_path / "printed.toml").to_toml() == experiment.to_toml()


# --- rounds ---


@pytest.mark.parametrize(
    ("text", "rounds"),
    [("all", None), ("3", {3}), ("1-4", {1, 2, 3, 4}), ("1-2,7", {1, 2, 7}), (" 1 - 2 , 4 ", {1, 2, 4}), ("2-2", {2})],
)
def test_rounds_are_read(text: str, rounds: set[int] | None) -> None:
    assert parse_rounds(text) == rounds


@pytest.mark.parametrize("text", ["", "0", "0-3", "-1", "1-", "3-1", "a", "1..3", "1,,2", "1-2-3", "ALL", "1.5"])
def test_invalid_rounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rounds"):
        parse_rounds(text)


def test_ranges_and_categories_of_a_table_are_named_in_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("age,ward,y\n" + "".join(f"{20 + i},{'ns'[i % 2]},{i % 2}\n" for i in range(10)))
    known = 'ranges = { age = [0, 120] }, categories = { ward = ["n", "s", "w"] }'
    text = SMALL.replace('"digits"', f'{{ name = "csv", path = "{tmp_path / "table.csv"}", {known} }}')
    (tmp_path / "given.toml").write_text(text)
    experiment = read(tmp_path / "given.toml")
    (tmp_path / "printed.toml").write_text(experiment.to_toml())
    assert read(tmp_path / "printed.toml") == experiment
    spec = datasets.load(experiment.data.name, **experiment.data.arguments).spec
    assert (spec.ranges_from, spec.shape, spec.columns[0].high) == ("public", (4,), 120)
