"""Tests that batches are recovered exactly from the float32 gradient of a first linear layer, or that a reason is given."""

from collections.abc import Callable

import pytest
import torch
from linear_batches import DATA, Tensors, batch, gradient_of, layers, network, recover
from torch import Tensor, nn

from attacker.attacks.closed_form.linear.layer_gradient import LinearAnswer
from attacker.attacks.closed_form.linear.single_example import SINGLE_NEURON_CERTAINTY

MIXED_SEEDS = (0, 1, 2, 4, 8)
"""Seeds of batches with neurons that several examples turn on, and some that only one does."""


def measure_largest_error(answer: LinearAnswer, x: Tensor) -> float:
    """Return the largest distance of an example from the nearest recovered one, relative to its norm."""
    true = DATA.normalise(x).flatten(1).double()
    if not answer.scaled:
        true = true / true.norm(dim=1, keepdim=True)
    return float((torch.cdist(true, answer.x).amin(dim=1) / true.norm(dim=1)).max())


@pytest.mark.parametrize("steps", [0, 50])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_whole_batch_is_recovered_and_explains_its_gradient(size: int, steps: int) -> None:
    model, (x, y) = network(steps=steps), batch(size)
    weights, gradient = gradient_of(model, x, y)
    answer = recover(model, weights, gradient, size)
    assert answer.found == answer.rank == size
    assert measure_largest_error(answer, x) < 1e-4
    assert float(answer.certainty.min()) > 0.97
    product = answer.d.T @ torch.cat([answer.x, torch.ones(size, 1, dtype=torch.float64)], dim=1)
    wanted = torch.cat([gradient["1.weight"], gradient["1.bias"][:, None]], dim=1).double()
    assert float((product - wanted).norm() / wanted.norm()) < 1e-6


def test_sixteen_examples_are_found_although_few_neurons_see_only_one() -> None:
    model, (x, y) = network(), batch(16)
    answer = recover(model, *gradient_of(model, x, y), 16)
    assert (answer.found, answer.how) == (16, "sparse directions")
    assert measure_largest_error(answer, x) < 1e-5


def test_ratio_for_one_example_is_the_least_squares_solution() -> None:
    model = layers(3)
    gb = torch.tensor([1.0, -2.0, 0.5])
    noisy = torch.outer(gb, torch.linspace(0, 1, 64)) + 0.1 * torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    weights, _ = gradient_of(model, *batch(1))
    answer = recover(model, weights, {"1.weight": noisy, "1.bias": gb}, 1)
    oracle = torch.linalg.lstsq(gb[:, None].double(), noisy.double()).solution
    assert answer.how == "ratio"
    torch.testing.assert_close(answer.x, oracle)
    assert not torch.allclose(answer.x[0], (noisy / gb[:, None]).mean(dim=0).double(), atol=1e-3)  # as a mean of ratios would be


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.LeakyReLU, nn.ReLU])
def test_one_example_needs_no_zeros(activation: type[nn.Module]) -> None:
    model, (x, y) = layers(activation=activation), batch(1)
    answer = recover(model, *gradient_of(model, x, y), None)
    assert (answer.found, answer.how) == (1, "ratio")
    assert measure_largest_error(answer, x) < 1e-6


@pytest.mark.parametrize(
    ("model", "size", "rank", "note"),
    [
        (layers(activation=nn.Sigmoid), 4, 4, "no zeros"),
        (layers(activation=nn.LeakyReLU), 4, 4, "no zeros"),
        (layers(16), 30, None, "more examples than"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)), 1, None, "is a convolution"),
    ],
)
def test_unsuitable_layers_are_not_solved(model: nn.Sequential, size: int, rank: int | None, note: str) -> None:
    answer = recover(model, *gradient_of(model, *batch(size)), size)
    assert answer.found == 0
    assert rank in (None, answer.rank)
    assert note in answer.note


def test_unknown_number_of_examples_is_the_rank() -> None:
    model, (x, y) = network(), batch(5)
    answer = recover(model, *gradient_of(model, x, y), None)
    assert answer.rank == answer.found == 5


def test_duplicate_example_is_found_once_and_noted() -> None:
    model, (x, y) = network(), batch(4)
    x, y = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
    answer = recover(model, *gradient_of(model, x, y), 5)
    assert answer.rank == answer.found == 4
    assert measure_largest_error(answer, x) < 1e-5
    assert "rank 4 for 5 examples: some examples are equal" in answer.note


@pytest.mark.parametrize("outputs", [1, 2])
def test_parallel_rows_are_not_trusted_with_a_single_logit(outputs: int) -> None:
    """With a single logit, parallel gradient rows of two neurons do not show that only one example turns both on.

    Neurons that are on for the same examples then have parallel rows, also if these examples are several.
    """
    model, (x, y) = layers(outputs=outputs), batch(6)
    answer = recover(model, *gradient_of(model, x, y % 2, "logistic" if outputs == 1 else "cross_entropy"), 6)
    assert (answer.found, answer.how) == (6, "sparse directions")
    assert measure_largest_error(answer, x) < 1e-5


def test_without_bias_examples_are_found_up_to_their_norm() -> None:
    model, (x, y) = layers(bias=False), batch(5)
    answer = recover(model, *gradient_of(model, x, y), 5)
    assert not answer.scaled
    assert measure_largest_error(answer, x) < 1e-5  # also the sign is right
    assert "norm of its input is not known" in answer.note


