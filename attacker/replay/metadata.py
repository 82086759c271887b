"""Metadata of a replay in `attack.json`, which scoring and report read."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attacker.attacks.cases import UNNAMED_CLIENT
from attacker.replay.cases import Plan, PlannedCase
from attacker.replay.identity import Identity, identify_version
from attacker.replay.metadata_reader import read_metadata
from attacker.replay.results import get_run_folder, is_done
from fedsim import models
from fedsim.recording import DamagedFile, Manifest, Recording, Row
from fedsim.recording.files import hold_lock, write_bytes
from fedsim.recording.masked_vectors import SUM_CLIENT

log = logging.getLogger(__name__)


def write_metadata(
    path: Path, recording: Recording, identity: Identity, plan: Plan, *, oracles: Sequence[str], withheld: Sequence[str] = ()
) -> list[str]:
    """Write the file `path`, an `attack.json`: what scoring and report need to know about a replay; return its entry `code`.

    That entry lists the versions of the code (`identify_version`) whose answers the folder may hold, the current one last. Other
    versions are listed only if the folder holds finished cases.

    Its list of cases holds the cases of `plan`, the rows without a usable update, and all others that an existing file lists. A
    damaged file is replaced, with a warning; cases of other rounds are listed again once they are replayed again.
    oracles: names of the oracles (information that no server has, such as true labels) that the attack used: those that it always
    needs (`list_oracles`) and those that the user gave. A null uses only those that the attack always needs. The entry
    `asked_oracles` lists what the user gave, also for a null, so that the replay can be repeated.
    withheld: names of what the server sees and the attack was not given, such as "client names".
    """
    spec = identity.spec
    entries = [_make_row_entry(recording, row) for row in plan.idle]
    entries += [_make_case_entry(recording, case, whole=plan.whole) for case in plan.cases]
    settings = {
        "attack": spec.name,
        "spec": str(spec),
        "null": spec.null,
        "knows_defense": spec.knows_defense,
        "oracles": list(oracles),
        "withheld": list(withheld),
        "asked_oracles": list(identity.oracles),
        "seed": identity.seed,
        "identity": identity.digest,
        "arguments": identity.arguments,
        "network_code": identity.network,
        "attack_code": identity.attack_code,
        "run": describe_run(recording.manifest),
    }
    below = get_run_folder(path.parent)
    with hold_lock(path.with_name(".lock"), below=below, wait=True):  # another replay may attack other rounds at the same time
        before = _read_written(path)
        listed = {case["key"]: case for case in before.get("cases", [])}
        current, codes = identify_version(), list[str]()
        if any(is_done(path.parent, key) for key in listed):
            codes = [code for code in before.get("code", []) if code != current]
        codes.append(current)
        cases = listed | {case["key"]: case for case in entries}
        write_bytes(path, _to_json({**settings, "code": codes}, [cases[key] for key in sorted(cases)]), below=below)
    return codes


def _make_case_entry(recording: Recording, case: PlannedCase, *, whole: bool) -> dict[str, Any]:
    """Return the entry of a case in `attack.json`.

    whole: whether the case holds the usable rounds of a client, or of all clients. If True, the entry has three more keys:
    `rounds`, a list of pairs of round and attempt (a number that increases if a resumed federation records the round again);
    `left_out`, the omitted rounds; and `cohorts`, for each of the `rounds` the clients that its updates depend on. If the attack
    does not see the names of clients, only scoring reads `cohorts`. `num_examples` is then the sum over all rounds, or None if
    one of the numbers is unknown, and `codec` lists the codecs of all rounds.
    """
    first, sizes = case.rows[0], [row.num_examples for row in case.rows]
    entry = {**_make_row_entry(recording, first), "key": case.key}
    if not whole:
        return entry
    if case.unnamed:
        entry["client"] = UNNAMED_CLIENT
    cohorts: dict[tuple[int, int], list[str]] = {}
    for row in case.rows:
        cohorts.setdefault((row.round, row.attempt), []).extend(_list_cohort(recording, row))
    return {
        **entry,
        "rounds": [list(place) for place in cohorts],
        "num_examples": None if None in sizes else sum(size for size in sizes if size is not None),
        "codec": ", ".join(sorted({str(row.codec) for row in case.rows})),
        "left_out": [list(omitted) for omitted in case.left_out],
        "cohorts": list(cohorts.values()),
    }


def _make_row_entry(recording: Recording, row: Row) -> dict[str, Any]:
    """Return the entry in `attack.json` of one row (a client in a round). A row without an update has an entry, too."""
    names = ("key", "round", "client", "attempt", "num_examples", "codec", "status", "reason")
    return {**{name: getattr(row, name) for name in names}, "cohort": _list_cohort(recording, row)}


def _list_cohort(recording: Recording, row: Row) -> list[str]:
    """Return the clients that a row's update depends on: the clients of a secure sum, or else the row's own client."""
    return list(recording.list_summed(row.round)) if row.client == SUM_CLIENT else [row.client]


def _read_written(path: Path) -> dict[str, Any]:
    """Return the content of an existing `attack.json`; an empty dict if it is missing or, with a warning, damaged."""
    try:
        return read_metadata(path) if os.path.lexists(path) else {}
    except DamagedFile as error:
        log.warning("%s: %s. It is written anew with the cases of this replay only.", path, error.reason.partition(";")[0])
        return {}


def _to_json(about: dict[str, Any], cases: Sequence[dict[str, Any]]) -> bytes:
    """Return the file's content as JSON with one case per line, which is faster to write than indented JSON."""
    head = json.dumps(about, indent=2, allow_nan=False).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(case, allow_nan=False)}" for case in cases)
    return f'{head},\n  "cases": [\n{lines}\n  ]\n}}\n'.encode()


def describe_run(manifest: Manifest) -> dict[str, Any]:
    """Return a dict of settings of the federation, from its manifest, for score rows and reports."""
    return {
        "name": manifest.name,
        "model": str(manifest.model),
        "shape": list(manifest.data.shape),
        "num_classes": manifest.data.num_classes,
        "ranges_from": manifest.data.ranges_from,
        "training": asdict(manifest.training),
        "limits": [*manifest.training.list_limits(), *list_network_limits(manifest)],
        "defense": str(manifest.defense),
        "gradient": manifest.gradient,
        "network": manifest.network,
        "inputs": manifest.inputs,
        "secure_aggregation": manifest.secure_aggregation,
        "created": manifest.created,
        "software": dict(manifest.software),
    }


def list_network_limits(manifest: Manifest) -> list[str]:
    """Return a warning, in a list, if the network draws random numbers while clients train (dropout), which attacks leave out.

    The list is empty if the network draws none, or cannot be built. Outside of mode "train", only networks that the user's code
    builds are looked at.
    """
    if manifest.training.mode != "train" and ":" not in manifest.model.name:
        return []
    try:
        network = models.build(manifest.model, manifest.data)
    except ValueError:
        return []
    return models.list_unsimulated(network, manifest.training, manifest.data)
