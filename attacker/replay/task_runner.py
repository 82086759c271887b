"""Execution of the tasks of a replay: reading observations, attacking cases, and writing results."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attacker.attacks import Case, Need, Progress
from attacker.attacks.answers import find_problems
from attacker.attacks.base import Look, explain_refusal
from attacker.reconstruction import Reconstruction
from attacker.replay.cases import find_bad_numbers, hide_client
from attacker.replay.checkpoints import FileMemory
from attacker.replay.example_counts import add_estimate
from attacker.replay.results import get_run_folder, is_done, make_failure_path, make_reconstruction_path, write_failure
from attacker.replay.tasks import ReplayJob, RoundAndClient, Task, TaskOutcome
from fedsim import models
from fedsim.recording import DamagedFile, Observation, Recording
from fedsim.recording.files import flush, remove

LOG = logging.getLogger(__name__)


class TaskRunner:
    """A runner of the tasks of one job. look: callback that receives intermediate results, see `Memory`; None for none."""

    def __init__(self, job: ReplayJob, recording: Recording | None = None, look: Look | None = None) -> None:
        self.job, self.folder, self.look = job, Path(job.folder), look
        self.recording = recording or Recording(job.recording)
        if job.model is not None and recording is None:
            models.admit(job.model, name=self.recording.manifest.model.name)
        self.attack = job.spec.build(device=job.device)
        self._estimated: dict[RoundAndClient, str] = {}

    def run(self, task: Task, progress: Progress | None = None) -> TaskOutcome:
        """Attack the cases of a task, write their reconstructions, and return the outcome.

        Ctrl-C stops a search. Its best results so far are then written, and `interrupted` is set in the outcome. Outside of a
        search, KeyboardInterrupt is raised.
        """
        outcome = TaskOutcome()
        with _limit_threads(self.job.threads):
            if cases := self._build_cases(task, outcome):
                self._attack(cases, outcome, progress)
        return outcome

    def _build_cases(self, task: Task, outcome: TaskOutcome) -> list[Case]:
        """Return the cases of a task that can be attacked, and record the others as failed."""
        observations, problems = self._read_observations({row for member in task.members for row in member.rows})
        cases = []
        for member in task.members:
            if reason := next((problems[row] for row in member.rows if row in problems), ""):
                self._record_failure(member.key, reason, outcome)
                continue
            labels, logits = (None if values is None else torch.tensor(values) for values in (member.labels, member.logits))
            seen = tuple(observations[row] for row in member.rows)
            if Need.UNNAMED in self.attack.needs:
                seen = tuple(map(hide_client, seen))
            case = Case(seen, known_labels=labels, known_logits=logits)
            if reason := explain_refusal(self.attack, case):
                self._record_failure(member.key, f"the attack {self.job.attack} cannot be used: {reason}", outcome)
                continue
            cases.append(case)
        return cases

    def _read_observations(
        self, places: set[RoundAndClient]
    ) -> tuple[dict[RoundAndClient, Observation], dict[RoundAndClient, str]]:
        """Return a dict from (round, client) to observation, and one from (round, client) to why an observation cannot be used.

        They are read round by round, since observations of one round share the weights that the server sent.
        places: (round, client) of the observations to read.
        """
        damage: list[DamagedFile] = []
        rows = self.recording.read_rows(
            rounds={round for round, _ in places}, clients={client for _, client in places}, on_damage=damage.append
        )
        observations: dict[RoundAndClient, Observation] = {}
        problems = {place: f"round {place[0]} of {place[1]} is no longer in the recording" for place in places}
        for row in rows:
            place = (row.round, row.client)
            if place not in places:
                continue
            del problems[place]
            try:
                observation = self.recording.read_observation(row)
            except ValueError as error:
                problems[place] = str(error)
                continue
            if reason := find_bad_numbers(observation):
                problems[place] = reason
            else:
                observations[place], note = add_estimate(observation, reads_update=not self.job.null)
                if note:
                    self._estimated[place] = note
        return observations, problems

    def _attack(self, cases: Sequence[Case], outcome: TaskOutcome, progress: Progress | None) -> None:
        """Attack cases at once and write their results.

        If attacking them together raises an error, attack each half on its own, so that one bad case does not make others fail.
        """
        keys = tuple(case.key for case in cases)
        if all(is_done(self.folder, key) for key in keys):
            return
        memory = FileMemory(self.folder, keys, self.job.origin, every=self.job.every, look=self.look)
        memory.begin()
        rng = torch.Generator().manual_seed(self.job.seed)
        failure = ""
        try:
            answers: Any = self.attack(cases, rng=rng, progress=progress, memory=memory)
        except Exception as error:  # attacks and decoders of other packages may fail in any way
            LOG.debug("the attack failed on %s", ", ".join(keys), exc_info=error)
            failure = f"{type(error).__name__}: {error}".removesuffix(": ")
        if failure:  # outside the except block, so that the tensors in the traceback are freed before the halves run
            self._attack_halves(cases, failure, outcome, progress)
        else:
            problems = find_problems(self.job.attack, cases, answers)
            estimated = {case.key: self._list_notes(case) for case in cases}
            good = estimated.keys() - problems.keys()
            usable = [answer for answer in answers if answer.case in good] if good else []
            outcome.interrupted = any(answer.interrupted for answer in usable)
            for answer in usable:
                self._keep(replace(answer, notes=(*answer.notes, *estimated[answer.case])), outcome)
            for key, reason in problems.items():
                self._record_failure(key, reason, outcome)
            flush(self.folder)
        if not outcome.interrupted:
            memory.forget()

    def _attack_halves(self, cases: Sequence[Case], failure: str, outcome: TaskOutcome, progress: Progress | None) -> None:
        """Attack each half of some cases; record a single case as failed instead. failure: why the attack on all failed."""
        if len(cases) == 1:
            self._record_failure(cases[0].key, failure, outcome)
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # cached blocks have the size that did not fit
        half = len(cases) // 2
        for part in (cases[:half], cases[half:]):
            if not outcome.interrupted:
                self._attack(part, outcome, progress)

    def _keep(self, reconstruction: Reconstruction, outcome: TaskOutcome) -> None:
        """Write a reconstruction and add its case to `outcome.done`; do nothing if a finished reconstruction exists.

        If a value or the last loss of the reconstruction is not finite, the case is recorded as failed instead. If the search was
        also interrupted, it may have had no time for a finite loss: nothing is recorded, so that the case is attacked again. The
        result of an interrupted search replaces an earlier file only if its last loss is lower than the last loss in this file.
        """
        key = reconstruction.case
        if is_done(self.folder, key):  # finished before an earlier run of the task was interrupted
            return
        if not bool(torch.isfinite(reconstruction.loss[-1:]).all() and torch.isfinite(reconstruction.x).all()):
            if not reconstruction.interrupted:
                self._record_failure(key, "the search diverged: its loss or its result is NaN or infinite", outcome)
            return
        path = make_reconstruction_path(self.folder, key)
        if not (reconstruction.interrupted and path.exists() and _read_loss(path) <= float(reconstruction.loss[-1])):
            reconstruction.write(path, below=get_run_folder(self.folder), settle=False)
        remove(make_failure_path(self.folder, key), below=get_run_folder(self.folder))
        outcome.done[key] = reconstruction.route

    def _list_notes(self, case: Case) -> list[str]:
        """Return notes on how the numbers of examples of a case were estimated; empty if none was."""
        places = [(observation.round, observation.client) for observation in case.observations]
        estimates = [(place, self._estimated[place]) for place in places if place in self._estimated]
        return [note if len(places) == 1 else f"round {place[0]}: {note}" for place, note in estimates]

    def _record_failure(self, key: str, reason: str, outcome: TaskOutcome) -> None:
        outcome.failed[key] = reason
        write_failure(self.folder, key, reason)


def run_in_process(
    job: ReplayJob, recording: Recording, tasks: Sequence[Task], progress: Callable[[int], Progress], look: Look | None
) -> Generator[tuple[int, TaskOutcome]]:
    """Run tasks in this process, and yield each task's index in `tasks` and its outcome.

    progress: function from a task's index to the progress callback for its attack. look: see `TaskRunner`.
    """
    runner = TaskRunner(job, recording, look)
    for number, task in enumerate(tasks):
        yield number, runner.run(task, progress(number))


def write_failures(job: ReplayJob, task: Task, reason: str) -> TaskOutcome:
    """Record as failed, for `reason`, the cases of a task that have no finished reconstruction, and return the outcome."""
    folder = Path(job.folder)
    failed = {key: reason for key in task.keys if not is_done(folder, key)}
    for key in failed:
        write_failure(folder, key, reason)
    return TaskOutcome(failed=failed)


def _read_loss(path: Path) -> float:
    try:
        return float(Reconstruction.read(path).loss[-1])
    except ValueError:
        return float("inf")


@contextmanager
def _limit_threads(threads: int | None) -> Iterator[None]:
    previous = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
