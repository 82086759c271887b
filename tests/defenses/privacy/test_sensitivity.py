"""Tests of the norm bounds and the noise multiplier of chains of defenses, by their rules and by experiments."""

import math
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch
from torch import Generator, Tensor

from defenses import DEFENSES, Defense, DefenseSpec, global_norm, stateless
from defenses.channel import transparent
from defenses.gradients import GradientSpec
from defenses.privacy.sensitivity import (
    DATA_DEPENDENT_SCALE,
    NO_NOISE,
    NORM_BOUNDS,
    PARTIAL_NOISE,
    UNBOUNDED_NORM,
    Noise,
    find_gradient_noise,
    find_noise,
)
from defenses.spec import Kind

TENSORS = 4
THIRDS = Kind(lambda: stateless(lambda update, rng: update), lambda: transparent)


def hidden(text: str) -> Noise:
    return find_noise(DefenseSpec.parse(text, learning_rate=0.5), tensors=TENSORS)


@pytest.fixture(autouse=True)
def _third_party() -> Iterator[None]:
    DEFENSES._builtin["thirds"] = THIRDS
    yield
    DEFENSES._builtin.pop("thirds", None)


@pytest.mark.parametrize(
    ("text", "multiplier"),
    [
        ("clip(2) | gaussian(3)", 1.5),
        ("clip(4) | clip(2) | clip(3) | gaussian(3)", 1.5),
        ("clip_each(2) | gaussian(8)", 2.0),  # four tensors of length 2
        ("clip_each(2) | clip(1) | gaussian(8)", 8.0),
        ("gaussian(100) | clip(2) | gaussian(3)", 1.5),  # noise before the bound does not count
        ("clip(2) | gaussian(3) | gaussian(9)", 1.5),  # a noisy update has no norm bound
        ("clip(2) | gaussian(3) | clip(1) | gaussian(6)", 6.0),  # the larger multiplier: each covers all steps before it
        ("clip(2) | gaussian(3) | clip(1) | gaussian(1)", 1.5),
        ("clip(2) | gaussian(0) | gaussian(3)", 1.5),
        ("top_k(0.1, error_feedback=True) | dgc(0.1) | clip(2) | gaussian(3)", 1.5),  # states before the clip do not matter
        ("clip(2) | gaussian(3) | top_k(0.1, error_feedback=True) | qsgd(3) | thirds()", 1.5),  # post-processing
        ("clip(2) | top_k(0.1) | prune(0.5) | withhold(['*.bias']) | gaussian(3)", 1.5),
        ("clip(2) | sign('mean') | gaussian(3)", 1.5),
        ("clip(2) | random_k(0.25, rescale=True) | gaussian(16)", 2.0),  # kept entries are multiplied by 4
        ("clip(2) | gradient_dropout(0.5, rescale=True) | gaussian(16)", 4.0),
        ("clip(2) | gradient_dropout(0.5) | gaussian(16)", 8.0),
        ("in_gradient_units(clip(2) | gaussian(3), 0.1)", 1.5),  # both in the same units
        ("clip(2) | in_gradient_units(gaussian(3), 0.1)", 0.15),  # an update of length 2 is a gradient of length 20
        ("in_gradient_units(clip(2), 0.1) | gaussian(3)", 15.0),
        ("clip(1) | G-10e-2", 0.005),  # a hundredth, on the gradient, at learning rate 0.5
        ("liu_clip(2) | liu_noise(3)", 1.5),
    ],
)
def test_the_multiplier_is_noise_over_the_greatest_length(text: str, multiplier: float) -> None:
    found = hidden(text)
    assert found.multiplier == pytest.approx(multiplier)
    assert (found.family, found.why) == ("gaussian", "")


