"""Labels read off real gradients."""

import pytest
import torch
from torch import Tensor, nn

from attacker.attacks.labels import Evidence, from_bias, from_rows, inferred
from fedsim.models import loss_of, probabilities


def evidence_of(network: nn.Sequential, x: Tensor, y: Tensor, loss_name: str = "cross_entropy") -> Evidence:
    loss = loss_of(loss_name)(network(x), y)
    names = [name for name, _ in network.named_parameters()]
    gradient = dict(zip(names, torch.autograd.grad(loss, list(network.parameters())), strict=True))
    with torch.no_grad():
        guess = probabilities(network(torch.rand(16, x.shape[1]))).mean(dim=0)
    head = len(network) - 1
    bias = f"{head}.bias" if f"{head}.bias" in gradient else None
    return Evidence(gradient, f"{head}.weight", bias, len(y), guess)


def network(activation: nn.Module, seed: int, *, bias: bool = True, outputs: int = 10) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 30), activation, nn.Linear(30, outputs, bias=bias))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Tanh(), nn.ReLU(), nn.LeakyReLU(0.5)])
def test_the_bias_gives_the_label_of_one_example_whatever_the_features(activation: nn.Module, seed: int) -> None:
    y = torch.tensor([seed])
    assert from_bias(evidence_of(network(activation, seed), torch.rand(1, 12), y)).tolist() == [seed]


@pytest.mark.parametrize("seed", range(8))
def test_row_sums_give_it_for_features_that_are_not_negative(seed: int) -> None:
    y = torch.tensor([seed])
    assert from_rows(evidence_of(network(nn.Sigmoid(), seed), torch.rand(1, 12), y)).tolist() == [seed]


def test_row_sums_fail_for_negative_features_and_inferred_does_not() -> None:
    net = network(nn.Tanh(), 0)
    with torch.no_grad():
        net[0].bias -= 20
    evidence = evidence_of(net, torch.rand(1, 12), torch.tensor([4]))
    assert from_rows(evidence).tolist() != [4]
    assert inferred(evidence).tolist() == [4]


def test_without_a_bias_the_rows_are_used() -> None:
    evidence = evidence_of(network(nn.Sigmoid(), 3, bias=False), torch.rand(1, 12), torch.tensor([7]))
    assert inferred(evidence).tolist() == [7]
    with pytest.raises(ValueError, match="no bias"):
        from_bias(evidence)


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_a_batch_behind_a_clip_that_is_known(seed: int) -> None:
    y = torch.tensor([1, 1, 4, 8])
    evidence = evidence_of(network(nn.Sigmoid(), seed), torch.rand(4, 12), y)
    clipped = evidence._replace(gradient={name: 0.1 * g for name, g in evidence.gradient.items()}, shortened=True)
    assert torch.equal(from_bias(clipped), y)
    assert not torch.equal(from_bias(clipped._replace(shortened=False)), y)
    assert torch.equal(from_bias(evidence._replace(shortened=True)), y)


@pytest.mark.parametrize("outputs", [1, 10])
def test_where_the_bias_was_not_sent_the_rows_are_used(outputs: int) -> None:
    loss, y = ("logistic", torch.tensor([1])) if outputs == 1 else ("cross_entropy", torch.tensor([7]))
    evidence = evidence_of(network(nn.Sigmoid(), 3, outputs=outputs), torch.rand(1, 12), y, loss)
    assert evidence.bias is not None
    unsent = torch.zeros_like(evidence.gradient[evidence.bias])
    withheld = evidence._replace(gradient={**evidence.gradient, evidence.bias: unsent})
    assert inferred(withheld).tolist() == y.tolist()
    assert from_bias(withheld).tolist() != y.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_a_batch_with_duplicates_on_an_untrained_network(seed: int) -> None:
    y = torch.tensor([1, 1, 1, 4, 4, 9, 0, 5, 5, 5, 5, 2, 2, 8, 8, 8]).sort().values
    assert torch.equal(from_bias(evidence_of(network(nn.Sigmoid(), seed), torch.rand(16, 12), y)), y)


def test_distinct_labels_of_a_batch_by_rows() -> None:
    y = torch.tensor([0, 3, 8])
    assert torch.equal(from_rows(evidence_of(network(nn.ReLU(), 1, bias=False), torch.rand(3, 12), y)), y)


def test_noise_that_drowns_the_bias_leaves_labels_all_the_same() -> None:
    evidence = evidence_of(network(nn.Sigmoid(), 0), torch.rand(4, 12), torch.tensor([0, 1, 2, 3]))
    for value in (100.0, torch.nan, torch.inf):
        drowned = {**evidence.gradient, "2.bias": torch.full((10,), value)}
        labels = from_bias(evidence._replace(gradient=drowned))
        assert labels.shape == (4,)
        assert 0 <= labels.min() <= labels.max() < 10


def test_more_examples_than_classes_cannot_have_distinct_labels() -> None:
    evidence = evidence_of(network(nn.ReLU(), 1, bias=False), torch.rand(11, 12), torch.arange(11) % 10)
    with pytest.raises(ValueError, match="11 examples"):
        from_rows(evidence)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(0.2)])
def test_the_sign_of_a_single_logits_bias_is_the_label_whatever_the_features(
    activation: nn.Module, label: int, seed: int
) -> None:
    evidence = evidence_of(network(activation, seed, outputs=1), torch.rand(1, 12), torch.tensor([label]), "logistic")
    assert from_bias(evidence).tolist() == [label]
    assert inferred(evidence).tolist() == [label]


@pytest.mark.parametrize("label", [0, 1])
def test_the_sign_of_a_single_logits_row_is_the_label_for_features_that_are_positive(label: int) -> None:
    y = torch.tensor([label])
    net = network(nn.LeakyReLU(0.2), 0, bias=False, outputs=1)
    with torch.no_grad():
        net[0].bias += 1
    evidence = evidence_of(net, torch.rand(1, 12), y, "logistic")
    assert inferred(evidence).tolist() == from_rows(evidence).tolist() == [label]
    with torch.no_grad():
        net[0].bias -= 20
    assert from_rows(evidence_of(net, torch.rand(1, 12), y, "logistic")).tolist() == [1 - label]


@pytest.mark.parametrize("bias", [True, False])
def test_one_logit_is_one_number_and_cannot_tell_several_labels(bias: bool) -> None:
    net = network(nn.Sigmoid(), 1, bias=bias, outputs=1)
    with pytest.raises(ValueError, match="2 examples behind a single logit"):
        inferred(evidence_of(net, torch.rand(2, 12), torch.tensor([0, 1]), "logistic"))
