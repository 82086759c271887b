"""Jobs of the service as plain data: requests, progress and results. Requests and workers' messages are validated when parsed."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationInfo, field_validator

from attacker.service.jobs.run_names import FOLDER_NAME_PATTERN, ID_PATTERN

JobState = Literal["queued", "running", "done", "failed", "cancelled", "set_aside"]
JOB_STATES: tuple[JobState, ...] = ("queued", "running", "done", "failed", "cancelled", "set_aside")
FINAL_STATES: tuple[JobState, ...] = ("done", "failed", "cancelled", "set_aside")

Id = Annotated[str, Field(pattern=ID_PATTERN, max_length=300)]
Word = Annotated[str, Field(min_length=1, max_length=100)]
ArgumentValue = StrictBool | StrictInt | StrictFloat | Annotated[StrictStr, Field(max_length=200)] | None
MAX_AUDIT_SECONDS = 7 * 24 * 3600
ROUNDS_PATTERN = r"^(all|[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?){0,30})$"


class JobSpec(BaseModel):
    """Request to run one attack on a recording.

    recording: id of the recording, see `run_names`. attack: name of a registered attack.
    arguments: dict from the name of an argument of the attack to its value; only arguments that cannot name a file, a module or
               an address, see `attacker.attacks.arguments`. Arguments that are left out have their defaults.
    rounds:    "all", or rounds counted from 1, such as "3", "1-20" or "1-3,7". clients: names of clients, or unique beginnings of
               names; empty for all clients.
    seed:      of the attack's random numbers.
    null:      whether the attack's null runs as well: the same attack without the clients' updates, for comparison.
    priority:  from -10 to 10; the waiting job with the highest priority runs first, and among jobs of equal priority the oldest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recording: Id
    attack: Word
    arguments: Annotated[dict[Word, ArgumentValue], Field(max_length=50)] = {}
    rounds: Annotated[str, Field(pattern=ROUNDS_PATTERN)] = "all"
    clients: Annotated[tuple[Word, ...], Field(max_length=1000)] = ()
    seed: Annotated[StrictInt, Field(ge=0, lt=2**53)] = 0
    null: StrictBool = True
    priority: Annotated[StrictInt, Field(ge=-10, le=10)] = 0

    @classmethod
    def from_stored(cls, fields: dict[str, Any]) -> "JobSpec":
        """Return a spec from its stored fields without validating it again: it was validated when the job was submitted.

        Its attack may no longer be installed.
        """
        return cls.model_construct(**{**fields, "clients": tuple(fields["clients"])})

    @field_validator("attack")
    @classmethod
    def _check_attack(cls, name: str) -> str:
        from attacker.attacks import ATTACKS
        from attacker.attacks.arguments import list_files
        from attacker.attacks.needs import NEEDS_OF_FILES
        from attacker.attacks.registry import explain_unusable

        _ = ATTACKS[name]
        if not explain_unusable(name) and NEEDS_OF_FILES & ATTACKS[name]().needs:
            raise ValueError(
                f"{name} needs a file of images, which a job cannot name; run attacker replay --attack {name} --set "
                f"{list_files(ATTACKS[name])[0]}=FILE.npz on the service's machine"
            )
        return name

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, ArgumentValue], info: ValidationInfo) -> dict[str, ArgumentValue]:
        from attacker.attacks import ATTACKS, AttackSpec
        from attacker.attacks.arguments import check_settable

        if "attack" in info.data:
            name = info.data["attack"]
            check_settable(name, ATTACKS[name], arguments)
            try:
                AttackSpec(name=name, arguments=arguments)
            except (TypeError, ArithmeticError) as error:
                raise ValueError(f"{name}: {error}") from None
        return arguments

    @field_validator("rounds")
    @classmethod
    def _check_rounds(cls, rounds: str) -> str:
        from fedsim.recording.selection import parse_rounds

        parse_rounds(rounds)
        return rounds

    @field_validator("clients")
    @classmethod
    def _check_clients(cls, clients: tuple[str, ...]) -> tuple[str, ...]:
        from fedsim.recording.masked_vectors import SUM_CLIENT
        from fedsim.recording.writer import is_plain

        if invalid := [name for name in clients if name != SUM_CLIENT and not is_plain(name)]:
            raise ValueError(
                f"{invalid[0]!r} is not a valid client name, which has only letters, digits, - and _; copy it from fedsim show"
            )
        return clients


