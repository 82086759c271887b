"""Tests of linear disaggregation: updates of single clients from secure sums of repeated updates."""

from collections.abc import Sequence

import pytest
import torch
from observations import observe_sums
from torch import Tensor

from attacker.attacks import Case, cohort_spans, find_unmet
from attacker.attacks.multi_round.disaggregation import disaggregate
from defenses import DefenseSpec
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode

UPDATES = {name: torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abcd")}


def make_sums(cohorts: Sequence[str], drift: float = 0.0) -> list[Observation]:
    """Return the means of UPDATES over each cohort, a text with one letter per client; weights grow by 1 a round."""
    found = []
    for number, cohort in enumerate(cohorts, start=1):
        mean: Tensor = torch.stack([(1 + drift * number) * UPDATES[name] for name in cohort]).mean(dim=0)
        found.append(
            Observation(
                round=number,
                client="sum",
                cohort=tuple(cohort),
                num_examples=5 * len(cohort),
                model=ModelSpec(name="mlp"),
                data=DataSpec(shape=(3,), num_classes=2),
                training=Training(learning_rate=0.1, batch_size=5, steps=1),
                defenses=DefenseSpec(),
                weights={"w": torch.full((2, 3), float(number))},
                payload=encode({"w": mean}),
            )
        )
    return found


def test_repeated_updates_of_changing_cohorts_are_exact() -> None:
    found = disaggregate(make_sums(["ab", "bc", "cd", "ac", "bd"]))
    assert sorted(found.clients) == ["a", "b", "c", "d"]
    for name, one in found.clients.items():
        assert torch.allclose(one.update["w"], UPDATES[name], atol=1e-5)
        assert (one.client, one.cohort, one.num_examples) == (name, (name,), 5)
    assert found.residual < 1e-6
    assert torch.equal(found.clients["a"].weights["w"], torch.full((2, 3), 2.5))  # of rounds 1 and 4


def test_clients_that_are_always_summed_together_are_not_separated() -> None:
    found = disaggregate(make_sums(["ab", "abc", "cd", "d"]))
    assert sorted(found.clients) == ["c", "d"]
    assert torch.allclose(found.clients["c"].update["w"], UPDATES["c"], atol=1e-5)


def test_updates_that_change_leave_a_residual() -> None:
    cohorts = ["ab", "bc", "ac", "ab", "bc", "ac"]
    residuals = [disaggregate(make_sums(cohorts, drift)).residual for drift in (0.0, 0.01, 0.1)]
    assert residuals[0] < 1e-6 < residuals[1] < residuals[2]


def test_no_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        disaggregate([])


def make_lenet_sums(cohorts: Sequence[str], rate: float = 1e-5) -> tuple[Case, Tensor]:
    """Return secure sums of clients with one image each, which train one step on a LeNet, and the images."""
    data, model = DataSpec(shape=(1, 16, 16), num_classes=4), ModelSpec(name="lenet_cpl")
    names = sorted({name for cohort in cohorts for name in cohort})
    x = torch.rand(len(names), *data.shape, generator=torch.Generator().manual_seed(3))
    batches = {name: [(x[i : i + 1], torch.tensor([i % 4]))] for i, name in enumerate(names)}
    rounds = [{name: batches[name] for name in cohort} for cohort in cohorts]
    return observe_sums(rounds, model=model, data=data, seed=1, learning_rate=rate), x


def test_attack_on_solved_sums_names_the_owner_of_each_image() -> None:
    case, x = make_lenet_sums(["ab", "bc", "ac"])
    assert find_unmet(cohort_spans(), case)
    attack = cohort_spans(repeated=True)
    assert not find_unmet(attack, case)
    (found,) = attack([case], rng=torch.Generator().manual_seed(0))
    assert [slot.client for slot in found.slots] == ["a", "a", "b", "b", "c", "c"]
    assert [slot.round for slot in found.slots] == [1, 3, 1, 2, 2, 3]
    error = (found.x - x).square().flatten(1).mean(dim=1)
    assert float(error.max()) < 0.01 < float((found.x - x.flip(0)).square().mean())
    assert bool(found.confidence.isnan().all())
    assert "3 of 3 clients" in found.notes[0]


def test_sums_of_one_cohort_are_refused_with_the_reason() -> None:
    case, _ = make_lenet_sums(["ab", "ab"])
    with pytest.raises(ValueError, match="the updates of 0 of 2 clients"):
        cohort_spans(repeated=True)([case], rng=torch.Generator().manual_seed(0))
