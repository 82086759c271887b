"""Tests of deep gradient compression against an independent NumPy implementation of the published equations."""

from typing import Any

import numpy as np
import pytest
import torch
from generators import seeded
from numpy.typing import NDArray
from torch import Tensor

from defenses import State, Update, channels, dgc

Arrays = dict[str, NDArray[np.float64]]
SHAPES = {"conv.weight": (4, 3, 3), "fc.weight": (10, 7), "fc.bias": (10,), "scale": ()}


class Reference:
    """An independent implementation for one worker, with loops over entries instead of masks."""

    def __init__(
        self, keep: float, momentum: float, clip: float | None, warm_up: int, masking: bool, nesterov: bool, dense: bool
    ) -> None:
        self.keep, self.m, self.clip, self.warm_up = keep, momentum, clip, warm_up
        self.masking, self.nesterov, self.dense = masking, nesterov, dense
        self.u: Arrays = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.v: Arrays = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.epoch = 0

    def step(self, gradient: Arrays) -> Arrays:
        if self.clip is not None:
            length = np.sqrt(sum((g**2).sum() for g in gradient.values()))
            if length > self.clip:
                gradient = {name: g * (self.clip / length) for name, g in gradient.items()}
        ratio = self.keep
        if self.epoch < self.warm_up:
            ratio = self.keep ** ((self.epoch + 1.0) / (self.warm_up + 1.0))
        self.epoch += 1
        return {name: self.compress(name, g, ratio) for name, g in gradient.items()}

    def compress(self, name: str, g: NDArray[np.float64], ratio: float) -> NDArray[np.float64]:
        if self.nesterov:
            self.u[name] = (self.u[name] + g) * self.m
            correction = self.u[name] + g
        else:
            self.u[name] = self.m * self.u[name] + g
            correction = self.u[name]
        if self.dense and g.ndim <= 1:
            return np.array(correction)
        self.v[name] = self.v[name] + correction
        u, v = self.u[name].reshape(-1).copy(), self.v[name].reshape(-1).copy()
        message = np.zeros_like(v)
        for index in sorted(range(v.size), key=lambda i: -abs(v[i]))[: int(np.ceil(ratio * v.size))]:
            message[index] = v[index]
            v[index] = 0
            if self.masking:
                u[index] = 0
        self.u[name], self.v[name] = u.reshape(g.shape), v.reshape(g.shape)
        return message.reshape(g.shape)


def gradients(rounds: int) -> list[dict[str, Tensor]]:
    drawn = seeded(1)
    return [
        {name: torch.randn(shape, generator=drawn, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in range(rounds)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"clip_norm": 20.0, "workers": 16},  # clips to 5 in most rounds: the norms are about 10
        {"warm_up_rounds": 4},
        {"masking": False},
        {"nesterov": True},
        {"dense_vectors": False},
        {"momentum": 0.5, "clip_norm": 8.0, "warm_up_rounds": 7, "nesterov": True, "dense_vectors": False},
    ],
)
def test_twenty_rounds_agree_with_an_independent_implementation(options: dict[str, Any]) -> None:
    defense = dgc(0.1, **options)
    clip = options.get("clip_norm")
    reference = Reference(
        keep=0.1,
        momentum=options.get("momentum", 0.9),
        clip=None if clip is None else clip * options.get("workers", 1) ** -0.5,
        warm_up=options.get("warm_up_rounds", 0),
        masking=options.get("masking", True),
        nesterov=options.get("nesterov", False),
        dense=options.get("dense_vectors", True),
    )
    given = gradients(20)
    state: State = defense.init(given[0])
    for g in given:
        sent, state = defense.apply(g, state, seeded())
        expected = reference.step({name: t.numpy() for name, t in g.items()})
        for name in SHAPES:
            np.testing.assert_allclose(sent[name].numpy(), expected[name], rtol=1e-12, atol=1e-13)
            assert ((sent[name].numpy() != 0) == (expected[name] != 0)).all()
            np.testing.assert_allclose(state[f"momentum/{name}"].numpy(), reference.u[name], rtol=1e-12, atol=1e-13)


