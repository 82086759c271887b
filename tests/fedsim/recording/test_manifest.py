"""Tests of the manifest, which describes a recording: it is read as it was written, and errors name the wrong key."""

import copy
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from defenses import DefenseSpec
from fedsim.recording import Column, DataSpec, Manifest, ModelSpec, Training
from fedsim.recording.safe_files import UNPRINTABLE_PATTERN

TABLE = DataSpec(
    shape=(2,),
    num_classes=3,
    columns=(Column(name="age", low=0.5, high=99.25), Column(name="colour", kind="categorical", high=3)),
)


def write_manifest(manifest: Manifest, folder: Path) -> Path:
    manifest.write(folder / "manifest.json")
    return folder / "manifest.json"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": TABLE, "model": ModelSpec(name="lenet_dlg"), "defense": DefenseSpec()},
        {"training": Training(learning_rate=1e-7, batch_size=3, epochs=2, weight_decay=0.1, shuffle=False, drop_last=True)},
        {"software": {}, "created": "", "name": "näme"},
        {
            "model": ModelSpec(name="mlp", network="precode(bottleneck=3)"),
            "gradient": "dp_sgd(noise=0.5)",
            "inputs": 'instahide(k=3, public="x")',
        },
    ],
)
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest, tmp_path: Path, changes: dict[str, Any]) -> None:
    given_ = replace(manifest, **changes)
    assert Manifest.read(write_manifest(given_, tmp_path)) == given_


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    learning_rate=st.floats(1e-38, 1e38),
    mean=st.lists(st.floats(-1e10, 1e10), min_size=3, max_size=3),
    clip=st.floats(0, 1e300, exclude_min=True),
)
def test_numbers_read_back_exactly(
    manifest: Manifest, tmp_path: Path, learning_rate: float, mean: list[float], clip: float
) -> None:
    given_ = replace(
        manifest,
        training=Training(learning_rate=learning_rate, batch_size=1, steps=1),
        data=replace(manifest.data, mean=tuple(mean)),
        defense=DefenseSpec.parse(f"clip({clip!r})"),
    )
    assert Manifest.read(write_manifest(given_, tmp_path)) == given_


def test_a_manifest_is_plain_json_with_a_version_and_no_secrets(manifest: Manifest, tmp_path: Path) -> None:
    raw = json.loads(write_manifest(manifest, tmp_path).read_text())
    assert raw["format_version"] == 3
    assert raw["defense"] == "clip(4.5) | gaussian(0.1)"
    assert not {"seed", "client_seed", "partition", "secret", "path"} & set(raw)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (("format_version",), 4, "format version 4, but this program reads version 3; install a newer one"),
        (("format_version",), 2, "format version 2, but this program reads version 3; run the federation again"),
        (("format_version",), "3", "format version '3'"),
        (("format_version",), [3], r"format version \[3\]"),
        (("surprise",), 1, r"Manifest has unknown keys, \['surprise'\]"),
        (("training", "lr"), 1, r"Manifest.training has unknown keys, \['lr'\]"),
        (("training", "batch_size"), 0, "batch_size must be positive, got 0"),
        (("training", "learning_rate"), "fast", "manifest.json"),
        (("defense",), "clop(1)", "'clop'"),
        (("model",), None, "manifest.json"),
        (("data",), 3, "Manifest.data must be a JSON object, got 3"),
        (("name",), 3, "Manifest.name must be of type str, got 3"),
        (("name",), "a\x1b[2J", "not printable"),
        (("name",), "\ud800", "not printable"),
        (("name",), "a" * 20_000, "over 10000 characters"),
        (("secure_aggregation",), 1, "secure_aggregation must be of type Mapping, got 1"),
        (("secure_aggregation",), {"clip": 10**30}, "secure_aggregation: an integer must be at most"),
        (("software",), ["torch"], "software"),
        (("software",), {"torch": 2}, "software must be of type str, got 2"),
        (("training", "batch_size"), 2.5, "batch_size must be of type int, got 2.5"),
        (("training", "batch_size"), 10**30, "batch_size: an integer must be at most"),
        (("data", "shape"), [3, 2.0, 2], "shape must be of type int, got 2.0"),
        (("data", "shape"), 3, "shape must be of type"),
        (("data", "shape"), [3, 10**6, 10**6], r"data of shape \(3, 1000000, 1000000\) with 4 classes exceed the limits"),
        (("data", "num_classes"), 10**9, "1000000000 classes exceed the limits"),
        (("model", "arguments"), [1], "arguments must be of type"),
        (("model", "arguments"), {"hidden": [1, [10**20]]}, "arguments: an integer must be at most"),
    ],
)
def test_unknown_keys_and_wrong_values_are_refused_and_named(
    manifest: Manifest, tmp_path: Path, at: tuple[str, ...], value: Any, words: str
) -> None:
    path = write_manifest(manifest, tmp_path)
    raw = json.loads(path.read_text())
    inner = raw
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=words) as refused:
        Manifest.read(path)
    assert str(path) in str(refused.value)


