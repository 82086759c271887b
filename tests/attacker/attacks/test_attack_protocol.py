"""Tests that any class with the four members of the attack protocol works in planning, replay, scoring and reports."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import run_attacker
from federations import federate, make_replay
from observations import make_image_case

import fedleak
from attacker.attacks import ATTACKS, AttackSpec, Case, Need
from attacker.attacks.answers import build_reconstruction
from attacker.attacks.base import Effort, estimate_effort
from attacker.attacks.needs import list_oracles
from attacker.reconstruction import Reconstruction
from attacker.replay.checkpoints import CHECKPOINT_SUFFIX
from attacker.replay.replay import Replay
from attacker.scoring import Scorer, summarise
from defenses.registry import references
from fedsim.recording import Recording


class Brightness:
    """An attack with only the four members of the protocol: it returns a grey image, its brightness from the update's norm."""

    def __init__(self, whole: bool = False) -> None:
        self.whole, self.device = whole, "cpu"
        self.needs = frozenset({Need.SAME_CLIENT if whole else Need.ONE_OBSERVATION, Need.NUM_EXAMPLES})

    def null(self) -> "Brightness":
        return self

    def __call__(self, cases: Sequence[Case], *, rng, progress=None, memory=None) -> list[Reconstruction]:
        if memory is not None:
            memory.keep("seen", {"cases": torch.tensor(len(cases))})
        return [self._answer(case, rng) for case in cases]

    def _answer(self, case: Case, rng: torch.Generator) -> Reconstruction:
        length = sum(float(t.norm()) for o in case.observations for t in o.update.values())
        count = sum(o.num_examples or 0 for o in case.observations)
        x = torch.full((count, *case.observations[0].data.shape), length / (1 + length))
        return build_reconstruction(case, x, torch.zeros(count).long(), attack="brightness", rng=rng, route="grey")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "digits", rounds=2, model={"name": "mlp", "hidden": [4]})


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ATTACKS._builtin, "brightness", Brightness)
    return Path(shutil.copytree(finished, tmp_path / "run"))


def replay(run: Path, *, null: bool = False, **arguments: object) -> Replay:
    spec = AttackSpec(name="brightness", arguments=arguments, null=null)
    return make_replay(run, spec)


def test_custom_attack_is_replayed_with_its_null_and_scored(run: Path) -> None:
    done, null = replay(run).run(), replay(run, null=True).run()
    assert (done.done, done.failed, null.done, null.failed) == (4, {}, 4, {})
    assert done.routes == {"grey": 4}
    assert not list(done.folder.glob(f"*{CHECKPOINT_SUFFIX}"))
    scorer = Scorer(run, [run / "truth"])
    rows = [row for folder in (done.folder, null.folder) for row in scorer.score(folder)]
    (summary,) = summarise(rows)
    assert summary.examples == 4
    assert summary.null is not None
    assert json.loads((done.folder / "attack.json").read_text())["oracles"] == []


def test_attack_without_the_parameter_does_not_know_the_defense(run: Path) -> None:
    assert not AttackSpec(name="brightness").knows_defense
    assert AttackSpec(name="cpl").knows_defense
    assert not AttackSpec(name="cpl", arguments={"knows_defense": False}).knows_defense


def test_object_without_the_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutNull:
        needs: frozenset[Need] = frozenset()

        def __call__(self, cases, *, rng, progress=None, memory=None): ...

    class NeedsAList(Brightness):
        def __init__(self) -> None:
            super().__init__()
            self.needs = [Need.ONE_OBSERVATION]

    for factory, words in ((lambda: 3, "this int has no needs"), (WithoutNull, "no null"), (NeedsAList, "a frozenset")):
        monkeypatch.setitem(ATTACKS._builtin, "wrong", factory)
        with pytest.raises(ValueError, match=words):
            AttackSpec(name="wrong")


