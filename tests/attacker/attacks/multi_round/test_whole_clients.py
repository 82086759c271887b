"""Tests of attacks on all rounds of a client: which rounds are attacked together (a case), and which are left out."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_recordings import change_index
from federations import federate, make_replay
from reconstructions import make_reconstruction
from safetensors.torch import load_file, save_file

from attacker.attacks import ATTACKS, AttackSpec, Case, Need
from attacker.reconstruction import Reconstruction, list_slots
from attacker.replay.replay import Replay, ReplayResult
from fedsim.recording import DataSpec, ModelSpec, Recording

SEEN: list[list[Case]] = []


@dataclass(kw_only=True)
class RecordingAttack:
    """An attack that returns grey images, and records the cases that it was called with."""

    needs: frozenset[Need] = field(default=frozenset({Need.SAME_CLIENT, Need.NUM_EXAMPLES}))
    device: str = "cpu"

    def null(self) -> "RecordingAttack":
        return self

    def __call__(self, cases: Sequence[Case], *, rng, progress=None, memory=None) -> list[Reconstruction]:
        SEEN.append(list(cases))
        return [_grey(case, rng.initial_seed()) for case in cases]


def _grey(case: Case, seed: int) -> Reconstruction:
    slots = [slot for o in case.observations for slot in list_slots(o.round, o.client, [o.num_examples or 0])]
    count = len(slots)
    x, y = torch.full((count, *case.observations[0].data.shape), 0.5), torch.zeros(count, dtype=torch.long)
    return make_reconstruction(case.key, x, y, confidence=torch.zeros(count), slots=tuple(slots), attack="together", seed=seed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "digits", rounds=3, model={"name": "mlp", "hidden": [4]}, batch_size=2)


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ATTACKS._builtin, "together", RecordingAttack)
    SEEN.clear()
    return Path(shutil.copytree(finished, tmp_path / "run"))


def replay(run: Path, name: str = "together", **settings) -> Replay:
    arguments = {"steps": 2} if name == "cpl" else {}
    return Replay(
        recording=Recording(run / "recording"),
        spec=AttackSpec(name=name, arguments=arguments),
        out=run / "reconstructions",
        **settings,
    )


def clients(run: Path) -> list[str]:
    return Recording(run / "recording").list_clients()


def alter(run: Path, round: int, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first tensor in a file of a round together with its checksum, as if it had been received like this."""
    path = run / "recording" / "rounds" / f"{round:05d}" / f"{name}.safetensors"
    tensors = load_file(path)
    first = next(iter(tensors))
    save_file({**tensors, first: change(tensors[first].clone())}, path)
    table, where = ("rounds", "") if name == "global" else ("observations", f" AND client = '{name}'")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    change_index(run / "recording", f"UPDATE {table} SET sha256 = ? WHERE round = ?{where}", digest, round)


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = torch.nan
    return tensor


def read_entries(done: ReplayResult) -> dict[str, dict]:
    return {case["key"]: case for case in json.loads((done.folder / "attack.json").read_text())["cases"]}


def seen_rounds() -> dict[str, list[int]]:
    return {case.observations[0].client: [o.round for o in case.observations] for cases in SEEN for case in cases}


def test_every_client_is_one_case_of_all_its_rounds_in_order(run: Path) -> None:
    done = replay(run, chunk=2).run()
    assert seen_rounds() == {client: [1, 2, 3] for client in clients(run)}
    assert all(len({o.client for o in case.observations}) == 1 for case in SEEN[0])
    assert (done.done, done.skipped, done.failed, done.left_out) == (2, 0, {}, {})
    listed = read_entries(done)
    assert (
        sorted(listed) == sorted(case.key for case in SEEN[0]) == sorted(path.stem for path in done.folder.glob("*.safetensors"))
    )
    for case in listed.values():
        assert case["rounds"] == [[1, 1], [2, 1], [3, 1]]
        assert (case["round"], case["num_examples"], case["status"], case["left_out"]) == (1, 6, "complete", [])
        assert case["cohorts"] == [[case["client"]]] * 3
    again = replay(run).run()
    assert (again.done, again.skipped, len(SEEN)) == (0, 2, 1)


