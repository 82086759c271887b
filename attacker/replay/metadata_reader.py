"""Reader of `attack.json`, the metadata of a replay (an attack run on a recording), checked strictly as it may be untrusted.

Its texts are copied into the rows of score tables, and the keys of its cases become names of files.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attacker.attacks.registry import NULL_SUFFIX
from fedsim.recording.manifest import Manifest, check_name
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.safe_files import UNPRINTABLE_PATTERN, DamagedFile, is_count, read_json, shorten
from fedsim.recording.writer import is_plain

MAX_BYTES = 512 * 2**20
"""Largest size of the file in bytes, enough for some million cases."""
MAX_TEXT = 10_000
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
"""Pattern of the names of cases and of attacks' folders, which become names of files."""
OBSERVATION_STATUSES = ("complete", "masked", "failed", "late")
FIELD_TYPES = {
    "attack": str,
    "spec": str,
    "null": bool,
    "knows_defense": bool,
    "oracles": list,
    "seed": int,
    "run": dict,
    "cases": list,
}
REPLAY_ADVICE = "replay the attack again"
"""Advice for an invalid attack.json, which a replay writes anew."""
RUN_TEXT_FIELDS = ("name", "model", "defense", "gradient", "network", "inputs", "ranges_from", "created")


def read_metadata(path: Path, *, below: Path | None = None) -> dict[str, Any]:
    """Return the content of an `attack.json`.

    below: folder below which symbolic links on the way to `path` are not followed; by default the folder of `path`.
    Raises DamagedFile, naming the file and what to do, if it is missing or invalid, or if the name of its folder does not match
    `SAFE_NAME`.
    """
    if not SAFE_NAME.fullmatch(path.parent.name):
        raise DamagedFile(
            path,
            f"lies in the folder {shorten(path.parent.name)}, but names of attack folders have at most 200 of the characters A-Z "
            "a-z 0-9 _ . - and begin with none of . -; rename the folder",
        )
    try:
        facts = read_json(path, below=below, limit=MAX_BYTES)
    except DamagedFile as error:
        raise DamagedFile(path, f"{error.reason}; {REPLAY_ADVICE}") from None
    try:
        _check_metadata(facts)
        for case in facts["cases"]:
            _check_case(case)
    except ValueError as error:
        raise DamagedFile(path, str(error)) from None
    return dict(facts)


def make_attack_key(get: Callable[[str], Any]) -> tuple[Any, ...]:
    """Return a key that is equal for an attack on a recording and for its null, and differs between attacks.

    get: function from the name of an entry of `attack.json`, which score rows have as well, to its value. The entries
    `network_code` and `attack_code` are digests of code that is not part of this project; None counts as "", no such code.
    """
    codes = (get(name) or "" for name in ("network_code", "attack_code"))
    return str(get("spec")).removesuffix(NULL_SUFFIX), get("seed"), get("knows_defense"), *codes


def find_other_recording(metadata: Mapping[str, Any], manifest: Manifest) -> str:
    """Return the setting, "name" or "created", in which an `attack.json` differs from the manifest of a recording, or ""."""
    run = metadata["run"]
    return next((key for key in ("name", "created") if key in run and run[key] != getattr(manifest, key)), "")


def _check_metadata(facts: Any) -> None:
    if not isinstance(facts, dict):
        raise ValueError(f"attack.json must be a JSON object, got {shorten(facts)}; {REPLAY_ADVICE}")
    for entry, kind in FIELD_TYPES.items():
        if type(facts.get(entry)) is not kind:
            raise ValueError(
                f"the entry {entry} of attack.json must be of type {kind.__name__}, got {shorten(facts.get(entry))}; "
                f"{REPLAY_ADVICE}"
            )
    for entry in ("attack", "spec"):
        _check_text(entry, facts[entry])
    for entry in ("network_code", "attack_code"):
        _check_text(entry, facts.get(entry, ""))
    for entry in ("oracles", "asked_oracles", "withheld", "code"):
        _check_texts(entry, facts.get(entry, []))
    run = facts["run"]
    for entry in RUN_TEXT_FIELDS:
        _check_text(f"run.{entry}", run.get(entry, ""))
    _check_texts("run.limits", run.get("limits", []))
    if "name" in run:
        try:
            check_name(run["name"])
        except ValueError as error:
            raise ValueError(f"the entry run.name of attack.json cannot be used: {error}; {REPLAY_ADVICE}") from None
    training = run.get("training", {})
    epochs = training.get("epochs") if isinstance(training, dict) else training
    if epochs is not None and not is_count(epochs):
        raise ValueError(
            f"the entry run.training.epochs of attack.json must be a whole number, got {shorten(epochs)}; {REPLAY_ADVICE}"
        )


def _check_case(case: Any) -> None:
    key = case.get("key") if isinstance(case, dict) else case
    if not isinstance(case, dict) or not isinstance(key, str) or not SAFE_NAME.fullmatch(key):
        raise ValueError(f"attack.json has a case named {shorten(key)}, which cannot be the name of a file; {REPLAY_ADVICE}")
    if entry := _find_wrong_entry(case):
        raise ValueError(
            f"the entry {entry} of the case {key} in attack.json has the invalid value {shorten(case.get(entry))}; "
            f"{REPLAY_ADVICE}"
        )


def _find_wrong_entry(case: Mapping[str, Any]) -> str:
    """Return the name of an invalid entry of a case, or "" if there is none."""
    client, examples, codec = case.get("client"), case.get("num_examples"), case.get("codec")
    if not isinstance(client, str) or not (is_plain(client) or client == SUM_CLIENT):
        return "client"
    if case.get("status") not in OBSERVATION_STATUSES:
        return "status"
    if not is_count(case.get("round"), 1):
        return "round"
    if not is_count(case.get("attempt"), 1):
        return "attempt"
    if examples is not None and not is_count(examples):
        return "num_examples"
    if codec is not None and (not isinstance(codec, str) or len(codec) > MAX_TEXT):
        return "codec"
    rounds = case.get("rounds", [[1, 1]])
    if not isinstance(rounds, list) or not rounds or not all(_is_pair(entry) and is_count(entry[1], 1) for entry in rounds):
        return "rounds"
    cohorts = case.get("cohorts", [[]] * len(rounds))
    if not isinstance(cohorts, list) or len(cohorts) != len(rounds) or not all(map(_is_cohort, cohorts)):
        return "cohorts"
    if not _is_cohort(case.get("cohort", [])):
        return "cohort"
    left_out = case.get("left_out", [])
    if not isinstance(left_out, list) or not all(_is_pair(entry) and isinstance(entry[1], str) for entry in left_out):
        return "left_out"
    return ""


def _check_texts(entry: str, texts: Any) -> None:
    if not isinstance(texts, list):
        raise ValueError(f"the entry {entry} of attack.json must be a list of texts, got {shorten(texts)}; {REPLAY_ADVICE}")
    for text in texts:
        _check_text(entry, text)


def _check_text(entry: str, text: Any) -> None:
    if not isinstance(text, str) or len(text) > MAX_TEXT or UNPRINTABLE_PATTERN.search(text):
        raise ValueError(
            f"the entry {entry} of attack.json must be a text of at most {MAX_TEXT} printable characters, got {shorten(text)}; "
            f"{REPLAY_ADVICE}"
        )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_count(value[0], 1)


def _is_cohort(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) and is_plain(name) for name in names)