STEERING = ("\x1b[2J", "a\nb", "a\rb", "\0", "\x7f", "\x9b1m", "\u2028", "\ud800", "x" * 10_001)
FULL = {
    "data": replace(TABLE, ranges_from="held_out"),
    "model": ModelSpec(name="mlp", arguments={"hidden": [4], "note": {"inner": ["text"]}}, network="precode(bottleneck=3)"),
    "gradient": "dp_sgd(noise=0.5)",
    "inputs": 'instahide(k=3, public="x")',
    "secure_aggregation": {"threshold": 2, "note": ["text"]},
    "created": "2026-01-31T12:00:00Z",
    "training": Training(learning_rate=0.1, batch_size=1, steps=1, augmentation="random crop", frozen=("base.*",)),
}
"""Settings that fill every field of a manifest which can hold text."""


def texts_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all texts in parsed JSON as tuples of keys and positions; the place of a key itself ends with "key"."""
    match value:
        case str():
            yield at
        case dict():
            for key, inner in value.items():
                yield (*at, key, "key")
                yield from texts_in(inner, (*at, key))
        case list():
            for number, inner in enumerate(value):
                yield from texts_in(inner, (*at, number))


def test_no_text_of_a_manifest_may_steer_a_terminal_or_forge_a_line(manifest: Manifest, tmp_path: Path) -> None:
    path = write_manifest(replace(manifest, **FULL), tmp_path)
    raw, places = json.loads(path.read_text()), 0
    assert Manifest.read(path)
    for *at, last in texts_in(raw):
        places += 1
        for steering in STEERING:
            changed = copy.deepcopy(raw)
            inner = changed
            for key in at if last != "key" else at[:-1]:
                inner = inner[key]
            if last == "key":
                inner[at[-1] + steering] = inner.pop(at[-1])
            else:
                inner[last] = f"{inner[last]}{steering}"
            path.write_text(json.dumps(changed))
            with pytest.raises(ValueError, match=r"manifest\.json: ") as refused:
                Manifest.read(path)
            assert UNPRINTABLE_PATTERN.search(str(refused.value)) is None
            assert len(str(refused.value)) < 1000
    assert places > 60


def test_every_field_of_a_manifest_that_holds_text_is_filled_above(manifest: Manifest, tmp_path: Path) -> None:
    """A text field that is added to the manifest must be added to `FULL`, so that the test above checks it."""
    raw = json.loads(write_manifest(replace(manifest, **FULL), tmp_path).read_text())
    with_text = {tuple(step for step in at if isinstance(step, str)) for at in texts_in(raw) if at[-1] != "key"}

    def fields_of(kind: Any, at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name in (field.name for field in fields(kind)):
            hint = get_type_hints(kind)[name]
            words, inner = str(hint), [one for one in (hint, *get_args(hint)) if is_dataclass(one)]
            if inner and hint is not DefenseSpec:
                yield from fields_of(inner[0], (*at, name))
            elif hint is DefenseSpec or any(word in words for word in ("str", "Any", "Literal")):
                yield (*at, name)

    for place in fields_of(Manifest, ()):
        assert any(found[: len(place)] == place for found in with_text), place


def test_a_missing_key_is_named(manifest: Manifest, tmp_path: Path) -> None:
    path = write_manifest(manifest, tmp_path)
    raw = json.loads(path.read_text())
    del raw["training"]["batch_size"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"missing keys \['batch_size'\] for Training"):
        Manifest.read(path)


DEEP = b'{"software": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
FAIRLY_DEEP = (
    b'{"format_version": 3, "name": "x", "model": {"name": "mlp", "arguments": {"a": %s}}, "data": 0, "training": 0, '
    % (b"[" * 900 + b"]" * 900)
)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"\0" * 100, DEEP, FAIRLY_DEEP + b'"defense": "", "software": {}}'),
        *(b'{"format_version": 3, "format_version": 3}', b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}'),
        *(b'{"a": 1%s}' % (b"0" * 5000), b'"' + b"a" * 999_999 + b'"', b" " * 10**6),
    ],
    ids=lambda content: repr(content[:30]),
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json: "):
        Manifest.read(tmp_path / "manifest.json")


def test_a_folder_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ValueError, match=f"{folder} is not a recording"):
            Manifest.read(folder / "manifest.json")
