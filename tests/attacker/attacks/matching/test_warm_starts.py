"""Tests of warm starts: they help if they are near the solution, and do no harm if noise has spoilt them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from generators import seeded
from observations import make_image_case, observe_steps
from torch import Tensor

from attacker.attacks import Case, GradientMatching, cpl, inverting_gradients
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.warm_starts import WarmStart, place_start
from attacker.attacks.optimisers.stopping import EARLY_LIMITS, INVERTING_STALL, Stall, Stop
from attacker.scoring.metrics import mse
from defenses.inputs import InputsSpec
from fedsim.recording import ModelSpec
from fedsim.recording.codec import encode


def given(start: Tensor, **arguments: Any) -> GradientMatching:
    """Return CPL with this warm start for every case, an example of class 1."""

    def first(cases: Sequence[Case], _: torch.Generator) -> list[WarmStart | None]:
        return [WarmStart(start, torch.ones(len(start), dtype=torch.long))] * len(cases)

    return cpl(optimiser="wolfe", **arguments).copy_with(warm_start=first)


def test_good_warm_start_is_the_only_start() -> None:
    case, x, _ = make_image_case(1)
    (found,) = given((x + 0.01).clamp(0, 1))([case], rng=seeded())
    assert mse(found.x, x).item() < 1e-3
    assert found.restarts == 1
    assert found.route == "optimisation from a closed form"


def test_bad_warm_start_is_followed_by_a_plain_start() -> None:
    case, x, _ = make_image_case(1)
    (found,) = given(40 * torch.randn(1, 1, 8, 8, generator=seeded(3)), steps=4)([case], rng=seeded())
    assert found.restarts == 2
    assert found.route == "optimisation"
    assert mse(found.x, x).item() < 1e-3


@pytest.mark.parametrize(
    ("limits", "note"),
    [
        (
            {"early": ((4, 0.0),), "unexplained": 0.0},
            "given up after 4 of 20 iterations, because its loss was still above 0% of that at the start",
        ),
        (
            {"stall": Stall(after=4, since=2, plain=0.0, fall=0.0)},
            "after 4 of 20 iterations, because its loss hardly fell below that of a grey image",
        ),
    ],
)
def test_early_limits_end_neither_a_warm_start_nor_a_null(limits: dict[str, Any], note: str) -> None:
    """With a limit of 0 every search is hopeless; limits for starts at random say nothing about starts near the image."""
    case, x, _ = make_image_case(1)
    attack = inverting_gradients(steps=20).copy_with(stop=Stop(patience=20, give_up=0.5, **limits))
    warm = attack.copy_with(warm_start=lambda cases, _: [WarmStart(x, torch.ones(1, dtype=torch.long))] * len(cases))
    plain, null, from_warm = (one([case], rng=seeded())[0] for one in (attack, attack.null(), warm))
    assert (len(plain.loss), len(null.loss), len(from_warm.loss)) == (4, 20, 20)
    assert note in plain.notes[0]
    assert not any("was given up" in note for note in (*null.notes, *from_warm.notes))


@pytest.mark.parametrize(
    ("network", "inputs", "iterations"), [("", "", 4), ("dropout(0.3)", "", 20), ("", "mixup(alpha=1.0)", 20)]
)
def test_no_search_is_given_up_if_clients_draw_random_numbers(network: str, inputs: str, iterations: int) -> None:
    """A high loss says nothing then, since the true examples have one, too."""
    case, x, y = make_image_case(1)
    model = ModelSpec(name="lenet_dlg", network=network)
    seen = replace(observe_steps((x, y), model=model, data=case.observations[0].data), inputs=InputsSpec.parse(inputs))
    attack = inverting_gradients(steps=20).copy_with(stop=Stop(patience=20, give_up=0.5, early=((4, 0.0),), unexplained=0.0))
    (found,) = attack([Case((seen,))], rng=seeded())
    assert len(found.loss) == iterations


def test_latents_of_plain_images_are_grey_and_have_the_labels_of_the_search() -> None:
    case, _, _ = make_image_case(1)
    batch, labels = CaseBatch(inverting_gradients(), [case]), torch.tensor([[2], [3]])
    z = batch.encode_plain(labels, [seeded(), seeded()])
    assert z is not None
    x, y = batch.space.decode(z, labels)
    assert torch.equal(x, torch.full_like(x, 0.5))
    assert torch.equal(y, labels)


def test_start_with_the_lower_loss_is_chosen() -> None:
    """After few iterations neither search has converged, and the one that began near the image has the lower loss."""
    case, x, _ = make_image_case(1)
    (found,) = given(x + 0.05 * torch.rand(x.shape, generator=seeded(2)), steps=1)([case], rng=seeded())
    (plain,) = cpl(optimiser="wolfe", steps=1)([case], rng=seeded())
    assert found.restarts == 2
    assert found.route == "optimisation from a closed form"
    assert found.loss[-1] < plain.loss[-1]


def test_examples_of_a_start_are_placed_by_label() -> None:
    """The order of a closed form's examples differs from that of the search's labels, so that they must be matched."""
    x, y = (torch.cat(parts) for parts in zip(*[make_image_case(i)[1:] for i in (3, 0, 2, 1)], strict=True))
    one = make_image_case(0)[0].observations[0]
    case = Case((observe_steps((x, y), model=one.model, data=one.data),))
    attack = cpl(optimiser="wolfe", steps=2).copy_with(warm_start=lambda cases, _: [WarmStart(x + 1e-4, y)])
    (found,) = attack([case], rng=seeded())
    assert found.y.tolist() == [0, 1, 2, 3]
    assert found.restarts == 1
    assert mse(found.x, x[y.argsort()]).max() < 1e-6


def test_places_without_a_given_example_keep_their_own_start() -> None:
    own, x = torch.arange(5.0)[:, None], torch.tensor([[20.0], [10.0], [21.0], [40.0]])
    labels = torch.tensor([1, 2, 2, 3, 3])
    assert place_start(WarmStart(x, torch.tensor([2, 1, 2, 4])), own, labels).flatten().tolist() == [10.0, 20.0, 21.0, 3.0, 4.0]
    assert place_start(WarmStart(x, torch.tensor([2, 1, 2, 4])), own, None).flatten().tolist() == [20.0, 10.0, 21.0, 40.0, 4.0]
    assert own.flatten().tolist() == [0, 1, 2, 3, 4]


def test_warm_start_is_used_only_for_its_case() -> None:
    (one, x, y), (other, _, _) = make_image_case(1), make_image_case(2)
    attack = cpl(optimiser="wolfe", steps=1).copy_with(
        warm_start=lambda cases, _: [WarmStart(x, y) if c is one else None for c in cases]
    )
    found = attack([one, other], rng=seeded())
    (alone,) = cpl(optimiser="wolfe", steps=1)([other], rng=seeded())
    assert [answer.restarts for answer in found] == [1, 1]
    assert found[1].route == "optimisation"
    torch.testing.assert_close(found[1].x, alone.x, rtol=1e-3, atol=1e-3)


def test_warm_start_is_refused_with_order_invariant() -> None:
    _, x, _ = make_image_case(1)
    with pytest.raises(ValueError, match="cannot be combined with order_invariant"):
        given(x).copy_with(local_steps="simulated", order_invariant=0.1)


def test_null_gets_no_warm_start() -> None:
    case, x, _ = make_image_case(1)
    (null,) = given(x, steps=1).null()([case], rng=seeded())
    (plain,) = cpl(optimiser="wolfe", steps=1).null()([case], rng=seeded())
    assert torch.equal(null.x, plain.x)
    assert (null.restarts, null.route) == (1, "prior alone")


def test_total_variation_lowers_the_error_with_noise() -> None:
    """With the prior, the result is nearer to the smooth image than to the one that fits the noise."""
    pairs = [make_image_case(i, defense="gaussian(0.002)") for i in (1, 2, 3)]
    cases = [case for case, _, _ in pairs]
    plain, smooth = (cpl(optimiser="wolfe", tv=tv, knows_defense=False)(cases, rng=seeded()) for tv in (0.0, 1e-3))
    errors = [[mse(found.x, x).item() for found, (_, x, _) in zip(answers, pairs, strict=True)] for answers in (plain, smooth)]
    assert sum(errors[1]) < 0.5 * sum(errors[0])


@pytest.mark.parametrize(
    "settings", [{"learning_rate": 0.01}, {"signed": True}, {"decoder": "bicubic4"}, {"feature_matching": 0.1}]
)
def test_early_limits_apply_only_with_the_settings_for_which_they_were_chosen(settings: dict[str, object]) -> None:
    usual, other = inverting_gradients().search.stop, inverting_gradients(**settings).search.stop
    assert (usual.early, usual.stall) == (EARLY_LIMITS, INVERTING_STALL)
    assert (other.early, other.stall) == ((), None)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_case_without_a_usable_gradient_takes_no_closed_form_start_from_the_others(value: float) -> None:
    """The spoilt case stands in the middle, so that both sides of it are checked."""
    cases = [make_image_case(i)[0] for i in range(4)]
    (seen,) = cases[2].observations
    payload = encode({name: torch.full_like(t, value) for name, t in seen.update.items()})
    spoilt = Case((replace(seen, payload=payload),))
    start = cpl(closed_form_start=True).warm_start
    whole, alone = start([*cases[:2], spoilt, cases[3]], seeded()), [start([case], seeded())[0] for case in cases]
    assert whole[2] is None
    for i in (0, 1, 3):
        own, expected = whole[i], alone[i]
        assert torch.allclose(own.x, expected.x, rtol=0, atol=1e-9)
