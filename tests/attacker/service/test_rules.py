"""Tests of rules, which submit jobs for new rounds of recordings: selection, budgets, and no job twice."""

import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from changed_recordings import change_index, change_manifest

from attacker.service import rules as module
from attacker.service.background import BackgroundWork
from attacker.service.http.app import make_components
from attacker.service.jobs.job import Result
from attacker.service.jobs.queue import Limits, Queue, TooManyJobs
from attacker.service.jobs.rule_history import RecordingIdentity
from attacker.service.rules import Rules, read
from attacker.service.settings import ServiceSettings

EXAMPLE = Path(__file__).parents[3] / "deploy" / "rules.toml"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(tmp_path / "queue.sqlite", Limits(max_queued=50))
    yield queue
    queue.close()


class RulesWithRounds:
    """Rules, and the rounds of recordings that have arrived so far."""

    def __init__(self, path: Path, queue: Queue, root: Path) -> None:
        self.rules = Rules(path, queue, root)
        self.there: dict[RecordingIdentity, dict[int, int]] = {}

    def arrived(self, id: str, rounds: Iterable[int], *, attempt: int = 1, identity: str = "a") -> None:
        attempts = self.there.setdefault(RecordingIdentity(id, identity), {})
        attempts.update(dict.fromkeys(rounds, attempt))
        self.rules.follow(RecordingIdentity(id, identity), attempts)


def rules(queue: Queue, tmp_path: Path, *lines: str) -> RulesWithRounds:
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nname = "live"\nattack = "exact"\n' + "\n".join(lines))
    return RulesWithRounds(path, queue, tmp_path)


def list_submitted(queue: Queue) -> list[tuple[str, str]]:
    """Return recording and rounds of all queued jobs, from the oldest."""
    return [(job.spec.recording, job.spec.rounds) for job in reversed(queue.list(state="queued"))]


def list_rounds(queue: Queue) -> list[str]:
    return [rounds for _, rounds in list_submitted(queue)]


def finish_job(queue: Queue, *, cpu: float) -> None:
    """Claim the next job, and publish a result that took `cpu` seconds."""
    claim = queue.claim("me")
    assert claim is not None
    queue.publish(claim, Result(), cpu=cpu)


