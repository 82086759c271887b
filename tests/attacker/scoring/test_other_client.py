"""Tests of the second null: an example is compared with the attack's reconstruction of another client's update."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federations import federate, make_replay

from attacker.attacks import AttackSpec
from attacker.reconstruction import Reconstruction
from attacker.replay.results import write_failure
from attacker.scoring import Scorer, summarise
from attacker.scoring.comparison import compare_with_other, pair_clients
from attacker.scoring.truth.originals import CaseObservation


def make_case(key: str, client: str, round: int, status: str = "complete") -> dict[str, object]:
    return {"key": key, "client": client, "round": round, "status": status}


def test_cases_are_paired_with_another_client_preferably_of_the_same_round() -> None:
    cases = [make_case("1a", "a", 1), make_case("2b", "b", 2), make_case("1b", "b", 1), make_case("3a", "a", 3)]
    assert pair_clients(cases) == {"1a": "1b", "2b": "3a", "1b": "1a", "3a": "2b"}
    assert pair_clients([make_case("1a", "a", 1), make_case("2a", "a", 2)]) == {}
    assert pair_clients([make_case("1a", "a", 1), make_case("1b", "b", 1, "failed")]) == {}


def test_an_exact_attack_recovers_nothing_from_another_clients_update(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", model={"name": "mlp", "hidden": [32]}, clients=3)
    spec = AttackSpec(name="exact", arguments={"fallback": "none"})
    replayed = make_replay(run, spec).run()
    scorer = Scorer(run, [run / "truth"])
    rows = scorer.score(replayed.folder)
    assert [(row.success, row.other_success) for row in rows] == [(True, False)] * 3

    # the first case is paired with the second client, whose reconstruction is exact
    _, truth, labels = scorer.truth.read_originals([CaseObservation(1, 1, (rows[0].client,))])
    _, other, _ = scorer.truth.read_originals([CaseObservation(1, 1, (rows[1].client,))])
    expected = float(10 * torch.log10(1 / (truth[0] - other[0]).square().mean()))
    assert rows[0].other_psnr == pytest.approx(expected, abs=0.05)
    (summary,) = summarise(rows)
    assert summary.other_success.value == 0
    constant = scorer.gallery.repeat_constant(1)
    assert compare_with_other(replayed.folder, None, truth, labels.tolist(), scorer.data.spec, [1], constant, "no weights") == [
        {}
    ]
    assert compare_with_other(
        replayed.folder, "99999-x", truth, labels.tolist(), scorer.data.spec, [1], constant, "no weights"
    ) == [{}]

    path = replayed.folder / f"{rows[1].case}.safetensors"
    answer = Reconstruction.read(path)
    replace(answer, y=answer.y.repeat(2)).write(path)  # as a damaged file may hold
    again = {row.case: row for row in scorer.score(replayed.folder)}
    assert again[rows[0].case].other_success is False
    assert again[rows[0].case].success


def test_failures_stay_in_the_denominator(tmp_path: Path) -> None:
    """One of three clients fails, and another has lost one of its two examples: six examples stay in both shares."""
    run = federate(tmp_path / "run", model={"name": "mlp", "hidden": [32]}, clients=3, batch_size=2)
    spec = AttackSpec(name="exact", arguments={"fallback": "none"})
    replayed = make_replay(run, spec).run()
    scorer = Scorer(run, [run / "truth"])
    first, second, _ = dict.fromkeys(row.case for row in scorer.score(replayed.folder))
    (replayed.folder / f"{first}.safetensors").unlink()
    write_failure(replayed.folder, first, "it failed")
    path = replayed.folder / f"{second}.safetensors"
    answer = Reconstruction.read(path)
    left = {"x": answer.x[:1], "y": answer.y[:1], "confidence": answer.confidence[:1], "slots": answer.slots[:1]}
    replace(answer, **left, explained=None, evidence={}).write(path)
    rows = scorer.score(replayed.folder)
    assert len(rows) == 6
    assert all(row.other_success is not None and row.other_psnr is not None for row in rows)
    (summary,) = summarise(rows)
    for share in (summary.success, summary.label_success, summary.identified, summary.other_success, summary.psnr):
        assert share.count == 6
    assert summary.other_psnr.count == 6
