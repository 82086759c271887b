"""Replay: runs one attack on a recording and writes reconstruction files. Finished cases are skipped, so it can be resumed."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from attacker.attacks import ATTACKS, Attack, AttackSpec
from attacker.attacks.arguments import list_files
from attacker.attacks.base import Look, RoutePlan, estimate_effort
from attacker.attacks.needs import MAX_EXAMPLES, NEEDS_OF_FILES, Need, list_oracles, list_withheld
from attacker.replay.batching import CaseFootprint, split_into_chunks
from attacker.replay.cases import Plan, PlannedCase, plan_cases
from attacker.replay.checkpoints import find_unfinished, remove_finished
from attacker.replay.chosen_rows import ChosenRows
from attacker.replay.executors import process_pool, ray_cluster
from attacker.replay.forecast import Forecast, measure_slowdown, plan_routes
from attacker.replay.identity import Identity, explain_reuse
from attacker.replay.metadata import write_metadata
from attacker.replay.results import get_run_folder, is_done, make_reconstruction_path, write_failure
from attacker.replay.task_runner import run_in_process
from attacker.replay.tasks import Meter, ReplayJob, Task, TaskCase, TaskOutcome, Watch
from fedsim.recording import DamagedFile, Recording, Row
from fedsim.recording.files import make_private
from fedsim.recording.run_check import check_run
from fedsim.recording.safe_files import COPY_ADVICE

Oracle = Callable[[Row], Tensor]
"""Function from a row of the recording to true labels or logits of its examples, which no server knows."""


@dataclass
class ReplayResult:
    """The result of a replay.

    folder:   folder of the reconstructions.
    done:     number of cases that this replay reconstructed.
    skipped:  number of cases that had been finished before.
    failed:   dict from the key of a case to the reason of failure; for a row that cannot be read, the key is a text with its
              round and client.
    routes:   dict from the name of a method (a closed form or a search) to the number of cases that it reconstructed now.
    left_out: dict from the key of each case that omits rounds of its client to a list of pairs of round and reason.
    reuse:    the one of the notes that says that another version of the code gave answers which are kept; "" if there is none.
    notes:    remarks on the replay, one sentence each.
    """

    folder: Path
    done: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    routes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    reuse: str = ""
    notes: list[str] = field(default_factory=list)

    def add(self, outcome: TaskOutcome) -> None:
        """Add the outcome of one task to the totals of this replay: cases done, failures, routes and notes."""
        self.done += len(outcome.done)
        self.notes += outcome.notes
        self.failed |= outcome.failed
        for route in outcome.done.values():
            self.routes[route] = self.routes.get(route, 0) + 1


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One attack on a recording, with all settings of its execution.

    out:     folder of the reconstructions of all attacks; this replay writes into a subfolder named after the attack and a
             digest, see `Identity`.
    rounds, clients: the rounds and clients to attack, by default all; a unique beginning of a client's name is enough.
    device:  PyTorch device of the attack.
    chunk:   largest number of cases attacked at once; None chooses it from the model and the machine.
    oracle_labels, oracle_logits: oracles, which tell the attack what no server knows: functions from a row of the recording to
             its true labels, and to the model's logits of its true examples. None leaves an oracle out. A null, the attack
             without the update, gets neither labels nor logits.
    oracle_truth: digest of the clients' true examples that these functions read.
    threads: PyTorch threads per worker; None means 1 if there are several chunks or `ray` is given, and PyTorch's default
             otherwise.
    workers: largest number of worker processes; 1 runs the attack in this process; None lets `choose_workers` decide. Without
             effect if `ray` is given.
    ray:     address of a Ray cluster that runs the attack, or `local` to start one on this machine.
    model:   `module:function` that builds the recorded network, for workers to import; only if the network is not built in.
    every:   seconds between two checkpoints.
    look:    callback that receives intermediate results, see `Memory`; called only if the attack runs in this process.
    """

    recording: Recording
    spec: AttackSpec
    out: Path
    seed: int = 0
    device: str = "cpu"
    rounds: Set[int] | None = None
    clients: frozenset[str] | None = None
    chunk: int | None = None
    oracle_labels: Oracle | None = None
    oracle_logits: Oracle | None = None
    oracle_truth: str = ""
    threads: int | None = None
    workers: int | None = 1
    ray: str | None = None
    model: str | None = None
    every: float = 60.0
    look: Look | None = None

    @cached_property
    def identity(self) -> Identity:
        """Return the facts that the folder is named after. Raises ValueError as `Identity.of` does."""
        return Identity.of(self.recording, self.spec, seed=self.seed, oracles=self._oracles, truth=self.oracle_truth)

    @cached_property
    def folder(self) -> Path:
        return self.identity.make_path(self.out)

    @property
    def _oracles(self) -> tuple[str, ...]:
        """Return the names, "labels" or "logits", of the oracles (information that no server has) that the user gave."""
        oracles = {"labels": self.oracle_labels, "logits": self.oracle_logits}
        return tuple(name for name, oracle in oracles.items() if oracle is not None)

    @cached_property
    def _attack(self) -> Attack:
        return self.spec.build(device=self.device)

    @cached_property
    def _chosen(self) -> ChosenRows:
        return ChosenRows(self.recording, self.rounds, self.clients)

    @cached_property
    def _footprint(self) -> CaseFootprint:
        return CaseFootprint(self.recording.manifest, self.device, estimate_effort(self._attack))

    @cached_property
    def _chunks(self) -> list[tuple[PlannedCase, ...]]:
        """Return all cases that can be attacked, finished or not, in groups that are attacked at once."""
        return split_into_chunks(self.plan.cases, self._footprint, self.chunk)

    @cached_property
    def _job(self) -> ReplayJob:
        return ReplayJob(
            recording=str(self.recording.folder.resolve()),
            folder=os.path.abspath(self.folder),
            attack=self.spec.name,
            arguments=dict(self.spec.arguments),
            null=self.spec.null,
            seed=self.seed,
            device=self.device,
            threads=self.threads or (1 if len(self._chunks) > 1 else None),
            model=self.model,
            every=self.every,
        )

    @cached_property
    def plan(self) -> Plan:
        """Return all cases of the replay, finished or not, also those that cannot be attacked, each with the reason.

        Raises ValueError if the attack lacks a file that it needs, no chosen row has an update, a chosen client does not exist,
        none of the chosen rounds exists, the recorded weights do not fit the model, or clients are chosen for an attack that does
        not see their names; DamagedFile, a ValueError, if no chosen row has an update and at least one chosen row cannot be read,
        or if a folder contains links; and FileNotFoundError if a file that an argument names is missing.
        """
        recording = self.recording.folder
        check_run(recording.parent if recording.name == "recording" else recording)
        for folder in (self.out, self.folder):
            if folder.is_symlink():
                raise DamagedFile(folder, f"is a symbolic link, which reconstructions cannot be written to; {COPY_ADVICE}")
        check_run(self.folder)
        self._check_files()
        self._chosen.check()
        if self._chosen.names and Need.UNNAMED in self._attack.needs:
            raise ValueError(
                f"the attack {self.spec} is not told which client sent an update, so that none can be chosen; leave out --client"
            )
        self._chosen.check_weights(self._footprint.shapes, self._footprint.distinct)
        planned = plan_cases(self.recording, self._chosen.rows, self._attack)
        # a damaged manifest may claim examples of any size
        checked = ((case, case.reason or self._footprint.explain_too_large(case.sizes)) for case in planned.cases)
        return replace(planned, cases=tuple(replace(case, reason=reason) for case, reason in checked))

    def _check_files(self) -> None:
        """Raise an error if the attack uses images of the user's, and no argument names their file or the file is missing."""
        names = list_files(ATTACKS[self.spec.name]) if self._attack.needs & NEEDS_OF_FILES else []
        paths = [Path(self.spec.get_argument(name)) for name in names if self.spec.get_argument(name)]
        if names and not paths:
            raise ValueError(
                f"the attack {self.spec.name} needs images of yours: name an archive with images and labels, "
                f"--set {names[0]}=FILE.npz"
            )
        if missing := [path for path in paths if self.ray is None and not path.exists()]:
            raise FileNotFoundError(f"{missing[0]} does not exist; name the archive with --set {names[0]}=FILE.npz")

    def run(self, watch: Watch | None = None) -> ReplayResult:
        """Attack every case that is not done yet, write reconstructions, and return what was done. watch: callback for progress.

        Raises the errors of `plan`, RuntimeError if no Ray cluster can be reached at `ray`, and KeyboardInterrupt after Ctrl-C,
        once the best results so far are written.
        """
        plan, pending = self.plan, self._list_pending()
        make_private(self.folder, below=get_run_folder(self.folder))
        oracles = (*list_oracles(self._attack.needs), *(() if self.spec.null else self._oracles))
        codes = write_metadata(
            self.folder / "attack.json",
            self.recording,
            self.identity,
            plan,
            oracles=oracles,
            withheld=list_withheld(self._attack.needs),
        )
        replayed = ReplayResult(self.folder, failed=_group_errors(self._chosen.damage), left_out=plan.left_out)
        for case in plan.cases:
            if case.reason:
                self._record_failure(case.key, case.reason, replayed)
        if absent := self._chosen.find_absent_rounds():
            of = "the chosen clients in " if self._chosen.names else ""
            replayed.notes.append(f"the recording holds nothing of {of}round {absent}")
        tasks = self._plan_tasks(pending, replayed)
        replayed.skipped = sum(is_done(self.folder, case.key) for case in plan.cases)
        if reuse := explain_reuse(codes, replayed.skipped, self.folder):
            replayed.reuse = reuse
            replayed.notes.append(reuse)
        with closing(self._run_tasks(tasks, Meter(tasks, watch))) as outcomes:
            for outcome in outcomes:
                replayed.add(outcome)
        remove_finished(self.folder, [case.key for case in plan.cases if is_done(self.folder, case.key)])
        return replayed

    def _plan_tasks(self, pending: Sequence[PlannedCase], replayed: ReplayResult) -> list[Task]:
        """Return the remaining tasks: first the groups of cases of an interrupted replay's checkpoints, then other cases.

        A task is the cases that are attacked at once. Notes on checkpoints that cannot be used, and cases whose true labels or
        logits cannot be read (oracles), are recorded in `replayed`. pending: the cases that are not finished.
        """
        attackable = {case.key: case for case in self.plan.cases if not case.reason}
        left = {case.key for case in pending}
        started, notes = find_unfinished(self.folder, self._job.origin, attackable, max_cases=self.chunk)
        replayed.notes += notes
        groups = [[attackable[key] for key in keys] for keys in started if left & set(keys)]
        running = {case.key for group in groups for case in group}
        for chunk in self._chunks:
            groups.append([case for case in chunk if case.key in left - running])
        tasks = (tuple(self._collect_members(group, replayed)) for group in groups)
        return [Task(members=members) for members in tasks if members]

    def _collect_members(self, cases: Sequence[PlannedCase], replayed: ReplayResult) -> Iterator[TaskCase]:
        """Yield cases as plain data, with the true labels or logits of the chosen oracles.

        A case whose labels or logits cannot be read is recorded in `replayed` as failed and not yielded.
        """
        for case in cases:
            labels = logits = None
            try:
                if self.oracle_labels is not None and not self.spec.null:
                    labels = tuple(torch.cat([self.oracle_labels(row) for row in case.rows]).tolist())
                if self.oracle_logits is not None and not self.spec.null:
                    logits = tuple(map(tuple, self.oracle_logits(case.rows[0]).tolist()))
            except ValueError as error:
                self._record_failure(case.key, str(error), replayed)
                continue
            rows = tuple((row.round, row.client) for row in case.rows)
            yield TaskCase(key=case.key, rows=rows, labels=labels, logits=logits)

    def _run_tasks(self, tasks: Sequence[Task], meter: Meter) -> Generator[TaskOutcome]:
        """Run the tasks and yield their outcomes when they finish.

        If a task was interrupted, its outcome is yielded first; then KeyboardInterrupt is raised, and no further task runs. Tasks
        that still run after an error, or when the generator is closed, are interrupted.
        """
        if not tasks:
            return
        count = self.workers or self._choose_workers(tasks)
        if self.ray is not None:
            results = ray_cluster.run_tasks(self._job, tasks, self.ray)
        elif count > 1:
            results = process_pool.run_tasks(self._job, tasks, count, meter.record_progress)
        else:
            results = run_in_process(self._job, self.recording, tasks, meter.of_attack, self.look)
        with closing(results):
            for number, outcome in results:
                meter.record_progress(number, 1.0, "")
                yield outcome
                if outcome.interrupted:
                    raise KeyboardInterrupt

    def _choose_workers(self, tasks: Sequence[Task]) -> int:
        """Return the number of worker processes that tasks are worth, and for which the memory suffices."""
        cases = {case.key: case for case in self.plan.cases}
        groups = [(cases[task.keys[0]], len(task.keys)) for task in tasks]
        seconds = sum(self._estimate_once(*group) for group in groups) * estimate_effort(self._attack).evaluations
        largest = max(count * self._footprint.estimate_bytes(case.sizes) for case, count in groups)
        worth = process_pool.choose_workers(seconds, len(tasks), self.device, self.threads)
        return min(worth, self._footprint.count_concurrent(largest))

    def _record_failure(self, key: str, reason: str, replayed: ReplayResult) -> None:
        replayed.failed[key] = reason
        write_failure(self.folder, key, reason)

    def make_path(self, key: str) -> Path:
        """Return the path of the reconstruction of the case `key`."""
        return make_reconstruction_path(self.folder, key)

    def count_unfinished(self) -> tuple[int, int]:
        """Return how many cases are still to be attacked, and the number of all cases, also those that cannot be attacked."""
        return len(self._list_pending()), len(self.plan.cases)

    def _list_pending(self) -> list[PlannedCase]:
        return [case for case in self.plan.cases if not case.reason and not is_done(self.folder, case.key)]

    def measure_extent(self) -> tuple[int, float]:
        """Return the number of observations still to be attacked, and the rough size in MB of the reconstructions to be written.

        Observations of cases that cannot be attacked, and observations of more than `MAX_EXAMPLES` examples, are not counted.
        """
        rows = [row for case in self._list_pending() for row in case.rows if (row.num_examples or 0) <= MAX_EXAMPLES]
        values = self.recording.manifest.data.size
        return len(rows), sum(4 * values * (row.num_examples or 0) + 4000 for row in rows) / 1e6

    def estimate_work(self) -> Forecast:
        """Return an estimate of the remaining work. Cases with an update of more than `MAX_EXAMPLES` examples are not counted."""
        pending = {case.key for case in self._list_pending()}
        chunks = [[case for case in chunk if case.key in pending and max(case.sizes) <= MAX_EXAMPLES] for chunk in self._chunks]
        chunks = [chunk for chunk in chunks if chunk]
        routes = plan_routes(self._attack, self.recording, chunks[0][0]) if chunks else RoutePlan()
        evaluations = estimate_effort(self._attack).most_evaluations + routes.evaluations
        once = sum(self._estimate_once(chunk[0], len(chunk)) for chunk in chunks)
        largest = max((len(chunk) * self._footprint.estimate_bytes(chunk[0].sizes) for chunk in chunks), default=0)
        return Forecast(
            cases=sum(map(len, chunks)),
            chunks=len(chunks),
            evaluations=evaluations,
            core_seconds=once * evaluations,
            reasons=routes.reasons,
            memory=self._footprint.explain_risk(largest),
        )

    def _estimate_once(self, case: PlannedCase, count: int) -> float:
        """Return the seconds of one gradient evaluation for `count` cases like `case` on one core, corrected by a measurement."""
        guess = partial(self._footprint.estimate_seconds, cases=1)
        return self._footprint.estimate_seconds(case.sizes, count) * measure_slowdown(
            self.recording, self.spec, self._attack, case, guess
        )


def _group_errors(damage: Sequence[DamagedFile]) -> dict[str, str]:
    """Return a dict from a text with round and client of each unreadable row to its error.

    If a text occurs again, a number is appended to it.
    """
    failed: dict[str, str] = {}
    for error in damage:
        row = error.reason.partition(": ")[0]
        failed[row if row not in failed else f"{row} ({len(failed) + 1})"] = str(error)
    return failed
