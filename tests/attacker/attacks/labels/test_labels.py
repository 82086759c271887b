"""Tests of label rules, which infer labels from the last layer's gradient, on gradients by autograd."""

import pytest
import torch
from torch import Tensor, nn

from attacker.attacks.labels.rules import (
    LABEL_RULES,
    Evidence,
    Head,
    get_label_rule,
    ilrg,
    infer_from_bias,
    infer_from_rows,
    infer_labels,
)
from fedsim.models import find_loss, predict_probabilities


def evidence_of(
    network: nn.Sequential, x: Tensor, y: Tensor, loss_name: str = "cross_entropy", *, look: bool = False
) -> Evidence:
    """Return the evidence for label rules; `look`: include the last layer (head) and its inputs for random examples."""
    loss = find_loss(loss_name)(network(x), y)
    names = [name for name, _ in network.named_parameters()]
    gradient = dict(zip(names, torch.autograd.grad(loss, list(network.parameters())), strict=True))
    with torch.no_grad():
        others = torch.rand(64 if look else 16, x.shape[1])
        guess = predict_probabilities(network(others)).mean(dim=0)
    head = len(network) - 1
    own = dict(network.named_parameters())
    bias = f"{head}.bias" if f"{head}.bias" in gradient else None
    if not look:
        return Evidence(gradient, f"{head}.weight", bias, len(y), guess)
    with torch.no_grad():
        seen = Head(own[f"{head}.weight"].detach(), None if bias is None else own[bias].detach(), network[:-1](others))
    return Evidence(gradient, f"{head}.weight", bias, len(y), guess, head=seen)


def network(activation: nn.Module, seed: int, *, bias: bool = True, outputs: int = 10) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 30), activation, nn.Linear(30, outputs, bias=bias))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Tanh(), nn.ReLU(), nn.LeakyReLU(0.5)])
def test_bias_gives_the_label_of_one_example_for_any_features(activation: nn.Module, seed: int) -> None:
    y = torch.tensor([seed])
    assert infer_from_bias(evidence_of(network(activation, seed), torch.rand(1, 12), y)).tolist() == [seed]


@pytest.mark.parametrize("seed", range(8))
def test_row_sums_give_the_label_for_features_that_are_not_negative(seed: int) -> None:
    y = torch.tensor([seed])
    assert infer_from_rows(evidence_of(network(nn.Sigmoid(), seed), torch.rand(1, 12), y)).tolist() == [seed]


def test_row_sums_fail_for_negative_features_and_the_default_rule_does_not() -> None:
    net = network(nn.Tanh(), 0)
    with torch.no_grad():
        net[0].bias -= 20
    evidence = evidence_of(net, torch.rand(1, 12), torch.tensor([4]))
    assert infer_from_rows(evidence).tolist() != [4]
    assert infer_labels(evidence).tolist() == [4]


def test_rows_are_used_without_a_bias() -> None:
    evidence = evidence_of(network(nn.Sigmoid(), 3, bias=False), torch.rand(1, 12), torch.tensor([7]))
    assert infer_labels(evidence).tolist() == [7]
    with pytest.raises(ValueError, match="needs a bias"):
        infer_from_bias(evidence)


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_a_batch_are_right_if_clipping_is_known(seed: int) -> None:
    y = torch.tensor([1, 1, 4, 8])
    evidence = evidence_of(network(nn.Sigmoid(), seed), torch.rand(4, 12), y)
    clipped = evidence._replace(gradient={name: 0.1 * g for name, g in evidence.gradient.items()}, shortened=True)
    assert torch.equal(infer_from_bias(clipped), y)
    assert not torch.equal(infer_from_bias(clipped._replace(shortened=False)), y)
    assert torch.equal(infer_from_bias(evidence._replace(shortened=True)), y)


def withhold_bias(evidence: Evidence) -> Evidence:
    """Return the evidence as if the gradient of the head's bias had not been sent."""
    assert evidence.bias is not None
    unsent = torch.zeros_like(evidence.gradient[evidence.bias])
    return evidence._replace(gradient={**evidence.gradient, evidence.bias: unsent})


