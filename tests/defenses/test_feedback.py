"""Tests of error feedback: the sum of sent updates and residual equals the sum of all updates."""

from collections.abc import Callable

import pytest
import torch
from generators import seeded
from torch import Tensor

from defenses import Defense, DefenseSpec, Update, add_feedback, gaussian, sign, stateless, top_k

COMPRESSORS = [
    "top_k(0.2, error_feedback=True)",
    "top_k(0.2, scope='global', error_feedback=True)",
    "random_k(0.2, error_feedback=True)",
    "prune(0.8, error_feedback=True)",
    "prune(threshold=1.5, error_feedback=True)",
    "gradient_dropout(0.8, error_feedback=True)",
    "sign('mean', error_feedback=True)",
    "sign('none', error_feedback=True)",
    "ef_signsgd",
]


def draw_updates(rounds: int) -> list[dict[str, Tensor]]:
    drawn = seeded(1)
    return [
        {"w": torch.randn(5, 4, generator=drawn, dtype=torch.float64), "b": torch.randn((), generator=drawn, dtype=torch.float64)}
        for _ in range(rounds)
    ]


def total(each: list[Update]) -> dict[str, Tensor]:
    return {name: torch.stack([u[name] for u in each]).sum(dim=0) for name in each[0]}


@pytest.mark.parametrize("spec", COMPRESSORS)
def test_messages_and_residual_sum_to_all_updates(spec: str) -> None:
    defense, given, stream = DefenseSpec.parse(spec).build(), draw_updates(30), seeded(2)
    state, sent = defense.init(given[0]), []
    for u in given:
        out, state = defense.apply(u, state, stream)
        sent.append(out)
    residual = {name: next(t for key, t in state.items() if key.endswith(f"residual/{name}")) for name in given[0]}
    whole, came = total(given), total(sent)
    for name in whole:
        assert torch.allclose(came[name] + residual[name], whole[name], rtol=0, atol=1e-12)
        assert not torch.allclose(came[name], whole[name], atol=1e-6) or name == "b"  # the rest is still in the residual


@pytest.mark.parametrize("spec", COMPRESSORS[:1] + COMPRESSORS[2:4] + COMPRESSORS[5:7])
def test_the_mean_message_tends_to_the_update_and_without_memory_it_does_not(spec: str) -> None:
    u = {"w": torch.randn(5, 4, generator=seeded(3), dtype=torch.float64)}

    def mean_message(defense: Defense) -> Tensor:
        state, stream, sent = defense.init(u), seeded(4), []
        for _ in range(400):
            out, state = defense.apply(u, state, stream)
            sent.append(out)
        return total(sent)["w"] / 400

    def error(text: str) -> float:
        return ((mean_message(DefenseSpec.parse(text).build()) - u["w"]).norm() / u["w"].norm()).item()

    assert error(spec) < 0.05
    assert error(spec.replace(", error_feedback=True", "")) > 0.3


def test_top_k_with_feedback_sends_a_hand_example() -> None:
    defense = add_feedback(top_k(0.5))
    given = {"w": torch.tensor([3.0, -2.0])}
    state = defense.init(given)
    sent = []
    for _ in range(3):
        out, state = defense.apply(given, state, seeded())
        sent.append(out["w"].tolist())
    assert sent == [[3, 0], [0, -4], [6, 0]]
    assert state["residual/w"].tolist() == [0, -2]


def test_ef_signsgd_sends_sign_and_mean_magnitude_of_update_plus_residual() -> None:
    defense = sign("mean", error_feedback=True)
    given = {"w": torch.tensor([3.0, -1.0])}
    first, state = defense.apply(given, defense.init(given), seeded())
    assert first["w"].tolist() == [2, -2]
    assert state["residual/w"].tolist() == [1, 1]
    second, state = defense.apply(given, state, seeded())  # update plus residual: [4, 0]; a zero counts as positive
    assert second["w"].tolist() == [2, 2]
    assert state["residual/w"].tolist() == [2, -2]


def test_feedback_keeps_the_state_of_the_compressor() -> None:
    def counting(template: Update) -> dict[str, Tensor]:
        return {"w": torch.zeros(())}

    inner = Defense(
        init=counting,
        apply=lambda update, state, rng: ({n: t * (state["w"] == 2) for n, t in update.items()}, {"w": state["w"] + 1}),
    )
    defense, given = add_feedback(inner), {"w": torch.tensor([1.0])}
    state, sent = defense.init(given), []
    for _ in range(3):
        out, state = defense.apply(given, state, seeded())
        sent.append(out["w"].item())
    assert sent == [0, 0, 3]


@pytest.mark.parametrize("lossless", [lambda: stateless(lambda u, r: dict(u)), lambda: top_k(1)])
def test_a_lossless_compressor_leaves_no_residual(lossless: Callable[[], Defense]) -> None:
    defense, given = add_feedback(lossless()), draw_updates(3)
    state = defense.init(given[0])
    for u in given:
        out, state = defense.apply(u, state, seeded())
        assert all(torch.equal(out[name], u[name]) for name in u)
        assert all((t == 0).all() for t in state.values())


def test_noise_with_feedback_cancels_over_rounds() -> None:
    """This is why noise has no error feedback: the sum of 50 messages has the noise of one."""
    defense, u = add_feedback(gaussian(1)), {"w": torch.zeros(1000)}
    state, stream, sent = defense.init(u), seeded(), []
    for _ in range(50):
        out, state = defense.apply(u, state, stream)
        sent.append(out)
    assert total(sent)["w"].std() < 1.1