class AuditSpec(BaseModel):
    """Request of an audit of a recording: checks of its settings and updates, and attacks, for a graded verdict on what leaks.

    seconds: budget of time for the attacks and their nulls (the same attacks without the updates): of expected processor time on
    one core when they are chosen, and of wall-clock time after which they are stopped; the checks are not part of it.
    recording, priority: as in `JobSpec`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recording: Id
    seconds: Annotated[StrictFloat | StrictInt, Field(gt=0, le=MAX_AUDIT_SECONDS)]
    priority: Annotated[StrictInt, Field(ge=-10, le=10)] = 0


def read_stored_spec(fields: dict[str, Any]) -> JobSpec | AuditSpec:
    """Return the spec of a job from its stored fields, without validating them again: an `AuditSpec` if they lack `attack`."""
    return JobSpec.from_stored(fields) if "attack" in fields else AuditSpec.model_construct(**fields)


class FrozenModel(BaseModel):
    """Base class of messages between service and worker: immutable, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class JobProgress(FrozenModel):
    """The progress of a job. share: part of the work that is done, from 0 to 1. words: what is being done."""

    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    words: Annotated[str, Field(max_length=500)] = ""


class ReplaySummary(FrozenModel):
    """The results of one replay, that is, of one attack or one null on the chosen cases of a recording.

    source:  name of the folder with the reconstructions, below `reconstructions/`.
    null:    whether this was a null: an attack without the clients' updates, for comparison.
    done:    number of cases that the last attempt at the job reconstructed. skipped: number of cases that had been reconstructed
             before, also by earlier attempts at the job.
    failed:  dict from the key of a case, or a text that names an unreadable row of the recording, to the reason of failure. At
             most 500 are listed.
    routes:  dict from the method that reconstructed a case (a closed form, a search, or a guess without reading the update) to
             the number of cases that it reconstructed in the last attempt at the job; empty after an interruption.
    notes:   remarks for the user.
    """

    source: Annotated[str, Field(pattern=rf"^{FOLDER_NAME_PATTERN}$")]
    null: bool
    done: Annotated[int, Field(ge=0)]
    skipped: Annotated[int, Field(ge=0)]
    failed: dict[str, str] = {}
    routes: dict[str, int] = {}
    notes: tuple[str, ...] = ()


class Result(FrozenModel):
    """The results of a job so far.

    attacks: one entry for each attack, and for each null, that was run, in order.
    scored: whether reconstructions were compared with the clients' true examples. score_note: why reconstructions were
    not compared, if known, or for how many cases a comparison was impossible; else None.
    """

    attacks: tuple[ReplaySummary, ...] = ()
    scored: bool = False
    score_note: str | None = None


class Job(BaseModel):
    """A job as the API returns it.

    attempts: number of attempts at the job so far. crashes: number of attempts whose worker died unexpectedly; a user's request
    to run the job again sets `crashes` to 0, but not `attempts`.
    origin:   `request` for a request of a user, or `rule NAME` for one of the rules that submit jobs for new rounds.
    version:  the value of a counter at the last change of this job. The counter increases with each change of any job.
    created, started, ended: times of the submission, of the start of the last attempt, and of the transition to a final state;
    ISO 8601, UTC.
    error:    the reason for a final state other than "done", if there is one, in some cases with a traceback after a blank line.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    spec: JobSpec | AuditSpec
    state: JobState
    attempts: int = 0
    crashes: int = 0
    origin: str = "request"
    version: int = 0
    created: str
    started: str | None = None
    ended: str | None = None
    progress: JobProgress = JobProgress()
    error: str | None = None
    result: Result | None = None