@pytest.mark.parametrize("outputs", [1, 10])
def test_rows_are_used_if_the_bias_was_not_sent(outputs: int) -> None:
    loss, y = ("logistic", torch.tensor([1])) if outputs == 1 else ("cross_entropy", torch.tensor([7]))
    withheld = withhold_bias(evidence_of(network(nn.Sigmoid(), 3, outputs=outputs), torch.rand(1, 12), y, loss))
    assert infer_labels(withheld).tolist() == y.tolist()
    assert infer_from_bias(withheld).tolist() != y.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_several_examples_are_used_if_the_bias_was_not_sent(seed: int) -> None:
    y = torch.tensor([1, 4, 8])
    withheld = withhold_bias(evidence_of(network(nn.Sigmoid(), seed), torch.rand(3, 12), y))
    assert withheld.head is None
    assert infer_labels(withheld).tolist() == y.tolist()
    single = withhold_bias(
        evidence_of(network(nn.Sigmoid(), seed, outputs=1), torch.rand(2, 12), torch.tensor([0, 1]), "logistic")
    )
    with pytest.raises(ValueError, match="cannot infer the labels of 2 examples"):
        infer_labels(single)


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_a_batch_with_duplicates_on_an_untrained_network(seed: int) -> None:
    y = torch.tensor([1, 1, 1, 4, 4, 9, 0, 5, 5, 5, 5, 2, 2, 8, 8, 8]).sort().values
    assert torch.equal(infer_from_bias(evidence_of(network(nn.Sigmoid(), seed), torch.rand(16, 12), y)), y)


def test_distinct_labels_of_a_batch_by_rows() -> None:
    y = torch.tensor([0, 3, 8])
    assert torch.equal(infer_from_rows(evidence_of(network(nn.ReLU(), 1, bias=False), torch.rand(3, 12), y)), y)


def test_useless_bias_gradient_still_gives_valid_labels() -> None:
    evidence = evidence_of(network(nn.Sigmoid(), 0), torch.rand(4, 12), torch.tensor([0, 1, 2, 3]))
    for value in (100.0, torch.nan, torch.inf):
        drowned = {**evidence.gradient, "2.bias": torch.full((10,), value)}
        labels = infer_from_bias(evidence._replace(gradient=drowned))
        assert labels.shape == (4,)
        assert 0 <= labels.min() <= labels.max() < 10


def test_more_examples_than_classes_cannot_have_distinct_labels() -> None:
    evidence = evidence_of(network(nn.ReLU(), 1, bias=False), torch.rand(11, 12), torch.arange(11) % 10)
    with pytest.raises(ValueError, match="11 examples"):
        infer_from_rows(evidence)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(0.2)])
def test_sign_of_the_bias_gradient_of_a_single_logit_gives_the_label(activation: nn.Module, label: int, seed: int) -> None:
    evidence = evidence_of(network(activation, seed, outputs=1), torch.rand(1, 12), torch.tensor([label]), "logistic")
    assert infer_from_bias(evidence).tolist() == [label]
    assert infer_labels(evidence).tolist() == [label]


@pytest.mark.parametrize("label", [0, 1])
def test_sign_of_the_row_of_a_single_logit_gives_the_label_for_positive_features(label: int) -> None:
    y = torch.tensor([label])
    net = network(nn.LeakyReLU(0.2), 0, bias=False, outputs=1)
    with torch.no_grad():
        net[0].bias += 1
    evidence = evidence_of(net, torch.rand(1, 12), y, "logistic")
    assert infer_labels(evidence).tolist() == infer_from_rows(evidence).tolist() == [label]
    with torch.no_grad():
        net[0].bias -= 20
    assert infer_from_rows(evidence_of(net, torch.rand(1, 12), y, "logistic")).tolist() == [1 - label]


@pytest.mark.parametrize("ones", range(7))
def test_labels_of_several_examples_with_a_single_logit(ones: int) -> None:
    y = torch.tensor([0] * (6 - ones) + [1] * ones)
    for bias in (True, False):
        net = network(nn.Sigmoid(), 1, bias=bias, outputs=1)
        evidence = evidence_of(net, torch.rand(6, 12), y, "logistic", look=True)
        assert infer_labels(evidence).tolist() == y.tolist()
        if bias:
            assert infer_from_bias(evidence).tolist() == y.tolist()


@pytest.mark.parametrize("outputs", [1, 10])
def test_without_a_bias_several_labels_need_the_head_or_distinct_rows(outputs: int) -> None:
    net, loss = network(nn.Sigmoid(), 1, bias=False, outputs=outputs), "logistic" if outputs == 1 else "cross_entropy"
    evidence = evidence_of(net, torch.rand(2, 12), torch.tensor([0, 1]), loss)
    with pytest.raises(ValueError, match=r"set Evidence\.head"):
        ilrg(evidence)
    if outputs == 1:
        with pytest.raises(ValueError, match="cannot infer the labels of 2 examples if the model has a single logit"):
            infer_labels(evidence)
    else:
        assert infer_labels(evidence).tolist() == [0, 1]


