"""Tests of the audit's check that tokens are read from an embedding's update, and of searches that refuse token numbers."""

from dataclasses import replace

import pytest
import torch
from observations import observe_steps
from torch import Tensor, nn

from attacker.attacks import AttackSpec, Case, exact, find_unmet
from attacker.attacks.networks.discrete_inputs import find_token_embeddings, is_differentiable
from attacker.audit import Finding, NotChecked, PassedCheck
from attacker.audit.findings import CheckResult
from attacker.audit.label_checks import check_labels
from attacker.audit.token_checks import check_tokens, find_outlying_rows
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation
from fedsim.recording.codec import encode
from fedsim.recording.masked_vectors import SUM_CLIENT

DATA = DataSpec(shape=(6,), num_classes=3)
VOCABULARY = 200


class Reader(nn.Module):
    """A classifier of sentences of six tokens, with embeddings of tokens (padding: 0) and of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8, padding_idx=0), nn.Embedding(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.tokens(x.long()) + self.positions(torch.arange(6, device=x.device))
        logits: Tensor = self.head(torch.tanh(vectors).mean(dim=1))
        return logits


MODEL = ModelSpec(name=f"{__name__}:Reader")
SENTENCES = torch.tensor([[5, 9, 9, 120, 0, 0], [7, 5, 33, 199, 1, 2]]).float()
TOKENS = [1, 2, 5, 7, 9, 33, 120, 199]


@pytest.fixture(autouse=True)
def _admitted() -> None:
    models.admit(MODEL.name)


def watch(**settings: object) -> Observation:
    return observe_steps((SENTENCES, torch.tensor([0, 2])), model=MODEL, data=DATA, **settings)


def check(*observations: Observation) -> CheckResult:
    (found,) = check_tokens(observations)
    return found


def list_rows(observation: Observation, *, zeros_count: bool = True) -> list[int]:
    name = "tokens.weight"
    return find_outlying_rows(observation.update[name], observation.weights[name], zeros_count=zeros_count)


@pytest.mark.parametrize("defense", ["", "clip(0.01)", "top_k(0.02)", "qsgd(8)"])
def test_changed_rows_are_the_tokens_of_the_examples(defense: str) -> None:
    one = watch(defense=defense)
    found = check(one)
    assert isinstance(found, Finding)
    assert found.grade == "serious"
    rows = list_rows(one)
    assert set(rows) <= set(TOKENS)
    assert len(rows) >= (len(TOKENS) if defense in ("", "clip(0.01)") else 1)
    assert f"{len(rows)} of the {VOCABULARY} tokens of the vocabulary occur, those with the numbers {rows[0]}" in found.evidence
    assert "positions" not in found.title


def test_tokens_are_read_also_if_most_of_the_vocabulary_is_used() -> None:
    """The median row changes then, so that no row is an outlier; rows of zeros show which tokens are absent."""
    rng = torch.Generator().manual_seed(0)
    update, weights = torch.randn(20, 8, generator=rng), torch.randn(20, 8, generator=rng)
    update[[3, 11]] = 0
    assert find_outlying_rows(update, weights, zeros_count=True) == [row for row in range(20) if row not in (3, 11)]
    assert find_outlying_rows(update, weights, zeros_count=False) == []


def test_tokens_are_read_in_spite_of_weight_decay() -> None:
    one = watch()
    name = "tokens.weight"
    decayed = one.update[name] - 1e-3 * one.weights[name]
    assert bool((decayed[3:5] != 0).all())
    assert find_outlying_rows(decayed, one.weights[name], zeros_count=True) == TOKENS


def test_strong_noise_hides_tokens_and_weak_noise_does_not() -> None:
    strong, weak = watch(defense="gaussian(0.05)"), watch(defense="gaussian(1e-5)")
    assert isinstance(check(strong), PassedCheck)
    assert list_rows(weak) == TOKENS


def test_sparsified_noise_is_not_taken_for_tokens() -> None:
    one = watch(defense="gaussian(0.05) | top_k(0.02)")
    assert list_rows(one, zeros_count=True) != []
    assert isinstance(check(one), PassedCheck)


def test_pure_noise_has_no_outlying_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    for dimensions in (4, 16):
        noise = torch.randn(50_000, dimensions, generator=rng)
        assert find_outlying_rows(noise, torch.randn(50_000, dimensions, generator=rng), zeros_count=False) == []


def test_tokens_of_a_secure_sum_are_a_moderate_finding() -> None:
    found = check(replace(watch(), client=SUM_CLIENT))
    assert isinstance(found, Finding)
    assert found.grade == "moderate"
    assert "the clients of a secure sum" in found.title


def test_a_network_without_embedding_is_not_checked() -> None:
    one = observe_steps((torch.rand(1, 6), torch.tensor([0])), model=ModelSpec(name="mlp"), data=DATA)
    assert isinstance(check(one), NotChecked)
    assert is_differentiable(one.model, one.data)


def test_position_embeddings_are_not_token_embeddings() -> None:
    assert find_token_embeddings(Reader(), DATA) == {"tokens.weight": VOCABULARY}


@pytest.mark.parametrize("name", ["cpl", "inverting_gradients", "dlg", "agic"])
def test_searches_refuse_networks_of_token_numbers(name: str) -> None:
    reasons = find_unmet(AttackSpec(name=name).build(), Case((watch(),)))
    assert any("this network reads whole numbers" in reason for reason in reasons)
    assert not is_differentiable(MODEL, DATA)


class Mixed(nn.Module):
    """A network for table rows of two numbers and the codes of two categories."""

    def __init__(self) -> None:
        super().__init__()
        self.category, self.town = nn.Embedding(20, 4), nn.Embedding(30, 4)
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.category(x[:, 2].long()), self.town(x[:, 3].long())
        logits: Tensor = self.layers(torch.cat([x[:, :2], *codes], dim=1))
        return logits


def test_searches_refuse_rows_of_numbers_and_codes_of_categories() -> None:
    """A search could change the numbers, but would leave every code at the one that it starts from."""
    spec, data = ModelSpec(name=f"{__name__}:Mixed"), DataSpec(shape=(4,), num_classes=3)
    models.admit(spec.name)
    one = observe_steps((torch.tensor([[0.3, 0.8, 11.0, 25.0]]), torch.tensor([1])), model=spec, data=data)
    for name in ("inverting_gradients", "agic"):
        assert any("codes of categories" in reason for reason in find_unmet(AttackSpec(name=name).build(), Case((one,))))
    assert "codes of categories" in exact(fallback="none").plan(Case((one,))).reasons["layer_input"]
    found = check(one)
    assert isinstance(found, Finding)
    assert "1 of the 20 codes of category.weight occur, those with the numbers 11;" in found.evidence
    assert "1 of the 30 codes of town.weight occur, those with the numbers 25." in found.evidence
    assert found.grade == "moderate"  # the numbers of a row are not read
    assert "the update of category.weight, town.weight which categories" in found.title


def test_closed_forms_still_read_labels_of_token_networks() -> None:
    attack, case = exact(fallback="none"), Case((watch(),))
    assert find_unmet(attack, case) == []
    assert not any("such as the attack cpl" in reason for reason in attack.plan(case).reasons.values()), "it is refused as well"
    (found,) = attack([case], rng=torch.Generator().manual_seed(0))
    assert sorted(found.y.tolist()) == [0, 2]
    assert found.confidence.tolist() == [0, 0]  # its values are no tokens
    assert bool(found.explained.isnan().all()), "else audits would say how little of the gradient the answer explains"
    assert any("only the labels mean something" in note for note in found.notes)


class Bag(nn.Module):
    """A classifier that converts its tokens itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.tokens(x).flatten(1))
        return logits