def test_the_family_of_the_noise_is_found() -> None:
    assert hidden("clip(2) | laplace(3)") == Noise(1.5, "laplace")
    assert hidden("clip(1) | L-10e-2").family == "laplace"
    assert hidden("clip(2) | laplace(3) | clip(1) | gaussian(6)") == Noise(6.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", NO_NOISE),
        ("clip(1)", NO_NOISE),
        ("clip(1) | gaussian(0)", NO_NOISE),
        ("sign()", NO_NOISE),
        ("gaussian(5)", UNBOUNDED_NORM),
        ("laplace(5) | clip(1)", UNBOUNDED_NORM),
        ("clip(1) | top_k(0.1, error_feedback=True) | gaussian(5)", UNBOUNDED_NORM),  # the residual is added
        ("clip(1) | sign('mean', error_feedback=True) | gaussian(5)", UNBOUNDED_NORM),
        ("clip(1) | dgc(0.1) | gaussian(5)", UNBOUNDED_NORM),
        ("clip(1) | qsgd(3) | gaussian(5)", UNBOUNDED_NORM),
        ("clip(1) | sign() | gaussian(5)", UNBOUNDED_NORM),
        ("clip(1) | thirds() | gaussian(5)", UNBOUNDED_NORM),
        ("masked(clip(1), ['*']) | gaussian(5)", UNBOUNDED_NORM),
        ("masked(clip(1) | gaussian(5), ['*.weight'])", PARTIAL_NOISE),  # the rest is sent as it is
        ("masked(clip(1), ['*.weight'])", NO_NOISE),
        ("clip(1) | gaussian(snr_db=-20)", DATA_DEPENDENT_SCALE),
        ("clip(1) | gaussian(snr_db=-20) | gaussian(5)", UNBOUNDED_NORM),
    ],
)
def test_a_chain_without_a_guarantee_gives_the_reason(text: str, reason: Noise) -> None:
    assert hidden(text) == reason
    assert reason.multiplier == 0
    assert reason.why


def test_a_defense_of_another_package_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DEFENSES._builtin, "thirds")
    other = EntryPoint(name="thirds", value=f"{__name__}:THIRDS", group="defenses")
    monkeypatch.setattr("defenses.registry.registry.entry_points", lambda **wanted: EntryPoints([other]).select(**wanted))
    monkeypatch.setattr(EntryPoint, "load", lambda self: THIRDS)
    for text in ("thirds()", "clip(1) | thirds()", "masked(thirds(), ['*'])", "in_gradient_units(thirds(), 0.5)"):
        assert hidden(text) == Noise(why="no accounting rule is known for thirds")
    assert hidden("thirds() | gaussian(5)") == UNBOUNDED_NORM
    assert hidden("clip(1) | gaussian(2) | thirds()") == Noise(2.0)


# --- norm bounds by experiment ---

SETTINGS = {
    "clip": ["clip(0.5)"],
    "clip_each": ["clip_each(0.25)"],
    "top_k": ["top_k(0.3)", "top_k(0.3, scope='global')"],
    "random_k": ["random_k(0.3)", "random_k(0.3, rescale=True)", "random_k(0.01, rescale=True, scope='global')"],
    "prune": ["prune(0.4)", "prune(threshold=0.1)"],
    "gradient_dropout": ["gradient_dropout(0.6)", "gradient_dropout(0.6, rescale=True)"],
    "sign": ["sign('mean')"],
    "withhold": ["withhold(['a*'])"],
}


def draw_updates(rng: Generator) -> Iterator[dict[str, Tensor]]:
    """Yield updates of norm 1: dense, with few large entries, with equal entries, in one tensor, and in one entry."""
    shapes = {"a.weight": (5, 4), "a.bias": (5,), "b.weight": (3, 5), "b.scale": ()}
    dense = {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in shapes.items()}
    for update in (
        dense,
        {name: t**9 for name, t in dense.items()},
        {name: torch.ones_like(t) for name, t in dense.items()},
        {name: t if name == "b.weight" else torch.zeros_like(t) for name, t in dense.items()},
        {name: torch.zeros_like(t) if t.ndim else torch.ones_like(t) for name, t in dense.items()},
    ):
        yield {name: t / global_norm(update) for name, t in update.items()}


def apply(defense: Defense, update: dict[str, Tensor], rng: Generator) -> dict[str, Tensor]:
    sent, _ = defense.apply(update, defense.init(update), rng)
    return dict(sent)