def test_interrupted_cases_are_attacked_by_the_next_replay(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_after_one(self, cases: Sequence[Case], *, rng, progress=None, memory=None) -> list[Reconstruction]:
        return [replace(_grey(cases[0], 0), interrupted=True)]

    whole = RecordingAttack.__call__
    monkeypatch.setattr(RecordingAttack, "__call__", interrupted_after_one)
    with pytest.raises(KeyboardInterrupt):
        replay(run, chunk=2).run()
    monkeypatch.setattr(RecordingAttack, "__call__", whole)
    assert len(list(replay(run).folder.glob("*.safetensors"))) == 1
    again = replay(run, chunk=2).run()
    assert (again.done, again.skipped) == (2, 0)


def test_selected_rounds_are_separate_cases_in_the_same_folder(run: Path) -> None:
    whole = replay(run).run()
    some = replay(run, rounds=frozenset({1, 3}), clients=frozenset(clients(run)[:1])).run()
    one = replay(run, rounds=frozenset({2})).run()
    assert whole.folder == some.folder == one.folder
    assert (some.done, one.done) == (1, 2)
    assert len(read_entries(one)) == 5
    assert f"00002-{clients(run)[0]}" in read_entries(one)


def test_attack_without_an_optimiser_gets_one_client_at_a_time(run: Path) -> None:
    replay(run).run()
    assert [len(cases) for cases in SEEN] == [1, 1]


def test_cases_share_the_weights_of_a_round_in_memory(run: Path) -> None:
    replay(run, chunk=2).run()
    (first, second) = SEEN[0]
    for mine, theirs in zip(first.observations, second.observations, strict=True):
        assert mine.weights is theirs.weights  # so that searches store shared weights once


def test_round_with_nan_is_left_out_with_the_reason(run: Path) -> None:
    bad, good = clients(run)
    alter(run, 2, bad, one_nan)
    done = replay(run).run()
    assert seen_rounds() == {bad: [1, 3], good: [1, 2, 3]}
    (case,) = (case for case in read_entries(done).values() if case["client"] == bad)
    ((round, reason),) = case["left_out"]
    assert round == 2
    assert reason.startswith("round 2: the update holds 1 value that is NaN or infinite, the first in ")
    assert done.left_out == {case["key"]: [(2, reason)]}
    assert (case["rounds"], case["num_examples"]) == ([[1, 1], [3, 1]], 4)
    assert (done.done, done.failed) == (2, {})


def test_round_with_infinite_values_fails_alone_in_attacks_on_single_rounds(run: Path) -> None:
    bad, _ = clients(run)
    alter(run, 2, bad, lambda t: t.fill_(torch.inf))
    done = replay(run, "cpl").run()
    assert (done.done, list(done.failed)) == (5, [f"00002-{bad}"])
    assert "the update holds" in done.failed[f"00002-{bad}"]


def test_round_whose_squares_overflow_is_left_out_with_the_reason(run: Path) -> None:
    bad, _ = clients(run)
    alter(run, 2, bad, lambda t: t.fill_(1e30))
    alter(run, 3, bad, lambda t: t.fill_(1e15))  # large but valid
    ((round, reason),) = (one for left in replay(run).run().left_out.values() for one in left)
    assert round == 2
    assert reason.startswith("round 2: the update holds values so large that their squares overflow, in ")


def test_round_of_zero_examples_is_left_out_and_of_unknown_number_kept(run: Path) -> None:
    change_index(run / "recording", "UPDATE observations SET num_examples = 0 WHERE round = 2")
    change_index(run / "recording", "UPDATE observations SET num_examples = NULL WHERE round = 3")  # the number is estimated
    done = replay(run).run()
    assert seen_rounds() == {client: [1, 3] for client in clients(run)}
    for ((_, two),) in done.left_out.values():
        assert two.endswith("reported 0")


def test_equal_reasons_are_printed_once(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from attacker.commands.progress_bar import replay_with_progress

    for round in (2, 3):
        alter(run, round, "global", one_nan)
    spec = AttackSpec(name="together")
    replay_with_progress(make_replay(run, spec))
    printed = capfd.readouterr().err
    assert "4 rounds were not attacked together" in printed
    assert printed.count("the weights that were sent hold") == printed.count(" and 1 more: ") == 2  # once for each round


def test_only_the_first_reasons_are_printed_and_the_rest_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    from attacker.commands.progress_bar import _print_reasons

    _print_reasons([(f"case {i}", f"reason {i % 5}") for i in range(10)])
    lines = [line.strip() for line in capfd.readouterr().err.splitlines()]
    assert lines == [*(f"case {i} and 1 more: reason {i}" for i in range(3)), "and 4 more for other reasons"]


def test_refusal_of_table_rows_names_the_argument_to_change() -> None:
    from types import SimpleNamespace

    from attacker.attacks.base import explain_refusal

    facts: dict[str, Any] = {"data": DataSpec(shape=(6,), num_classes=3), "model": ModelSpec(name="mlp")}
    rows: Any = SimpleNamespace(observations=[SimpleNamespace(num_examples=1, client="c", **facts)], known_labels=None)
    prior = "its prior is for images, and these data are table rows; "
    agic, hgap = (AttackSpec(name=name).build() for name in ("agic", "hgap"))
    agic.needs, hgap.needs = (frozenset({need}) for need in (Need.IMAGE_PRIOR, Need.IMAGE_CRITERION))
    assert explain_refusal(agic, rows) == prior + "--set tv=0 leaves it out"
    assert explain_refusal(hgap, rows) == prior.replace("prior", "criterion") + "--set criterion=gradient needs no images"
    assert explain_refusal(replace(agic, needs=frozenset()), rows) == ""
    for name, setting in (("agic", {"tv": 0.0}), ("inverting_gradients", {"tv": 0.0}), ("hgap", {"criterion": "gradient"})):
        assert not {Need.IMAGE_PRIOR, Need.IMAGE_CRITERION} & AttackSpec(name=name, arguments=setting).build().needs


def test_round_with_nan_weights_is_left_out_of_every_client(run: Path) -> None:
    alter(run, 3, "global", one_nan)
    done = replay(run).run()
    assert seen_rounds() == {client: [1, 2] for client in clients(run)}
    assert all("the weights that were sent hold" in reason for ((_, reason),) in done.left_out.values())


def test_damaged_failed_and_unusable_rounds_are_listed_with_reasons(run: Path) -> None:
    bad, good = clients(run)
    path = run / "recording" / "rounds" / "00001" / f"{bad}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    change_index(
        run / "recording",
        "UPDATE observations SET status = 'failed', reason = 'its disk is full', file = NULL, sha256 = NULL, codec = NULL"
        " WHERE round = 2 AND client = ?",
        good,
    )
    change_index(run / "recording", "UPDATE observations SET num_examples = 0 WHERE round = 3 AND client = ?", good)
    done = replay(run).run()
    assert seen_rounds() == {bad: [2, 3], good: [1]}
    assert (done.done, done.failed) == (2, {})
    reasons = {read_entries(done)[key]["client"]: dict(left) for key, left in done.left_out.items()}
    assert str(path) in reasons[bad][1]
    assert reasons[good][2] == "failed: its disk is full"
    assert reasons[good][3].endswith("reported 0")
    idle = read_entries(done)[f"00002-{good}"]
    assert (idle["status"], idle["reason"]) == ("failed", "its disk is full")


def test_a_client_without_a_usable_round_fails_with_all_reasons(run: Path) -> None:
    bad, good = clients(run)
    for round in (1, 2, 3):
        alter(run, round, bad, one_nan)
    done = replay(run).run()
    assert seen_rounds() == {good: [1, 2, 3]}
    ((key, reason),) = done.failed.items()
    assert read_entries(done)[key]["client"] == bad
    assert reason.startswith("none of its rounds can be used: round 1: the update holds")
    assert "round 3" in reason
    assert json.loads((done.folder / f"{key}.failed.json").read_text())["reason"] == reason


def test_labels_of_an_oracle_are_concatenated_by_round(run: Path) -> None:
    with_labels = replay(run, oracle_labels=lambda row: torch.tensor([row.round, row.round + 3]))
    with_labels.run()
    assert len(SEEN) == 2
    for (case,) in SEEN:
        assert case.known_labels.tolist() == [1, 4, 2, 5, 3, 6]


def test_unknown_clients_and_rounds_are_refused_with_the_known_ones(run: Path) -> None:
    names = ", ".join(clients(run))
    with pytest.raises(ValueError, match=f"holds no client 'nobody'. Its clients: {names}"):
        replay(run, clients=frozenset({"nobody", clients(run)[0]})).run()
    with pytest.raises(ValueError, match=r"holds no round 5-6,9\. Its rounds: 1-3"):
        replay(run, rounds=frozenset({5, 6, 9})).run()
    assert replay(run, rounds=frozenset({3, 4})).run().notes == ["the recording holds nothing of round 4"]