class Converting(Bag):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.long())


@pytest.mark.parametrize("network", ["Bag", "Converting"])
def test_closed_forms_say_that_tokens_have_no_gradient(network: str) -> None:
    spec = ModelSpec(name=f"{__name__}:{network}")
    models.admit(spec.name)
    case = Case((observe_steps((SENTENCES, torch.tensor([0, 2])), model=spec, data=DATA),))
    assert "whole numbers, such as tokens, for which there is no gradient" in exact(fallback="none").plan(case).reasons["linear"]


def test_two_label_estimates_are_inconclusive() -> None:
    (found,) = check_labels([watch()])
    assert isinstance(found, NotChecked)
    assert found.kind == "inconclusive"
    assert "so few estimates" in found.reason


def test_embedding_with_all_rows_changed_is_inconclusive() -> None:
    one, name = watch(), "tokens.weight"
    everywhere = {**one.update, name: torch.randn(VOCABULARY, 8, generator=torch.Generator().manual_seed(7))}
    found = check(replace(one, payload=encode(everywhere)))
    assert isinstance(found, NotChecked)
    assert found.kind == "inconclusive"
    assert isinstance(check(replace(one, payload=encode({**one.update, name: torch.zeros(VOCABULARY, 8)}))), PassedCheck)


class Tied(nn.Module):
    """A network for the next of six tokens, whose output layer has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.tokens.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.tokens(x.long())).mean(dim=1))
        return logits


class TiedByCode(Tied):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.tokens(x.long())).mean(dim=1) @ self.tokens.weight.T


@pytest.mark.parametrize("network", ["Tied", "TiedByCode"])
def test_tied_embeddings_show_no_tokens(network: str) -> None:
    """The output layer changes the rows of all tokens, those of likely ones far more than the median."""
    spec, data = ModelSpec(name=f"{__name__}:{network}"), replace(DATA, num_classes=VOCABULARY)
    models.admit(spec.name)
    one = observe_steps((SENTENCES, torch.tensor([0, 2])), model=spec, data=data)
    found = check(one)
    assert isinstance(found, NotChecked)
    assert found.kind == "inconclusive"
    assert "weights the outputs as well" in found.reason
    assert not models.has_head(models.build(spec, data), data)
    case = Case((one,))
    assert any("linear" in reason for reason in find_unmet(AttackSpec(name="idlg").build(), case))
    assert "last linear layer" in exact(fallback="none").plan(case).reasons["features"]