def test_every_norm_bound_is_tested() -> None:
    assert set(SETTINGS) == set(NORM_BOUNDS)


@pytest.mark.parametrize("text", [text for texts in SETTINGS.values() for text in texts])
def test_no_defense_exceeds_its_norm_bound(text: str) -> None:
    """Norms of updates of norm 1 after each defense stay below the bound, which is derived from a noise multiplier."""
    rng = torch.Generator().manual_seed(0)
    allowed = 1 / hidden(f"clip(1) | {text} | gaussian(1)").multiplier
    longest = max(
        float(global_norm(apply(DefenseSpec.parse(text).build(), update, rng))) for update in draw_updates(rng) for _ in range(50)
    )
    assert longest <= allowed * (1 + 1e-12)
    assert longest >= 0.3 * allowed or "withhold" in text  # the bound is not much too wide


@pytest.mark.parametrize("text", ["top_k(0.3, error_feedback=True)", "qsgd(1)", "sign()"])
def test_defenses_without_a_norm_bound_can_increase_the_norm(text: str) -> None:
    rng = torch.Generator().manual_seed(0)
    defense, update = DefenseSpec.parse(text).build(), next(draw_updates(rng))
    state, longest = defense.init(update), 0.0
    for _ in range(30):
        sent, state = defense.apply(update, state, rng)
        longest = max(longest, float(global_norm(sent)))
    assert longest > 1.05


# --- gradient rules ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", NO_NOISE),
        ("dp_sgd(max_norm=3, noise=2)", Noise(2.0)),
        ("dp_sgd(3)", Noise(1.1)),  # the default of `noise`
        ("dp_sgd(max_norm=3, noise=0)", NO_NOISE),
        ("fed_cdp(max_norm=3, noise=2)", Noise(1.0)),  # four tensors, each hidden by 2
        ("fed_cdp(max_norm=3, snr_db=-10)", DATA_DEPENDENT_SCALE),
        ("soteria(0.5)", NO_NOISE),
    ],
)
def test_the_noise_of_a_gradient_rule_is_in_units_of_its_bound(text: str, expected: Noise) -> None:
    assert find_gradient_noise(GradientSpec.parse(text), tensors=TENSORS) == expected


@pytest.mark.parametrize("text", ["dp_sgd(max_norm=0.5, noise={})", "fed_cdp(max_norm=0.5, noise={})"])
def test_one_example_moves_the_sum_by_no_more_than_the_noise_is_made_for(text: str) -> None:
    """Replacing one example changes the clipped sum by at most twice the norm bound from which the multiplier is computed."""
    from defenses.rules import GradientProblem

    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Sigmoid(), torch.nn.Linear(5, 3)).double()
    weights = dict(model.named_parameters())
    problem = GradientProblem(
        model=model, forward=lambda w, x: torch.func.functional_call(model, w, (x,)), criterion=torch.nn.functional.cross_entropy
    )
    torch.manual_seed(0)
    x, y = 40 * torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1])

    def summed(spec: GradientSpec, x: Tensor, y: Tensor, seed: int = 0) -> Tensor:
        gradient, _ = spec.build().gradient(problem, weights, x, y, torch.Generator().manual_seed(seed))
        return len(x) * torch.cat([gradient[name].detach().flatten() for name in sorted(gradient)])

    plain, noisy = GradientSpec.parse(text.format(0)), GradientSpec.parse(text.format(2))
    moved = max(
        float(torch.linalg.vector_norm(summed(plain, x, y) - summed(plain, torch.cat([sign * x[:1], x[1:]]), other)))
        for sign in (-1, 1)
        for other in (torch.tensor([1, 1, 2, 1]), torch.tensor([2, 1, 2, 1]))
    )
    noise = torch.cat([summed(noisy, x, y, seed) - summed(plain, x, y) for seed in range(40)]).std()
    multiplier = find_gradient_noise(noisy, tensors=len(weights)).multiplier
    allowed = float(noise) / multiplier  # the norm bound that the accountant assumes
    assert 0.5 * allowed < moved <= 2 * allowed * 1.1  # the spread of the noise is measured to a few per cent
    assert math.isfinite(allowed)