@pytest.mark.parametrize("name", LABEL_RULES)
@pytest.mark.parametrize("label", [0, 4, 9])
def test_every_rule_is_exact_for_one_example(name: str, label: int) -> None:
    evidence = evidence_of(network(nn.Sigmoid(), label), torch.rand(1, 12), torch.tensor([label]), look=True)
    assert LABEL_RULES[name](evidence).tolist() == [label]


@pytest.mark.parametrize("name", ["bias", "llg", "ilrg", "inferred"])
@pytest.mark.parametrize("examples", [2, 12])
def test_every_rule_gives_sorted_valid_labels_for_any_gradient(name: str, examples: int) -> None:
    evidence = evidence_of(network(nn.ReLU(), 0), torch.rand(examples, 12), torch.randint(10, (examples,)), look=True)
    rng = torch.Generator().manual_seed(0)
    noise = {key: torch.randn(g.shape, generator=rng) for key, g in evidence.gradient.items()}
    unknown = [dict.fromkeys(noise, torch.tensor(value)) for value in (0.0, torch.nan, torch.inf)]
    filled = [{key: value.expand_as(noise[key]).clone() for key, value in g.items()} for g in unknown]
    for gradient in (noise, *filled):
        labels = LABEL_RULES[name](evidence._replace(gradient=gradient))
        assert labels.shape == (examples,)
        assert labels.tolist() == sorted(labels.tolist())
        assert 0 <= labels.min() <= labels.max() < 10


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_labels_of_a_batch_that_is_larger_than_the_number_of_classes(seed: int, bias: bool) -> None:
    y = torch.tensor([0, 1, 1, 1, 3, 3, 3, 3, 5, 5, 6, 8, 8, 9, 9, 9])
    evidence = evidence_of(network(nn.Sigmoid(), seed, bias=bias), torch.rand(16, 12), y, look=True)
    assert infer_labels(evidence).tolist() == y.tolist()
    assert ilrg(evidence).tolist() == y.tolist()


@pytest.mark.parametrize("y", [[1, 1, 4, 8], [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 5, 5, 6, 7, 8, 8]])
def test_labels_are_right_with_and_without_effective_clipping(y: list[int]) -> None:
    evidence = evidence_of(network(nn.Sigmoid(), 0), torch.rand(len(y), 12), torch.tensor(y), look=True)
    for factor in (0.02, 0.3, 1.0):
        clipped = {name: factor * g for name, g in evidence.gradient.items()}
        assert infer_labels(evidence._replace(gradient=clipped, shortened=True)).tolist() == y


def test_noisy_gradient_is_answered_by_the_bias_rule() -> None:
    y = torch.tensor([0, 0, 3, 5, 5, 5])
    evidence = evidence_of(network(nn.Sigmoid(), 0), torch.rand(6, 12), y, look=True)
    noisy = {name: g + 0.02 * torch.randn(g.shape) for name, g in evidence.gradient.items()}
    assert infer_labels(evidence._replace(gradient=noisy)).tolist() == infer_from_bias(evidence._replace(gradient=noisy)).tolist()


def test_zero_features_are_answered_by_the_bias_rule() -> None:
    net, y = network(nn.ReLU(), 0), torch.tensor([2, 2, 7])
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(-1)
    evidence = evidence_of(net, torch.rand(3, 12), y, look=True)
    assert not evidence.gradient[evidence.weight].any()
    assert infer_labels(evidence).tolist() == infer_from_bias(evidence).tolist() == y.tolist()


def test_head_improves_labels_of_a_confident_model() -> None:
    torch.manual_seed(0)
    found, by_bias = 0, 0
    for seed in range(10):
        net = network(nn.Tanh(), seed)
        with torch.no_grad():
            net[0].weight *= 8
            net[2].weight *= 8
        x = torch.rand(3, 12)
        y = torch.multinomial(net(x).softmax(dim=1), 1)[:, 0].sort().values
        evidence = evidence_of(net, x, y, look=True)
        found += torch.equal(infer_labels(evidence), y)
        by_bias += torch.equal(infer_from_bias(evidence), y)
    assert found >= 8
    assert found > by_bias


def test_rules_are_chosen_by_name() -> None:
    assert get_label_rule("inferred") is infer_labels
    assert get_label_rule("joint") is None
    with pytest.raises(ValueError, match=r"'guess'.*bias, rows, llg, ilrg, inferred, or joint"):
        get_label_rule("guess")