def test_each_new_round_makes_a_job_once_also_after_a_restart(queue: Queue, tmp_path: Path) -> None:
    given = rules(queue, tmp_path, 'arguments = { route = "linear" }', "seed = 3", "null = false", "priority = 2")
    given.arrived("photos", [1])
    given.arrived("photos", [1, 2])
    given.arrived("other", [1])
    assert list_submitted(queue) == [("photos", "1"), ("photos", "2"), ("other", "1")]
    job = queue.list()[-1]
    assert job.origin == "rule live"
    assert (job.spec.attack, job.spec.arguments, job.spec.seed) == ("exact", {"route": "linear"}, 3)
    assert (job.spec.null, job.spec.priority, job.spec.clients) == (False, 2, ())
    again = RulesWithRounds(tmp_path / "rules.toml", queue, tmp_path)
    again.arrived("photos", [1, 2, 3])
    assert list_submitted(queue)[3:] == [("photos", "3")]


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ("all", "1 2 3 4 5 6"),
        ("first", "1"),
        ("every=1", "1 2 3 4 5 6"),
        ("every=2", "1 3 5"),
        ("every=4", "1 5"),
        ("2-3,6", "2 3 6"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_rule_applies_to_the_rounds_that_it_names(
    queue: Queue, tmp_path: Path, rounds: str, expected: str, at_once: bool
) -> None:
    given = rules(queue, tmp_path, f'rounds = "{rounds}"')
    for some in [range(1, 7)] if at_once else [[round] for round in range(1, 7)]:
        given.arrived("photos", some)
    assert list_rounds(queue) == expected.split()


def test_last_is_the_last_of_rounds_that_arrive_together(queue: Queue, tmp_path: Path) -> None:
    given = rules(queue, tmp_path, 'rounds = "last"')
    for some in ([1, 2, 3], [4], [5, 6]):
        given.arrived("photos", some)
    assert list_rounds(queue) == ["3", "4", "6"]


def test_rule_applies_to_recordings_that_match_a_pattern(queue: Queue, tmp_path: Path) -> None:
    given = rules(queue, tmp_path, 'recordings = ["photos", "group~*"]')
    for name in ("photos", "photos2", "group~a", "group", "other~group~a"):
        given.arrived(name, [1])
    assert [name for name, _ in list_submitted(queue)] == ["photos", "group~a"]


def test_rule_applies_to_clients_that_match_a_pattern(queue: Queue, root: Path, tmp_path: Path) -> None:
    from fedsim.recording import Recording

    names = Recording(root / "digits" / "recording").list_clients()
    (tmp_path / "rules.toml").write_text(
        f'[[rule]]\nname = "one"\nattack = "exact"\nclients = ["{names[1][:6]}*"]\n'
        '[[rule]]\nname = "none"\nattack = "exact"\nclients = ["zzz*"]\n'
    )
    given = RulesWithRounds(tmp_path / "rules.toml", queue, root)
    given.arrived("digits", [1, 2])
    assert [(job.origin, job.spec.clients) for job in queue.list()] == [("rule one", (names[1],))] * 2


def test_attack_on_whole_clients_gets_all_rounds_so_far(queue: Queue, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nname = "clients"\nattack = "agic"\nrounds = "every=3"\n')
    RulesWithRounds(path, queue, tmp_path).arrived("photos", [1, 2, 3, 4])
    assert list_rounds(queue) == ["1-1", "1-4"]


def test_oldest_waiting_rounds_are_left_out_and_logged(queue: Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = rules(queue, tmp_path, "budget = { behind = 2 }")
    with caplog.at_level(logging.WARNING):
        given.arrived("photos", range(1, 6))
    assert list_rounds(queue) == ["4", "5"]
    assert "leaves out 3 rounds from 1 to 3" in caplog.text
    running = queue.claim("me")
    assert running.spec.rounds == "4"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        given.arrived("photos", [6])
    assert list_rounds(queue) == ["6"]
    assert "leaves out round 5" in caplog.text
    (left,) = queue.list(state="cancelled")
    assert "round 5 is left out" in (left.error or "")
    assert queue.list_cancelled([running]) == set(), "what runs is not disturbed"
    given.arrived("photos", range(1, 7))
    assert list_rounds(queue) == ["6"], "what was left out stays so"
    given.arrived("other", [1, 2])
    assert len(list_submitted(queue)) == 3, "each recording has its own"


def test_jobs_per_hour_are_limited(
    queue: Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = rules(queue, tmp_path, "budget = { jobs_per_hour = 2 }")
    given.arrived("photos", [1, 2, 3])
    assert list_rounds(queue) == ["1", "2"]
    assert "leaves out round 3: 2 jobs were submitted within an hour" in caplog.text
    with queue.store.open_transaction() as db:
        db.execute("UPDATE jobs SET created = '2020-01-01T00:00:00.000+00:00' WHERE number = 1")
    given.arrived("photos", [4])
    assert list_rounds(queue) == ["1", "2", "4"]


def test_cpu_seconds_are_limited_per_recording(queue: Queue, tmp_path: Path) -> None:
    given = rules(queue, tmp_path, "budget = { cpu_seconds = 10.0 }")
    given.arrived("photos", [1])
    finish_job(queue, cpu=9.0)
    given.arrived("photos", [2])
    finish_job(queue, cpu=2.0)
    given.arrived("photos", [3])
    given.arrived("other", [1])
    assert list_submitted(queue) == [("other", "1")]


def test_rounds_refused_by_a_full_queue_are_submitted_later(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "q.sqlite", Limits(max_queued=2))
    given = rules(queue, tmp_path)
    with pytest.raises(TooManyJobs):
        given.arrived("photos", [1, 2, 3])
    assert queue.claim("me") is not None
    assert queue.claim("me") is not None
    given.arrived("photos", [4])
    assert list_rounds(queue) == ["3", "4"]
    queue.close()


def test_recordings_of_one_name_are_distinguished(queue: Queue, tmp_path: Path) -> None:
    given = rules(queue, tmp_path)
    given.arrived("photos", [1, 2])
    given.arrived("photos", [1], identity="b")
    given.arrived("photos", [2, 3], identity="b")
    assert list_submitted(queue) == [("photos", rounds) for rounds in "12123"]
    given.arrived("photos", [], identity="a")
    assert len(list_submitted(queue)) == 5, "one that comes back is known"


def test_each_recording_has_its_own_budget(queue: Queue, tmp_path: Path) -> None:
    given = rules(queue, tmp_path, "budget = { cpu_seconds = 10.0, behind = 2 }")
    given.arrived("photos", [1])
    finish_job(queue, cpu=11.0)
    given.arrived("photos", [1], identity="b")
    given.arrived("photos", [2], identity="b")
    given.arrived("photos", [1, 2], identity="c")
    assert list_rounds(queue) == ["1", "2", "1", "2"], "what waits of an earlier one is not in the way"
    given.arrived("photos", [2], identity="a")
    assert len(list_submitted(queue)) == 4, "the first one has used all that it may"


@pytest.mark.parametrize(
    ("rounds", "before", "after"), [("all", "1 2 3", "2 3"), ("first", "1", ""), ("last", "3", "3"), ("2", "2", "2")]
)
def test_repeated_round_is_attacked_again_and_logged(
    queue: Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture, rounds: str, before: str, after: str
) -> None:
    """Rounds 2 and 3 arrive again, as if a federation was killed in round 3 and resumed after round 1."""
    given = rules(queue, tmp_path, f'rounds = "{rounds}"')
    given.arrived("photos", [1, 2, 3])
    assert list_rounds(queue) == before.split()
    assert "again" not in caplog.text
    for _ in range(2):
        given.arrived("photos", [2, 3], attempt=2)
    assert list_rounds(queue) == before.split() + after.split()
    again = [
        f"rule live, photos: submits a job for round {round} again: the round was recorded again, in attempt 2 of the federation"
        for round in after.split()
    ]
    assert [record.message for record in caplog.records if "again" in record.message] == again


def test_repeated_first_round_is_attacked_again(queue: Queue, tmp_path: Path) -> None:
    given = rules(queue, tmp_path, 'rounds = "first"')
    given.arrived("photos", [1])
    given.arrived("photos", [1], attempt=2)
    given.arrived("photos", [2], attempt=2)
    assert list_rounds(queue) == ["1", "1"]


def test_new_run_of_a_deleted_name_is_attacked_from_its_first_round(root: Path, tmp_path: Path, federated: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nname = "live"\nattack = "exact"\n')
    components = make_components(ServiceSettings(root=root, workers=0, rules=path))
    background = BackgroundWork(components)
    for _ in range(2):
        background.apply_rules(components.catalogue.scan().arrived)
    assert list_submitted(components.queue) == [("digits", "1"), ("digits", "2")]
    shutil.rmtree(root / "digits")
    shutil.copytree(federated, root / "digits")
    change_manifest(root / "digits" / "recording", created="2999-01-01T00:00:00Z")
    background.apply_rules(components.catalogue.scan().arrived)
    assert list_submitted(components.queue)[2:] == [("digits", "1"), ("digits", "2")]
    change_index(root / "digits" / "recording", "UPDATE observations SET attempt = 2 WHERE round = 2")
    background.apply_rules(components.catalogue.scan().arrived)
    background.apply_rules(components.catalogue.scan().arrived)
    assert list_submitted(components.queue)[4:] == [("digits", "2")]
    components.queue.close()


GOOD = '[[rule]]\nname = "a"\nattack = "cpl"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no rule"),
        ("rule = 3", "holds no rule"),
        ("[[rules]]\nname='a'", "unknown key 'rules'"),
        ("[[rule]\n", "rules.toml: "),
        ("[[rule]]\nname = 'a'\n", r"rule 1 \('a'\): attack: Field required"),
        (GOOD + GOOD, "two rules have the name 'a'"),
        (GOOD + 'round = "all"', r"rule 1 \('a'\): round: "),
        (GOOD + 'rounds = "every=0"', "such as every=5"),
        (GOOD + "arguments = { stepz = 1 }", "stepz"),
        (GOOD + "budget = { behind = 0 }", "budget.behind"),
        (GOOD.replace('"cpl"', '"os:system"'), "code that is not part of this project"),
        (GOOD.replace('"a"', '"../a"'), "name"),
    ],
)
def test_invalid_file_of_rules_is_refused_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as raised:
        read(path)
    assert str(path) in str(raised.value)


def test_shipped_example_is_a_valid_file_of_rules() -> None:
    assert [rule.name for rule in read(EXAMPLE)] == ["at-once", "search"]
    assert set(module.Budget.model_fields) == {"jobs_per_hour", "cpu_seconds", "behind"}
