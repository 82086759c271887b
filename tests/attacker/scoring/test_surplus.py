"""Tests of attacks that return more candidates than there are examples: the attack's ranking selects those that count."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reconstructions import make_reconstruction
from torch import nan

from attacker.reconstruction import Slot
from attacker.scoring import Scorer, ScoreRow, summarise
from attacker.scoring.assignment import assign_reconstructions, keep_first, rank_candidates
from attacker.scoring.truth.originals import count_places
from fedsim import data as datasets
from fedsim.recording.files import write_json
from fedsim.truth import RoundUsage, TruthWriter, describe_dataset

KNOWN = {**dict.fromkeys(("model", "defense", "gradient", "network", "inputs"), ""), "secure_aggregation": False}
EIGHT = tuple(range(8))


class Surplus:
    """A run of one case with constructed digits used in each round, and a constructed reconstruction."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / "reconstructions" / "cpl-00000000"
        self.data = datasets.load("digits")
        self.folder.mkdir(parents=True)
        describe_dataset(run / "truth", lambda: datasets.describe(self.data, "digits", {}))

    def rows(
        self, used: Sequence[Sequence[int]], candidates: Sequence[int], confidence: Sequence[float], **training: Any
    ) -> dict[int, ScoreRow]:
        """Return score rows by index. used: digits of each round. candidates: digits that the attack found, -1 for noise."""
        writer, rounds = TruthWriter(self.run / "truth", "ada"), range(1, len(used) + 1)
        for number, indices in zip(rounds, used, strict=True):
            writer.write(number, 1, [indices])
        case = {"key": "one", "round": 1, "attempt": 1, "client": "ada", "status": "complete", "num_examples": len(used[0])}
        if len(used) > 1:
            case |= {"rounds": [[number, 1] for number in rounds], "cohorts": [["ada"]] * len(used)}
        facts = {"attack": "cpl", "spec": "cpl()", "null": False, "knows_defense": True, "oracles": [], "seed": 0}
        write_json(self.folder / "attack.json", {**facts, "run": {"name": "run", **KNOWN, "training": training}, "cases": [case]})
        x, y = self.data.train[[max(index, 0) for index in candidates]]
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        x[[index < 0 for index in candidates]] = noise[[index < 0 for index in candidates]]
        answer = make_reconstruction("one", x, y, confidence=torch.tensor(confidence), slots=(Slot(1, "ada", 1, 0, 0),))
        answer.write(self.folder / "one.safetensors")
        return {row.index: row for row in Scorer(self.run, [self.run / "truth"]).score(self.folder)}


@pytest.fixture
def surplus(tmp_path: Path) -> Surplus:
    return Surplus(tmp_path)


def test_good_candidates_of_low_rank_do_not_count(surplus: Surplus) -> None:
    """Of 24 candidates for 8 examples, selecting the good third by the true examples would give full recovery."""
    rows = surplus.rows([EIGHT], [-1] * 16 + list(EIGHT), [0.9] * 16 + [0.1] * 8)
    assert not any(row.success for row in rows.values())
    assert {row.surplus for row in rows.values()} == {16}
    (summary,) = summarise(rows.values())
    assert summary.surplus == 16
    assert summary.success.value == 0


def test_good_candidates_of_high_rank_count(surplus: Surplus) -> None:
    rows = surplus.rows([EIGHT], [-1] * 16 + list(EIGHT), [0.1] * 16 + [0.9] * 8)
    assert all(row.success and row.label_success for row in rows.values())


def test_labels_of_surplus_candidates_do_not_count(surplus: Surplus) -> None:
    wrong, right = surplus.data.train[[0, 1]][1].tolist()
    assert wrong != right
    rows = surplus.rows([[1]], [0, 1], [0.9, 0.8])
    assert (rows[1].label_recovered, rows[1].label_success, rows[1].success) == (wrong, False, False)


def test_repeated_candidates_use_up_the_places(surplus: Surplus) -> None:
    rows = surplus.rows([EIGHT, EIGHT, EIGHT], [*EIGHT, *EIGHT, *EIGHT], [0.9] * 8 + [0.8] * 16)
    assert {row.surplus for row in rows.values()} == {16}
    assert all(row.success for row in rows.values())
    rows = surplus.rows([EIGHT, EIGHT, EIGHT], [one for one in EIGHT for _ in range(3)], [0.9] * 24)
    assert sum(row.success for row in rows.values()) == 3


@pytest.mark.parametrize(
    ("used", "found", "confidence", "epochs", "successes", "count"),
    [
        ([4, 5, 4], [4, 4, 5], [0.9, 0.8, 0.1], 1, [4, 5], 0),  # the client reports three examples; two of them are equal
        ([4, 5, 5, 4], [-1, -1, 4, 5], [0.9, 0.8, 0.7, 0.6], 2, [], 2),
        (EIGHT, [3, 5], [nan, 0.1], 1, [3, 5], 0),
    ],
    ids=["an example used twice in a round", "two local epochs", "fewer candidates than examples"],
)
def test_room_for_candidates_is_that_of_one_epoch(
    surplus: Surplus, used: list[int], found: list[int], confidence: list[float], epochs: int, successes: list[int], count: int
) -> None:
    rows = surplus.rows([used], found, confidence, epochs=epochs)
    assert sorted(rows) == sorted(set(used))
    assert [index for index, row in rows.items() if row.success] == successes
    assert {row.surplus for row in rows.values()} == {count}


@pytest.mark.parametrize(
    ("confidence", "explained", "order"),
    [
        ([0.1, 0.9, 0.5], None, [1, 2, 0]),
        ([0.5, 0.5, 0.5], [0.1, 0.2, 0.3], [0, 1, 2]),
        ([nan, 0.0, nan], None, [1, 0, 2]),
        ([nan, 0.0, nan, nan], [0.1, 0.0, 0.7, nan], [1, 2, 0, 3]),
    ],
    ids=["by confidence", "equals in order", "undecided last", "undecided by what they explain"],
)
def test_ranking(confidence: list[float], explained: list[float] | None, order: list[int]) -> None:
    assert rank_candidates(torch.tensor(confidence), None if explained is None else torch.tensor(explained)) == order


def test_surplus_candidates_need_a_ranking() -> None:
    with pytest.raises(ValueError, match="3 reconstructions for 2 examples"):
        assign_reconstructions(torch.zeros(3, 1), torch.zeros(2, 1))
    assert assign_reconstructions(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [0.1]])) == [1, 0]
    assert assign_reconstructions(torch.tensor([[0.2], [1.0], [0.0]]), torch.tensor([[1.0], [0.1]]), [1, 2]) == [1, 0]


def test_the_slots_of_kept_examples_follow_them() -> None:
    slots = tuple(Slot(1, "ada", 1, position, position) for position in range(3))
    x, y = torch.arange(3.0)[:, None], torch.arange(3)
    kept = keep_first(make_reconstruction("one", x, y, confidence=torch.tensor([0.1, 0.9, 0.5]), slots=slots), 2)
    assert (kept.x.flatten().tolist(), kept.y.tolist(), kept.confidence.tolist()) == ([1, 2], [1, 2], pytest.approx([0.9, 0.5]))
    assert [(slot.position, slot.example) for slot in kept.slots] == [(1, 0), (2, 1)]


def test_places_of_examples_are_counted() -> None:
    used = [RoundUsage(((4, 5), (4,))), RoundUsage(((5, 6),))]
    assert count_places(used) == {4: 2, 5: 1, 6: 1}
    assert count_places([RoundUsage(((4, 5), (5, 4)))], epochs=2) == {4: 1, 5: 1}
