"""Tests of sparsifiers against simple implementations, including ties and rounding."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from generators import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from registered_defenses import apply_once
from torch import Tensor

from defenses import Defense, DefenseSpec, Update, channels, gradient_dropout, prune, random_k, top_k
from defenses.sparsification import count_kept, find_largest


def of(defense: Defense, *values: float) -> list[float]:
    sent: list[float] = apply_once(defense, {"w": torch.tensor(values)})["w"].tolist()
    return sent


def test_top_k_keeps_a_hand_example() -> None:
    assert of(top_k(0.5), 1, -4, 3, -2) == [0, -4, 3, 0]
    assert of(top_k(0.25), 1, -4, 3, -2) == [0, -4, 0, 0]
    assert of(top_k(1), 1, -4, 3, -2) == [1, -4, 3, -2]


# --- top-k ---


def test_of_equal_magnitudes_top_k_keeps_the_first() -> None:
    assert of(top_k(0.5), 2, -2, 2, -2) == [2, -2, 0, 0]
    assert of(top_k(0.6), 1, -2, 1, 2, 1) == [1, -2, 0, 2, 0]
    assert of(top_k(0.5), 0, 0, 0, 0) == [0, 0, 0, 0]


@settings(deadline=None, max_examples=150)
@given(values=st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]), max_size=30), k=st.integers(0, 31))
def test_exactly_k_are_chosen_and_they_are_those_of_a_stable_sort(values: list[float], k: int) -> None:
    chosen = find_largest(torch.tensor(values), k)
    by_rank = np.argsort(-np.abs(np.array(values)), kind="stable")[:k]
    assert chosen.dtype == torch.bool
    assert set(chosen.nonzero().flatten().tolist()) == set(by_rank.tolist())


@settings(deadline=None, max_examples=200)
@given(thousandths=st.integers(1, 1000), n=st.integers(0, 10_000))
def test_the_share_is_rounded_up_from_the_number_that_was_written(thousandths: int, n: int) -> None:
    """In floating point 0.07 * 100 is more than 7."""
    assert count_kept(thousandths / 1000, n) == math.ceil(Fraction(thousandths, 1000) * n)
    assert count_kept(0.07, 100) == 7


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_top_k_counts_in_each_tensor_or_in_all_together(scope: str) -> None:
    update = {"small": 0.01 * torch.randn(10, generator=seeded(1)), "big": torch.randn(3, 10, generator=seeded(2))}
    sent = apply_once(top_k(0.5, scope=scope), update)
    counts = {name: int((t != 0).sum()) for name, t in sent.items()}
    assert counts == ({"small": 5, "big": 15} if scope == "tensor" else {"small": 0, "big": 20})


def test_of_equal_magnitudes_in_several_tensors_the_first_name_goes_first() -> None:
    sent = apply_once(top_k(0.5, scope="global"), {"b": torch.ones(2), "a": torch.ones(2)})
    assert sent["a"].tolist() == [1, 1]
    assert sent["b"].tolist() == [0, 0]


def test_what_is_not_sent_is_plus_zero_bit_for_bit() -> None:
    update = {"w": -torch.arange(1.0, 9.0)}
    for defense in (top_k(0.5), random_k(0.5, rescale=True), prune(0.5), gradient_dropout(0.5, rescale=True)):
        sent = apply_once(defense, update)["w"]
        assert not torch.signbit(sent[sent == 0]).any()


# --- random-k ---


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_random_k_sends_exactly_its_share_every_coordinate_as_often_as_another(scope: str) -> None:
    defense, draws, stream = random_k(0.3, scope=scope), 4000, seeded(3)
    update = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    sent = [defense.apply(update, {}, stream)[0] for _ in range(draws)]
    for s in sent:
        counts = [int(t.sum()) for t in s.values()]
        assert counts == [2, 2] if scope == "tensor" else sum(counts) == 3
    share = {"tensor": {"a": 2 / 4, "b": 2 / 6}, "global": {"a": 0.3, "b": 0.3}}[scope]
    for name, p in share.items():
        often = torch.stack([s[name] for s in sent]).mean(dim=0)
        assert ((often - p).abs() < 4 * math.sqrt(p * (1 - p) / draws)).all()


def assert_unbiased(defense: Defense, update: Update, draws: int = 10_000) -> None:
    stream = seeded(5)
    sent = [defense.apply(update, {}, stream)[0] for _ in range(draws)]
    for name, t in update.items():
        values = torch.stack([s[name] for s in sent])
        assert ((values.mean(dim=0) - t).abs() <= 4 * values.std(dim=0) / math.sqrt(draws)).all()


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_random_k_rescaled_by_the_true_share_is_unbiased(scope: str) -> None:
    """The true share of the first tensor is ceil(0.3 * 4) / 4, so that dividing by 0.3 would be biased."""
    update = {
        "a": torch.randn(4, generator=seeded(1), dtype=torch.float64),
        "b": torch.randn(7, generator=seeded(2), dtype=torch.float64),
    }
    assert_unbiased(random_k(0.3, scope=scope, rescale=True), update)


# --- prune ---


def test_prune_has_one_threshold_for_all_tensors() -> None:
    update = {"small": torch.tensor([0.1, -0.2]), "big": torch.tensor([[1.0], [-3.0], [2.0], [0.3]])}
    sent = apply_once(prune(0.5), update)
    assert sent["small"].tolist() == [0, 0]
    assert sent["big"].flatten().tolist() == [1, -3, 2, 0]
    sent = apply_once(prune(threshold=1), update)
    assert sent["big"].flatten().tolist() == [0, -3, 2, 0]


@pytest.mark.parametrize(("ratio", "left_out"), [(0, 0), (0.09, 0), (0.1, 1), (0.3, 3), (0.99, 9)])
def test_prune_leaves_out_the_whole_part_of_its_share(ratio: float, left_out: int) -> None:
    values = torch.randperm(10, generator=seeded(1)) + 1.0
    sent = apply_once(prune(ratio), {"w": values})["w"]
    assert (sent == 0).sum() == left_out
    assert sent[sent != 0].tolist() == values[values > left_out].tolist()


def test_prune_leaves_out_all_that_equals_its_threshold() -> None:
    assert of(prune(0.5), 1, -2, 2, 3) == [0, 0, 0, 3]
    assert of(prune(threshold=2), 1, -2, 2, 3) == [0, 0, 0, 3]
    assert of(prune(0.5), 1, 1, 1, 1) == [0, 0, 0, 0]
    assert of(prune(0), 1, 1, 1, 0) == [1, 1, 1, 0]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.integers(1, 99))
def test_prune_is_the_sorted_rule(values: list[int], percent: int) -> None:
    magnitudes = sorted(map(abs, values))
    entry = len(values) * percent // 100
    threshold = magnitudes[entry - 1] if entry else -1
    assert of(prune(percent / 100), *values) == [v if abs(v) > threshold else 0 for v in values]


# --- gradient dropout ---


@pytest.mark.parametrize("p", [0.1, 0.7])
def test_gradient_dropout_leaves_out_independently_with_its_probability(p: float) -> None:
    n = 100_000
    sent = apply_once(gradient_dropout(p), {"w": torch.full((n,), 2.0)}, seed=4)["w"]
    assert set(sent.tolist()) == {0, 2}
    out = (sent == 0).double()
    assert abs(out.mean().item() - p) < 4 * math.sqrt(p * (1 - p) / n)
    pairs = ((out[1:] - p) * (out[:-1] - p)).mean().item()
    assert abs(pairs) < 4 * p * (1 - p) / math.sqrt(n)


def test_equal_tensors_are_sent_with_different_coordinates() -> None:
    for defense in (gradient_dropout(0.5), random_k(0.5)):
        sent = apply_once(defense, {"a": torch.ones(40), "b": torch.ones(40)})
        assert not torch.equal(sent["a"], sent["b"])


# --- the channel: the attacker's model ---


@pytest.mark.parametrize(
    "spec",
    [
        "top_k(0.3)",
        "top_k(0.3, scope='global')",
        "random_k(0.3)",
        "random_k(0.3, rescale=True)",
        "random_k(0.3, scope='global', rescale=True)",
        "prune(0.7)",
        "prune(threshold=0.5)",
        "gradient_dropout(0.7)",
        "gradient_dropout(0.7, rescale=True)",
    ],
)
def test_the_expectation_at_the_true_update_equals_the_message(spec: str) -> None:
    """This also holds if sent coordinates are zero, and if ties are left out."""
    channel = DefenseSpec.parse(spec).build_channel()
    update = {
        "a": torch.randn(40, generator=seeded(1)),
        "b": torch.tensor([0.0, 2.0, 2.0, -2.0, 0.0, 2.0]),
        "c": torch.zeros(3, 2),
    }
    sent = apply_once(DefenseSpec.parse(spec).build(), update)
    expected = channel.expect(update, channel.learn(sent))
    assert all(torch.allclose(expected[name], sent[name], rtol=1e-6) for name in update)


def test_ties_that_were_pruned_are_not_taken_as_sent() -> None:
    seen = {"w": torch.tensor(of(prune(0.5), 1, 1, 1, 3))}
    assert channels.prune(0.5).learn(seen)["w"].tolist() == [False, False, False, True]


def test_with_fewer_than_k_nonzero_entries_the_attacker_knows_the_zeros_as_well() -> None:
    seen = {"w": torch.tensor(of(top_k(0.75), 0, 3, 0, 0))}
    assert channels.top_k(0.75).learn(seen)["w"].all()
    assert not channels.random_k(0.75).learn(seen)["w"].all()


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("channel", [channels.top_k, channels.random_k])
def test_in_a_noisy_message_the_largest_entries_are_taken_as_sent(channel, scope: str) -> None:
    update = {"a": torch.randn(100, generator=seeded(1)), "b": torch.randn(40, generator=seeded(2))}
    sent = apply_once(top_k(0.1, scope=scope), update)
    noisy = {name: t + 0.01 * torch.randn(t.shape, generator=seeded(3)) for name, t in sent.items()}
    known = channel(0.1, scope=scope).learn(noisy)
    assert all(torch.equal(known[name], sent[name] != 0) for name in update)


# --- wrong arguments ---


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: top_k(0), r"top_k: keep must be in \(0, 1\], got 0"),
        (lambda: top_k(math.nan), r"top_k: keep must be in \(0, 1\], got nan"),
        (lambda: top_k(0.5, scope="layer"), "top_k: scope must be 'tensor' or 'global', got 'layer'"),
        (lambda: random_k(-0.1), r"random_k: keep must be in \(0, 1\], got -0.1"),
        (lambda: random_k(0.1, rescale=True, error_feedback=True), "random_k: .*both compensate"),
        (lambda: gradient_dropout(0.1, rescale=True, error_feedback=True), "gradient_dropout: .*both compensate"),
        (lambda: gradient_dropout(1), r"gradient_dropout: p must be in \[0, 1\), got 1"),
        (lambda: prune(), "prune: give either ratio or threshold, got ratio=None and threshold=None"),
        (lambda: prune(0.5, threshold=1), "prune: give either ratio or threshold, got ratio=0.5 and threshold=1"),
        (lambda: prune(1), r"prune: ratio must be in \[0, 1\), got 1"),
        (lambda: prune(threshold=-1), "prune: threshold must be finite and not negative, got -1"),
    ],
)
def test_wrong_arguments_are_refused_with_the_range_that_is_allowed(build, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_the_largest_of_many_values_are_found() -> None:
    values = torch.randn(200_000, generator=seeded(1))
    chosen: Tensor = find_largest(values, 2000)
    assert chosen.sum() == 2000
    assert values[chosen].abs().min() >= values[~chosen].abs().max()
