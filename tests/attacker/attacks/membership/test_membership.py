"""Tests of the attack `membership`: which candidates it names, when it is sure, and which archives it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observations import make_image_case, observe_steps
from torch import Generator, Tensor

from attacker.attacks import AttackSpec, Case
from attacker.attacks.base import explain_refusal
from attacker.attacks.membership.confidence import estimate_membership
from attacker.attacks.membership.pool import MAX_CANDIDATES, Pool, read_pool
from attacker.attacks.membership.regression import Coefficients, Regression, combine
from attacker.attacks.membership.values import choose_values
from attacker.attacks.needs import list_oracles
from attacker.reconstruction import Reconstruction
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode

DATA = DataSpec(shape=(1, 8, 8), num_classes=4, mean=(0.5,), std=(0.5,))
MODEL = ModelSpec(name="mlp", arguments={"hidden": [32]})
EXAMPLES, POOL = 8, 120
Archive = tuple[Path, Tensor, Tensor]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """Path, images and labels of an archive of random candidates."""
    pixels = np.random.default_rng(1).integers(0, 256, (POOL, 8, 8), dtype=np.uint8)
    labels = np.arange(POOL) % DATA.num_classes
    np.savez(tmp_path / "pool.npz", images=pixels, labels=labels)
    return tmp_path / "pool.npz", torch.from_numpy(pixels / 255).float()[:, None], torch.from_numpy(labels)


def attack(path: Path, *observations: Observation, null: bool = False, seed: int = 0) -> Reconstruction:
    built = AttackSpec(name="membership", arguments={"candidates": str(path)}, null=null).build()
    (found,) = built([Case(observations)], rng=Generator().manual_seed(seed))
    return found


def count_named(found: Reconstruction, x: Tensor) -> int:
    return sum(bool((own == one).all()) for own in x for one in found.x)


@pytest.mark.parametrize("defense", ["", "top_k(0.3)", "sign('mean')", "gaussian(snr_db=10)"])
def test_examples_of_several_local_steps_are_named(defense: str, archive: Archive) -> None:
    path, x, y = archive
    own = torch.arange(3, 3 + EXAMPLES)
    batches = [(x[rows], y[rows]) for rows in own.split(4)]
    found = attack(path, observe_steps(*batches, model=MODEL, data=DATA, learning_rate=0.05, momentum=0.9, defense=defense))
    assert count_named(found, x[own]) >= EXAMPLES - 1
    assert len(found.x) == EXAMPLES
    assert found.oracles == ()  # of the case; that it has candidates is a need, see below
    assert list_oracles(AttackSpec(name="membership").build().needs) == ("candidate images",)


def test_named_labels_are_those_of_the_candidates_and_none_is_named_twice(archive: Archive) -> None:
    path, x, y = archive
    found = attack(path, observe_steps((x[:EXAMPLES], y[:EXAMPLES]), model=MODEL, data=DATA))
    labels = {tuple(one.flatten().tolist()): int(label) for one, label in zip(x, y, strict=True)}
    assert [labels[tuple(one.flatten().tolist())] for one in found.x] == found.y.tolist()
    assert len({tuple(one.flatten().tolist()) for one in found.x}) == EXAMPLES


def test_null_names_as_many_as_chance(archive: Archive) -> None:
    path, x, y = archive
    seen = observe_steps((x[:EXAMPLES], y[:EXAMPLES]), model=MODEL, data=DATA)
    named = [count_named(attack(path, seen, null=True, seed=seed), x[:EXAMPLES]) for seed in range(60)]
    expected = EXAMPLES * EXAMPLES / POOL
    assert abs(np.mean(named) - expected) < 4 * np.std(named) / len(named) ** 0.5


def test_rounds_of_whole_epochs_are_combined_and_others_are_not(archive: Archive) -> None:
    """Rounds of whole epochs repeat the examples, so that all name the same; rounds of one step have examples of their own."""
    path, x, y = archive
    both = [x[:4], y[:4]], [x[4:8], y[4:8]]
    steps = [replace(observe_steps(tuple(one), model=MODEL, data=DATA), round=number) for number, one in enumerate(both, start=1)]
    found = attack(path, *steps)
    assert [count_named(replace(found, x=found.x[rows]), x[:8]) for rows in (slice(4), slice(4, 8))] == [4, 4]
    assert {(slot.round, slot.example) for slot in found.slots} == {(1 + i // 4, i) for i in range(8)}
    noisy = [
        observe_steps((x[:4], y[:4]), model=MODEL, data=DATA, seed=seed, defense="gaussian(snr_db=-22)") for seed in range(12)
    ]
    whole = Training(learning_rate=0.1, batch_size=4, epochs=1), Training(learning_rate=0.1, batch_size=5, steps=1)
    for training in whole:  # a batch of five takes all of four examples
        rounds = [replace(one, round=number, training=training) for number, one in enumerate(noisy, start=1)]
        alone = np.mean([count_named(attack(path, one), x[:4]) for one in rounds])
        together = attack(path, *rounds)
        assert count_named(together, x[:4]) == 4 > alone + 0.5
        assert len(together.x) == 4
        assert {slot.round for slot in together.slots} == set(range(1, 13))


def test_other_direction_of_the_update_names_none(archive: Archive) -> None:
    """A step against the direction of descent makes the coefficients of the training examples the smallest ones."""
    path, x, y = archive
    seen = observe_steps((x[:EXAMPLES], y[:EXAMPLES]), model=MODEL, data=DATA)
    turned = replace(seen, payload=encode({name: -u for name, u in seen.update.items()}))
    assert count_named(attack(path, turned), x[:EXAMPLES]) == 0


def test_coefficients_are_those_of_ridge_regression() -> None:
    rng = Generator().manual_seed(0)
    rows, true = torch.randn(30, 200, generator=rng, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    true[:5] = 1.0
    observed = true @ rows + torch.randn(200, generator=rng, dtype=torch.float64)
    regression = Regression(rows)
    found = regression.fit(observed)
    ridge, _ = regression._choose_ridge(regression.vectors.T @ rows @ observed, observed.square().sum(), 200)
    torch.testing.assert_close(found.values, torch.linalg.solve(rows @ rows.T + ridge * torch.eye(30), rows @ observed))
    assert (found.values[:5] > 0.6).all()
    assert (found.values[5:].abs() < 4 * found.variances[5:].sqrt()).all()
    assert 0.5 < (found.values[5:].square() / found.variances[5:]).mean() < 2.0


def test_noise_is_estimated_with_more_candidates_than_values() -> None:
    rng = Generator().manual_seed(0)
    rows = torch.randn(300, 200, generator=rng)
    ratios = []
    for _ in range(10):
        found = Regression(rows).fit(3 * torch.randn(200, generator=rng))
        ratios.append(float((found.values.square() / found.variances).mean()))
    assert 0.7 < np.mean(ratios) < 1.4


def test_combined_scores_weigh_rounds_by_their_precision() -> None:
    one = torch.tensor([1.0])
    sure, unsure = Coefficients(one, one, 0.1 * one), Coefficients(-3 * one, one, 1e6 * one)
    assert float(combine([sure])) == pytest.approx(1 / 0.1**0.5)
    assert float(combine([sure, unsure])) == pytest.approx(1 / 0.1**0.5, rel=1e-3)
    assert float(combine([sure, sure])) == pytest.approx((2 / 0.1) ** 0.5)


def test_round_that_hides_the_candidates_does_not_lower_the_scores() -> None:
    """With gradients a thousandth as long, noise leaves nothing; coefficients shrink, and with them their variance."""
    rng = Generator().manual_seed(0)
    rows, noise = torch.randn(60, 500, generator=rng), torch.randn(2, 500, generator=rng)
    clear = Regression(rows).fit(rows[3] + 0.5 * noise[0])
    hidden = Regression(1e-3 * rows).fit(1e-3 * rows[3] + 0.5 * noise[1])
    assert float(combine([clear])[3]) > 10
    assert float(combine([clear, hidden])[3]) > 0.98 * float(combine([clear])[3])


def test_rounds_that_are_not_finite_change_nothing() -> None:
    rng = Generator().manual_seed(0)
    rows, infinite = torch.randn(60, 200, generator=rng), torch.full((60, 200), torch.inf)
    good, bad = Regression(rows).fit(rows[3]), Regression(infinite).fit(rows[3])
    assert torch.equal(combine([good, bad]), combine([good]))
    assert torch.equal(combine([good, Regression(rows).fit(torch.full((200,), torch.nan))]), combine([good]))
    assert torch.equal(combine([good, Regression(rows).fit(torch.zeros(200))]), combine([good]))
    assert estimate_membership(combine([bad]), torch.zeros(60)).isnan().all()


def test_probabilities_are_those_of_the_mixture_and_undecided_without_members() -> None:
    rng = Generator().manual_seed(3)
    others, members, labels = (
        3 * torch.randn(900, generator=rng),
        15 + 3 * torch.randn(100, generator=rng),
        torch.arange(1000) % 4,
    )
    found = estimate_membership(torch.cat([others, members]), labels)
    assert found[:900].mean() < 0.01
    assert found[900:].mean() > 0.9
    assert abs(float(found.sum()) - 100) < 5
    assert estimate_membership(others, labels[:900]).isnan().all()
    assert estimate_membership(torch.cat([others[:30], members[:10]]), labels[:40]).isnan().all()  # too few
    assert estimate_membership(torch.zeros(100), labels[:100]).isnan().all()
    assert estimate_membership(torch.cat([others, members]), torch.arange(1000) % 60).isnan().all()  # 16 or 17 of a class


def test_probability_does_not_fall_with_the_score() -> None:
    rng = Generator().manual_seed(3)
    scores = torch.cat([torch.randn(900, generator=rng), 5 + torch.randn(90, generator=rng), torch.linspace(10, 60, 10)])
    found = estimate_membership(scores, torch.zeros(1000))[scores.argsort()]
    assert (found.diff() >= 0).all()
    assert found[-10:].min() > 0.99


@pytest.mark.parametrize("count", [100, 1000])
def test_heavy_tails_without_a_training_example_are_undecided(count: int) -> None:
    rng = Generator().manual_seed(1)
    for _ in range(10):  # Student's t distribution with five degrees of freedom
        spread = torch.randn(5, count, generator=rng).square().mean(dim=0).sqrt()
        assert estimate_membership(torch.randn(count, generator=rng) / spread, torch.zeros(count)).isnan().all()


def test_higher_scores_of_a_whole_class_make_no_candidate_certain() -> None:
    rng = Generator().manual_seed(4)
    scores, labels = torch.randn(1000, generator=rng), torch.arange(1000) % 10
    assert estimate_membership(scores + 3 * (labels == 2), labels).isnan().all()
    assert not estimate_membership(scores + 3 * (labels == 2), torch.zeros(1000)).isnan().any()


def test_confidence_is_high_for_the_named_examples(archive: Archive) -> None:
    path, x, y = archive
    found = attack(path, observe_steps((x[:EXAMPLES], y[:EXAMPLES]), model=MODEL, data=DATA))
    assert found.confidence.min() > 0.9
    assert attack(path, observe_steps((1 - x[:EXAMPLES], y[:EXAMPLES]), model=MODEL, data=DATA)).confidence.isnan().all()


def test_cases_together_give_what_each_gives_alone(archive: Archive) -> None:
    path, x, y = archive
    seen = [
        observe_steps((x[rows], y[rows]), model=MODEL, data=DATA, client=f"c{i}", defense="top_k(0.3)")
        for i, rows in enumerate((slice(8), slice(8, 16)))
    ]
    built = AttackSpec(name="membership", arguments={"candidates": str(path)}).build()
    together = built([Case((one,)) for one in seen], rng=Generator().manual_seed(0))
    for one, joint in zip(seen, together, strict=True):
        alone = attack(path, one)
        assert torch.equal(alone.x, joint.x)
        torch.testing.assert_close(alone.confidence, joint.confidence, equal_nan=True)


def test_update_of_zeros_names_candidates_at_random(archive: Archive) -> None:
    path, x, y = archive
    seen = observe_steps((x[:EXAMPLES], y[:EXAMPLES]), model=MODEL, data=DATA)
    nothing = replace(seen, payload=encode({name: torch.zeros_like(u) for name, u in seen.update.items()}))
    found = [attack(path, nothing, seed=seed) for seed in range(30)]
    assert all(one.confidence.isnan().all() for one in found)
    assert np.mean([count_named(one, x[:EXAMPLES]) for one in found]) < 1.5  # 0.53 expected, 8 in the order of the archive


def test_values_that_a_quantiser_sent_as_zero_are_compared() -> None:
    x, y = torch.rand(2, 1, 8, 8, generator=Generator().manual_seed(0)), torch.tensor([0, 1])
    dense, sparse = (observe_steps((x, y), model=MODEL, data=DATA, defense=defense) for defense in ("qsgd(2)", "top_k(0.1)"))
    assert sum(int((u == 0).sum()) for u in dense.update.values()) > 100
    assert sum(map(len, choose_values([dense], Generator()).values())) == sum(u.numel() for u in dense.update.values())
    chosen = choose_values([sparse], Generator())
    assert all(torch.equal(rows, sparse.sent[name].flatten().nonzero()[:, 0]) for name, rows in chosen.items())


def test_as_many_examples_as_candidates_are_refused(archive: Archive) -> None:
    path, x, y = archive
    seen = observe_steps((x, y), model=MODEL, data=DATA)
    with pytest.raises(ValueError, match=r"round 1, client c: 120 examples .* give more than 120 candidates"):
        attack(path, seen)
    few = replace(seen, num_examples=5)
    with pytest.raises(ValueError, match=r"round 2, client c: .* no number of examples.*--rounds"):
        attack(path, few, replace(few, round=2, num_examples=None))


def test_without_candidates_the_attack_says_how_to_give_them() -> None:
    case, _, _ = make_image_case(0)
    with pytest.raises(ValueError, match=r"--set candidates=FILE\.npz"):
        AttackSpec(name="membership").build()([case], rng=Generator())
    assert explain_refusal(AttackSpec(name="membership").build(), case) == ""


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": np.zeros((4, 8, 8))}, "need the arrays images and labels, and it holds pictures"),
        ({"images": np.zeros((4, 9, 8)), "labels": np.zeros(4, int)}, r"have the shape \(1, 9, 8\).*federation \(1, 8, 8\)"),
        ({"images": np.zeros((1, 8, 8)), "labels": np.zeros(1, int)}, "1 candidates; give at least 2"),
        (
            {"images": np.zeros((MAX_CANDIDATES + 1, 8, 8), np.uint8), "labels": np.zeros(MAX_CANDIDATES + 1, int)},
            "at most 20,000",
        ),
        ({"images": np.zeros((4, 8, 8)), "labels": np.array([0, 1, 2, 4])}, "whole numbers from 0 to 3"),
        ({"images": np.zeros((4, 8, 8)), "labels": np.zeros(4)}, "whole numbers from 0 to 3"),
        ({"images": np.full((4, 8, 8), np.nan), "labels": np.zeros(4, int)}, "numbers from 0 to 1, got nan"),
        ({"images": np.full((4, 8, 8), 2.0), "labels": np.zeros(4, int)}, "numbers from 0 to 1, got 2 to 2"),
        *(
            (
                {"images": np.full((4, 8, 8), value, kind), "labels": np.zeros(4, int)},
                rf"pool\.npz: array 'images' has type {shown}; give truth values, integers, numbers$",
            )
            for value, kind, shown in (("a", "<U1", "<U1"), ("0.5", "<U3", "<U3"), (None, "O", "object"))
        ),
    ],
)
def test_unsuitable_archive_is_refused(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "pool.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_pool(tmp_path / "pool.npz", DATA)


def test_missing_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.npz does not exist"):
        read_pool(tmp_path / "none.npz", DATA)


def test_blocks_of_a_large_pool_hold_every_candidate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attacker.attacks.membership.pool.MAX_JOINT", 50)
    pool = Pool(torch.zeros(120, *DATA.shape), torch.zeros(120, dtype=torch.long))
    blocks = pool.split(Generator().manual_seed(0))
    assert [len(rows) for rows in blocks] == [40, 40, 40]
    assert sorted(torch.cat(blocks).tolist()) == list(range(120))
    assert blocks[0].tolist() != list(range(40))
    monkeypatch.setattr("attacker.attacks.membership.pool.MAX_JOINT", 120)
    assert [rows.tolist() for rows in pool.split(Generator().manual_seed(0))] == [list(range(120))]


@pytest.mark.parametrize("defense", ["", "top_k(0.3, error_feedback=True)"])
def test_coefficients_of_blocks_are_those_of_their_own_regressions(defense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate has the coefficients of a pool that is its block alone, and examples are named in every block."""
    rng = np.random.default_rng(1)
    pool = Pool(torch.from_numpy(rng.random((POOL, *DATA.shape), dtype=np.float32)), torch.arange(POOL) % DATA.num_classes)
    case = Case((observe_steps((pool.x[:EXAMPLES], pool.y[:EXAMPLES]), model=MODEL, data=DATA, defense=defense),))
    monkeypatch.setattr("attacker.attacks.membership.pool.MAX_JOINT", 60)
    built, key = AttackSpec(name="membership").build(), case.observations[0].key
    whole = built.fit([case], pool, Generator().manual_seed(3))[key]
    blocks = pool.split(Generator().manual_seed(3))
    assert len(blocks) == 2
    for rows in blocks:
        alone = built.fit([case], pool.of(rows), Generator().manual_seed(3))[key]
        torch.testing.assert_close(whole.values[rows], alone.values)
        torch.testing.assert_close(whole.variances[rows], alone.variances)
        assert float(combine([alone])[rows < EXAMPLES].min()) > float(combine([alone])[rows >= EXAMPLES].median())