class Faulty(Brightness):
    """An attack whose answers have one wrong field of `Reconstruction`, or that returns something else or raises (`fault`)."""

    def __init__(self, fault: str = "x") -> None:
        super().__init__()
        self.fault = fault

    def __call__(self, cases: Sequence[Case], *, rng, progress=None, memory=None):
        answers = super().__call__(cases, rng=rng)
        if self.fault == "raises":
            raise TypeError("a bug of the attack")
        whole = {"none": None, "empty": [], "tensors": [answer.x for answer in answers]}
        if self.fault in whole:
            return whole[self.fault]
        others = {
            "x": torch.rand(1, 8, 8), "y": torch.zeros(2).long(), "confidence": torch.zeros(1, 1), "loss": torch.zeros(0),
            "slots": (replace(answers[0].slots[0], example=1),), "case": "other",
        }  # fmt: skip
        return [replace(answer, **{self.fault: others[self.fault]}) for answer in answers]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("x", r"brightness: x must be floats of shape \(N, 1, 8, 8\), got float32 of shape \(1, 8, 8\); return one row"),
        ("y", r"brightness: y must be int64 of shape \(1,\), .* got int64 of shape \(2,\)"),
        ("confidence", r"confidence must be floats of shape \(1,\), NaN where nothing is known, got float32 of shape \(1, 1\)"),
        ("loss", r"loss must be floats of shape \(iterations,\), at least one, got float32 of shape \(0,\)"),
        ("slots", "a slot has example=1, but x has 1 rows; set it to the index of a row of x, from 0"),
        ("case", "no reconstruction was returned for this case; one has case='other', .*with case=case.key"),
        ("none", "brightness must return a list of Reconstruction, one per case, got NoneType"),
        ("tensors", "must return a list of Reconstruction, one per case, got a list of Tensor"),
        ("empty", "no reconstruction was returned for this case; return one per case"),
        ("raises", "TypeError: a bug of the attack"),
    ],
)
def test_wrong_answer_fails_with_advice(run: Path, fault: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTACKS._builtin, "brightness", Faulty)
    done = replay(run, fault=fault).run()
    assert (done.done, len(done.failed)) == (0, 4)
    assert all(re.search(words, reason) for reason in done.failed.values()), done.failed
    if fault not in ("case", "raises"):
        observation = next(iter(Recording(run / "recording").read_observations()))
        with pytest.raises(ValueError, match=words):
            fedleak.attack(observation, "brightness", fault=fault)


def test_verbose_shows_the_traceback_of_an_attack(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTACKS._builtin, "brightness", Faulty)
    command = ["replay", str(run), "--attack", "brightness", "--set", "fault=raises", "--no-null"]
    result = run_attacker(*command)
    assert "Traceback" not in result.output
    result = run_attacker(*command, "--verbose")
    assert "Traceback" in result.output
    assert 'raise TypeError("a bug of the attack")' in result.output
    assert isinstance(result.exception, RuntimeError)


def test_null_gets_an_update_of_zeros(run: Path) -> None:
    for null in (True, False):
        paths = list(replay(run, null=null).run().folder.glob("*.safetensors"))
        assert paths
        assert [bool(Reconstruction.read(path).x.any()) for path in paths] == [not null] * len(paths)


def test_attack_that_needs_all_rounds_gets_them_as_one_case(run: Path) -> None:
    done = replay(run, whole=True).run()
    assert done.done == 2
    rounds = {slot.round for path in done.folder.glob("*.safetensors") for slot in Reconstruction.read(path).slots}
    assert rounds == {1, 2}


def test_device_is_passed_to_attacks_and_nulls(run: Path) -> None:
    assert AttackSpec(name="brightness").build(device="meta").device == "meta"
    null = AttackSpec(name="brightness", null=True).build(device="meta")
    assert null.device == null.null().device == "meta"
    for name in ATTACKS:
        assert AttackSpec(name=name).build(device="meta").device == "meta"


def test_effort_is_estimated_also_without_an_own_estimate() -> None:
    assert estimate_effort(Brightness()) == Effort(evaluations=1, vectors=0)
    search = AttackSpec(name="inverting_gradients", arguments={"steps": 7}).build()
    null = AttackSpec(name="inverting_gradients", arguments={"steps": 7}, null=True).build()
    assert estimate_effort(search) == estimate_effort(null) == Effort(evaluations=7, vectors=2, local_steps="auto")


def test_oracles_follow_from_the_needs(tmp_path: Path) -> None:
    (tmp_path / "own.npz").write_bytes(b"")
    insider = AttackSpec(name="cpl", arguments={"init": "insider", "auxiliary": str(tmp_path / "own.npz")}).build()
    assert list_oracles(insider.needs) == ("images of the same class",)
    assert list_oracles(AttackSpec(name="cpl").build().needs) == ()


def test_built_reconstruction_fills_the_places_of_every_observation() -> None:
    case, x, y = make_image_case(0)
    several = Case((case.observations[0], case.observations[0]))
    found = build_reconstruction(several, torch.cat([x, x]), torch.cat([y, y]), attack="own", rng=torch.Generator(), route="r")
    assert [slot.example for slot in found.slots] == [0, 1]
    assert found.confidence.isnan().all()
    fewer = build_reconstruction(several, x, y, attack="own", rng=torch.Generator(), route="r")
    assert [slot.example for slot in fewer.slots] == [0, 0]


def test_custom_decoder_is_admitted_when_the_command_line_names_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from attacker.attacks.matching.decoders import pixels\ndef same(data):\n    return pixels(data)\n"
    (tmp_path / "named_decoders.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(references.CODE_VARIABLE, "")
    command = ["replay", str(run), "--attack", "cpl", "--set", "steps=1", "--set", "decoder=named_decoders:same", "--json"]
    result = run_attacker(*command)
    assert result.exit_code == 0, result.output
    assert references.list_admitted() == ("named_decoders:same",)
