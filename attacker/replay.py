"""Recording x attack -> reconstruction files. What is done is skipped, so a replay that was stopped goes on."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attacker.attacks import Attack, AttackSpec, Case, Progress, unmet
from attacker.attacks.base import MAX_EXAMPLES
from attacker.reconstruction import Reconstruction
from fedsim.wire import DamagedFile, Manifest, Observation, Recording, Row
from fedsim.wire.files import make_private, write_json
from fedsim.wire.masked import SUM

CHUNK_BYTES = 2_000_000_000
"""About how much memory the simulated gradients of one chunk may take."""
COPIES = 12
"""Tensors of the size of the model that one problem keeps alive at once."""

OracleLabels = Callable[[Row], Tensor]


@dataclass
class Replayed:
    """folder: of the reconstructions. done, skipped: numbers of cases. routes: how many of those done came about in which way.

    failed: reasons by case, and by round and client as the index has them for rows that cannot be read.
    """

    folder: Path
    done: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    routes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """An attack on a recording.

    out:     folder of all reconstructions; this replay's own is named after the attack and a hash of all that defines it.
    rounds, clients: only these, where given. chunk: cases attacked at once; None chooses by the size of the model.
    oracle_labels: the true labels of a row, where the user asked for that oracle.
    """

    recording: Recording
    spec: AttackSpec
    out: Path
    seed: int = 0
    device: str = "cpu"
    rounds: frozenset[int] | None = None
    clients: frozenset[str] | None = None
    chunk: int | None = None
    oracle_labels: OracleLabels | None = None

    @cached_property
    def folder(self) -> Path:
        identity = [str(self.spec), self.seed, self.oracle_labels is not None, self.recording.fingerprint()]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
        return self.out / f"{self.spec.name}{'-null' if self.spec.null else ''}-{digest}"

    def _rows(self) -> tuple[list[Row], list[DamagedFile]]:
        """The rows asked for, and what is wrong with those of them that cannot be read."""
        damage: list[DamagedFile] = []
        return self.recording.rows(rounds=self.rounds, clients=self.clients, on_damage=damage.append), damage

    def extent(self) -> tuple[int, float]:
        """How many observations are still to be attacked, and about how many megabytes that writes.

        Those of more examples than any attack makes are not among them, nor rows that cannot be read.
        """
        rows = [row for row in self._rows()[0] if row.status == "complete" and (row.num_examples or 0) <= MAX_EXAMPLES]
        pending = [row for row in rows if not self._is_done(row)]
        values = self.recording.manifest.data.size
        return len(pending), sum(4 * values * (row.num_examples or 0) + 4000 for row in pending) / 1e6

    def run(self, progress: Callable[[str], Progress] | None = None) -> Replayed:
        """Attack every complete observation that is not done yet.

        progress: from a few words about the chunk, a callback for its attack.
        Raises ValueError where nothing can be attacked, DamagedFile where that is because no row can be read, and
        KeyboardInterrupt after the best so far is written.
        """
        attack = self.spec.build(device=self.device)
        rows, damage = self._rows()
        complete = [row for row in rows if row.status == "complete"]
        if not complete:
            if damage:
                raise damage[0]
            raise ValueError(f"{self.recording.folder} holds no complete observation of the rounds and clients asked for")
        make_private(self.out)
        make_private(self.folder)
        self._write_facts(rows)
        replayed = Replayed(self.folder, failed=_by_row(damage))
        pending = [row for row in complete if not self._is_done(row)]
        replayed.skipped = len(complete) - len(pending)
        for chunk in self._chunks(pending, attack, replayed):
            null, finished = " (null)" if self.spec.null else "", replayed.done + replayed.skipped
            words = f"{self.spec.name}{null}, {finished} of {len(complete)} done"
            self._attack(attack, chunk, replayed, progress(words) if progress else None)
        return replayed

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _is_done(self, row: Row) -> bool:
        path = self.path(row.key)
        if not path.exists():
            return False
        try:
            return not Reconstruction.read(path).interrupted
        except ValueError:
            return False

    def _chunks(self, rows: Sequence[Row], attack: Attack, replayed: Replayed) -> Iterator[list[Case]]:
        """Cases of equal shape, as many at once as fit; cases that cannot be attacked are written down as failed."""
        for _, group in groupby(sorted(rows, key=lambda row: row.num_examples or 0), key=lambda row: row.num_examples):
            cases: list[Case] = []
            for row in group:
                case = self._case(row, attack, replayed)
                if case is None:
                    continue
                cases.append(case)
                if len(cases) >= (self.chunk or _chunk_size(case.observations[0])):
                    yield cases
                    cases = []
            if cases:
                yield cases

    def _case(self, row: Row, attack: Attack, replayed: Replayed) -> Case | None:
        try:
            labels = self.oracle_labels(row) if self.oracle_labels and not self.spec.null else None
            case = Case((self.recording.observation(row),), known_labels=labels)
            reasons = unmet(attack, case)
        except ValueError as error:
            self._fail(row.key, str(error), replayed)
            return None
        if reasons:
            self._fail(row.key, f"{self.spec.name} cannot be used: {'; '.join(reasons)}", replayed)
            return None
        return case

    def _attack(self, attack: Attack, cases: Sequence[Case], replayed: Replayed, progress: Progress | None) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        try:
            reconstructions = attack(cases, rng=rng, progress=progress)
        except (RuntimeError, ValueError, MemoryError) as error:
            if len(cases) == 1:
                self._fail(cases[0].key, f"{type(error).__name__}: {error}".removesuffix(": "), replayed)
                return
            for case in cases:  # one bad case must not take its neighbours along
                self._attack(attack, [case], replayed, progress)
            return
        for reconstruction in reconstructions:
            self._keep(reconstruction, replayed)
        if any(reconstruction.interrupted for reconstruction in reconstructions):
            raise KeyboardInterrupt

    def _keep(self, reconstruction: Reconstruction, replayed: Replayed) -> None:
        """Write an answer, unless it is no number, or was cut off and an earlier one is better by the attack's own loss."""
        path = self.path(reconstruction.case)
        if not bool(torch.isfinite(reconstruction.loss[-1:]).all() and torch.isfinite(reconstruction.x).all()):
            self._fail(reconstruction.case, "the search ran away: its loss is not a number", replayed)
            return
        if not (reconstruction.interrupted and path.exists() and _loss(path) <= float(reconstruction.loss[-1])):
            reconstruction.write(path)
        (self.folder / f"{reconstruction.case}.failed.json").unlink(missing_ok=True)
        replayed.done += 1
        replayed.routes[reconstruction.route] = replayed.routes.get(reconstruction.route, 0) + 1

    def _fail(self, key: str, reason: str, replayed: Replayed) -> None:
        replayed.failed[key] = reason
        write_json(self.folder / f"{key}.failed.json", {"case": key, "reason": reason})

    def _write_facts(self, rows: Sequence[Row]) -> None:
        """What scoring and report need to know of this replay; cases of earlier calls stay."""
        path = self.folder / "attack.json"
        cases = {case["key"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() else {}
        for row in rows:
            cases[row.key] = {
                "key": row.key,
                "round": row.round,
                "client": row.client,
                "attempt": row.attempt,
                "num_examples": row.num_examples,
                "codec": row.codec,
                "status": row.status,
                "reason": row.reason,
                "cohort": list(self.recording.summed(row.round)) if row.client == SUM else [row.client],
            }
        write_json(
            path,
            {
                "attack": self.spec.name,
                "spec": str(self.spec),
                "null": self.spec.null,
                "knows_defense": self.spec.knows_defense,
                "oracles": list(_oracles(self)),
                "seed": self.seed,
                "run": facts(self.recording.manifest),
                "cases": [cases[key] for key in sorted(cases)],
            },
        )


def facts(manifest: Manifest) -> dict[str, Any]:
    """The public facts of a run, for rows and reports."""
    return {
        "name": manifest.name,
        "model": str(manifest.model),
        "shape": list(manifest.data.shape),
        "num_classes": manifest.data.num_classes,
        "training": asdict(manifest.training),
        "defense": str(manifest.defense),
        "gradient": manifest.gradient,
        "network": manifest.network,
        "inputs": manifest.inputs,
        "secure_aggregation": manifest.secure_aggregation,
        "created": manifest.created,
        "software": dict(manifest.software),
    }


def _by_row(damage: Sequence[DamagedFile]) -> dict[str, str]:
    """What is wrong with each row, by round and client as its reason names them; cut short, two may have the same name."""
    failed: dict[str, str] = {}
    for error in damage:
        row = error.reason.partition(": ")[0]
        failed[row if row not in failed else f"{row} ({len(failed) + 1})"] = str(error)
    return failed


def _oracles(replay: Replay) -> tuple[str, ...]:
    built = replay.spec.build()
    labels = ("labels",) if replay.oracle_labels and not replay.spec.null else ()
    return tuple(getattr(built, "oracles", ())) + labels


def _loss(path: Path) -> float:
    try:
        return float(Reconstruction.read(path).loss[-1])
    except ValueError:
        return float("inf")


def _chunk_size(observation: Observation) -> int:
    parameters = sum(w.numel() for w in observation.weights.values())
    values = prod(observation.data.shape) * (observation.num_examples or 1)
    return max(1, min(64, CHUNK_BYTES // (4 * COPIES * (parameters + 20 * values))))