def test_every_option_of_the_comparison_changes_what_is_sent() -> None:
    """Otherwise the comparison above would not test the option."""
    settings: list[dict[str, Any]] = [
        {},
        {"momentum": 0.0},
        {"clip_norm": 8.0},
        {"clip_norm": 8.0, "workers": 16},
        {"warm_up_rounds": 4},
        {"masking": False},
        {"nesterov": True},
        {"dense_vectors": False},
    ]
    last: list[Update] = []
    for options in settings:
        defense, given = dgc(0.1, **options), gradients(4)
        state = defense.init(given[0])
        for g in given:
            sent, state = defense.apply(g, state, seeded())
        last.append(sent)
    for i, one in enumerate(last):
        assert all(any(not torch.equal(one[n], other[n]) for n in SHAPES) for other in last[:i])


def test_the_defense_is_linear_so_that_updates_are_as_good_as_gradients() -> None:
    """A step of -0.25 times the gradient, exact in floating point, gives messages of -0.25 times those of the gradient."""
    defense, given = dgc(0.1), gradients(6)
    of_gradients, of_updates = defense.init(given[0]), defense.init(given[0])
    for g in given:
        first, of_gradients = defense.apply(g, of_gradients, seeded())
        second, of_updates = defense.apply({name: -0.25 * t for name, t in g.items()}, of_updates, seeded())
        assert all(torch.equal(second[name], -0.25 * first[name]) for name in SHAPES)


def test_the_warm_up_is_that_of_the_paper_and_counts_a_clients_own_rounds() -> None:
    """The share that is sent falls in four rounds: 25, 6.25, 1.56, 0.39 and then 0.1 per cent (section 3.3 of the paper)."""
    u = {"w": torch.randn(100, 100, generator=seeded(2))}
    defense = dgc(0.25**5, warm_up_rounds=4)
    state, shares = defense.init(u), []
    for _ in range(7):
        sent, state = defense.apply(u, state, seeded())
        shares.append((sent["w"] != 0).sum().item() / 10_000)
    assert shares == [0.25, 0.0625, 0.0157, 0.004, 0.001, 0.001, 0.001]


def test_without_momentum_messages_and_residual_sum_to_all_gradients() -> None:
    defense, given = dgc(0.1, momentum=0), gradients(20)
    state, sent = defense.init(given[0]), []
    for g in given:
        out, state = defense.apply(g, state, seeded())
        sent.append(out)
    for name in ("conv.weight", "fc.weight"):
        came, whole = (torch.stack([u[name] for u in each]).sum(dim=0) for each in (sent, given))
        assert torch.allclose(came + state[f"residual/{name}"], whole, atol=1e-12)


def test_the_channel_compares_sent_coordinates_and_all_of_dense_tensors() -> None:
    u = {"w": torch.tensor([[1.0, -5.0, 2.0, 0.0]]), "b": torch.tensor([0.0, 1.0])}
    defense = dgc(0.25)
    sent, _ = defense.apply(u, defense.init(u), seeded())
    known = channels.dgc(0.25).learn(sent)
    assert known["w"].tolist() == [[False, True, False, False]]
    assert known["b"].tolist() == [True, True]
    expected = channels.dgc(0.25).expect({"w": torch.full((1, 4), 7.0), "b": torch.ones(2)}, known)
    assert expected["w"].tolist() == [[0, 7, 0, 0]]
    assert expected["b"].tolist() == [1, 1]
    noisy = {name: t + 0.01 for name, t in sent.items()}
    assert channels.dgc(0.25).learn(noisy)["w"].tolist() == [[False, True, False, False]]
    assert channels.dgc(0.25, warm_up_rounds=2).learn(noisy)["w"].all()


@pytest.mark.parametrize("options", [{"clip_norm": 0.5, "workers": 4}, {"nesterov": True}, {"nesterov": True, "clip_norm": 0.1}])
def test_the_channel_clips_and_scales_as_the_defense_in_its_first_round(options: dict[str, Any]) -> None:
    u = gradients(1)[0]
    defense, channel = dgc(0.1, **options), channels.dgc(0.1, **options)
    sent, _ = defense.apply(u, defense.init(u), seeded())
    expected = channel.expect(u, channel.learn(sent))
    assert all(torch.allclose(expected[name], t) for name, t in sent.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, r"dgc: keep must be in \(0, 1\], got 0"),
        ({"momentum": 1}, r"dgc: momentum must be in \[0, 1\), got 1"),
        ({"clip_norm": 0}, "dgc: clip_norm must be positive and finite, got 0"),
        ({"workers": 0}, "dgc: workers must be a whole number of at least 1, got 0"),
        ({"warm_up_rounds": -1}, "dgc: warm_up_rounds must be a whole number of at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused_with_the_range_that_is_allowed(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dgc(**{"keep": 0.1, **options})