@pytest.mark.parametrize(("noise", "error"), [(1e-6, 1e-5), (1e-4, 1e-3), (1e-3, 1e-2)])
def test_error_is_proportional_to_the_noise(noise: float, error: float) -> None:
    model, (x, y) = network(), batch(4)
    weights, gradient = gradient_of(model, x, y)
    rng = torch.Generator().manual_seed(7)
    noisy = {n: g + noise * g.norm() / g.numel() ** 0.5 * torch.randn(g.shape, generator=rng) for n, g in gradient.items()}
    answer = recover(model, weights, noisy, 4)
    assert answer.found == 4
    assert noise / 10 < measure_largest_error(answer, x) < error


def keep_largest(gradient: Tensors, share: float) -> Tensors:
    return {n: g * (g.abs() >= g.abs().flatten().quantile(1 - share)) for n, g in gradient.items()}


def test_values_that_were_not_sent_lower_the_certainty() -> None:
    model, (x, y) = network(), batch(1)
    weights, gradient = gradient_of(model, x, y)
    whole, most, little = (recover(model, weights, keep_largest(gradient, share), 1) for share in (1.0, 0.3, 0.01))
    assert measure_largest_error(most, x) < 1e-5
    assert float(whole.certainty) > 0.999
    assert float(little.certainty) < 0.7
    assert "was not sent" in little.note


def test_a_single_unknown_value_is_counted() -> None:
    model, (x, y) = network(), batch(1)
    x = torch.rand(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    weights, gradient = gradient_of(model, x, y)
    name = next(iter(gradient))
    live = gradient[name].any(dim=1).nonzero()[0]
    gradient[name][:, 3] = 0
    gradient[name][live, 4] = 0
    note = recover(model, weights, gradient, 1).note
    assert note.startswith(f"1 of the example's {x[0].numel()} values are unknown")


def test_examples_with_nearly_equal_errors_give_no_certain_mixtures() -> None:
    """Examples of one class in an untrained network: rows of neurons that several turn on are almost parallel."""
    certain, size = 0, 2
    for seed in MIXED_SEEDS:
        model, rng = network((48,), seed=seed), torch.Generator().manual_seed(seed)
        shared, own = torch.rand(1, *DATA.shape, generator=rng), torch.rand(size, *DATA.shape, generator=rng)
        x = 0.85 * shared + 0.15 * own
        answer = recover(model, *gradient_of(model, x, torch.zeros(size, dtype=torch.long)), size)
        true = DATA.normalise(x).flatten(1).double()
        sure = answer.certainty > SINGLE_NEURON_CERTAINTY
        assert bool((torch.cdist(answer.x[sure], true).amin(dim=1) < 1e-3).all()), seed
        certain += int(sure.sum())
    assert certain > 0


def test_too_large_batch_gives_only_exact_examples_or_none() -> None:
    model, (x, y) = network([48]), batch(24)
    answer = recover(model, *gradient_of(model, x, y), 24, samples=4096)
    true = DATA.normalise(x).flatten(1).double()
    assert answer.found < 24
    assert not answer.found or float((torch.cdist(answer.x, true).amin(dim=1)).max()) < 1e-3
    assert answer.note


BROKEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "zero": (torch.zeros_like, "is zero: no example activates"),
    "nan": (lambda g: g * float("nan"), "NaN or infinite"),
    "infinite": (lambda g: g / 0, "NaN or infinite"),
    "noise": (lambda g: torch.randn(g.shape, generator=torch.Generator().manual_seed(1)), "the first layer has no clear rank"),
    "signs": (torch.sign, ""),
    "few values": (lambda g: g * (g.abs() >= g.abs().max() * 0.9), ""),
    "one value": (lambda g: g * (g == g.abs().max()), ""),
    "tiny": (lambda g: g * 1e-30, ""),
    "huge": (lambda g: g.double() * 1e100, ""),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("examples", [1, 4, None])
def test_broken_gradients_raise_no_error(kind: str, examples: int | None) -> None:
    model, (x, y) = network(), batch(4)
    weights, gradient = gradient_of(model, x, y)
    change, note = BROKEN[kind]
    answer = recover(model, weights, {n: change(g) for n, g in gradient.items()}, examples, samples=2048)
    assert torch.isfinite(answer.x).all()
    assert answer.found == len(answer.certainty) == len(answer.d)
    if kind in ("zero", "nan", "infinite"):
        assert answer.found == 0
    if examples != 1:
        assert note in answer.note


def test_the_answer_does_not_change_from_call_to_call() -> None:
    model, (x, y) = network(), batch(8)
    weights, gradient = gradient_of(model, x, y)
    first, second = (recover(model, weights, gradient, 8) for _ in range(2))
    assert torch.equal(first.x, second.x)


def test_batch_of_48_behind_one_hidden_layer_is_recovered() -> None:
    size = 48  # twice the size that sampled directions recover
    model, (x, y) = network([512]), batch(size)
    answer = recover(model, *gradient_of(model, x, y), size)
    assert answer.found == answer.rank == size
    assert measure_largest_error(answer, x) < 1e-3


def test_certain_answers_for_a_large_noisy_batch_are_true_examples() -> None:
    model, (x, y) = network([512]), batch(40)
    weights, gradient = gradient_of(model, x, y)
    rng = torch.Generator().manual_seed(3)
    noisy = {n: g + 0.1 * g.norm() / g.numel() ** 0.5 * torch.randn(g.shape, generator=rng) for n, g in gradient.items()}
    answer = recover(model, weights, noisy, 40)
    sure = answer.x[answer.certainty > 0.9]
    true = DATA.normalise(x).flatten(1).double()
    assert not len(sure) or float((torch.cdist(sure, true).amin(dim=1) / true.norm(dim=1).mean()).max()) < 0.3
