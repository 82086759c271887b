"""Tests of gradient rules (defenses that change a client's gradient in each step), against hand examples and loops."""

import math
from typing import Any

import pytest
import torch
from generators import seed_default
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from defenses.gradients import GRADIENTS, GradientSpec
from defenses.per_example import dp_sgd, fed_cdp
from defenses.rules import GradientProblem, GradientRule, LocalStep, TrainingContext, plain

LINEAR = {"weight": torch.tensor([[1.0, -2.0]]), "bias": torch.tensor([0.5])}
X = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
Y = torch.tensor([1.0, -1.0])


def times(logits: Tensor, y: Tensor) -> Tensor:
    """Compute a loss with a simple gradient: for one example, y * x for the weight and y for the bias."""
    return (logits[:, 0] * y).mean()


def linear() -> GradientProblem:
    model = nn.Linear(2, 1)
    return GradientProblem(model, lambda weights, x: functional_call(model, dict(weights), (x,)), times)


def classifier(seed: int = 0, norm: bool = False) -> tuple[GradientProblem, dict[str, Tensor]]:
    with seed_default(seed):
        between = [nn.BatchNorm1d(5)] if norm else []
        model = nn.Sequential(nn.Linear(4, 5), *between, nn.Sigmoid(), nn.Linear(5, 3)).eval()
    problem = GradientProblem(model, lambda weights, x: functional_call(model, dict(weights), (x,)), nn.functional.cross_entropy)
    return problem, {name: p.detach() for name, p in model.named_parameters()}


def draw_examples(count: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    rng = Generator().manual_seed(seed)
    return torch.rand(count, 4, generator=rng), torch.randint(3, (count,), generator=rng)


def compute_gradient(
    rule: GradientRule, problem: GradientProblem, weights: dict[str, Tensor], x: Tensor, y: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    current = {name: w.clone().requires_grad_() for name, w in weights.items()}
    gradient, loss = rule.gradient(problem, current, x, y, Generator().manual_seed(seed))
    assert list(gradient) == list(weights)
    assert all(g.shape == weights[name].shape and not g.requires_grad for name, g in gradient.items())
    assert loss.shape == ()
    return gradient


def close(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: Any) -> bool:
    return list(a) == list(b) and all(torch.allclose(a[name], b[name], **tolerance) for name in a)


def test_dp_sgd_clips_each_example_as_a_whole() -> None:
    """The gradients are (3, 4 | 1) with norm sqrt(26), and -(0.3, 0.4 | 1) with norm sqrt(1.25)."""
    found = compute_gradient(dp_sgd(max_norm=1.0, noise=0.0), linear(), LINEAR, X, Y)
    long, short = 26**-0.5, -(1.25**-0.5)
    assert torch.allclose(found["weight"], torch.tensor([[3 * long + 0.3 * short, 4 * long + 0.4 * short]]) / 2)
    assert torch.allclose(found["bias"], torch.tensor([long + short]) / 2)
    longer = compute_gradient(dp_sgd(max_norm=2.0, noise=0.0), linear(), LINEAR, X, Y)  # the second is below this bound
    assert torch.allclose(longer["weight"], torch.tensor([[6 * long - 0.3, 8 * long - 0.4]]) / 2)


def test_fed_cdp_clips_each_tensor_of_each_example() -> None:
    """(3, 4) with norm 5 becomes (1.2, 1.6), while (0.3, 0.4) and both biases are unchanged."""
    found = compute_gradient(fed_cdp(max_norm=2.0, noise=0.0), linear(), LINEAR, X, Y)
    assert torch.allclose(found["weight"], torch.tensor([[(1.2 - 0.3) / 2, (1.6 - 0.4) / 2]]))
    assert torch.allclose(found["bias"], torch.tensor([0.0]))


@pytest.mark.parametrize("spec", ["dp_sgd(1e6, noise=0)", "fed_cdp(1e6, noise=0)", "soteria(0)"])
def test_in_its_limit_a_rule_gives_the_plain_gradient(spec: str) -> None:
    problem, weights = classifier()
    x, y = draw_examples()
    rule = GradientSpec.parse(spec).build()
    assert close(compute_gradient(rule, problem, weights, x, y), compute_gradient(plain(), problem, weights, x, y), atol=1e-7)


@pytest.mark.parametrize("spec", ["dp_sgd(0.1, noise=0)", "fed_cdp(0.05, noise=0)"])
def test_clipping_equals_a_loop_over_the_examples(spec: str) -> None:
    problem, weights = classifier()
    x, y = draw_examples()
    total = {name: torch.zeros_like(w) for name, w in weights.items()}
    for one in range(len(x)):
        own = compute_gradient(plain(), problem, weights, x[one : one + 1], y[one : one + 1])
        norm = math.sqrt(sum(float(g.square().sum()) for g in own.values()))
        for name, g in own.items():
            length, bound = (norm, 0.1) if spec.startswith("dp_sgd") else (float(g.norm()), 0.05)
            total[name] += g * min(1, bound / length) / len(x)
    assert close(compute_gradient(GradientSpec.parse(spec).build(), problem, weights, x, y), total, atol=1e-7)
    assert not close(compute_gradient(plain(), problem, weights, x, y), total, rtol=0.1)


def test_per_example_gradients_in_parts_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, weights = classifier()
    x, y = draw_examples(7)
    whole = compute_gradient(dp_sgd(0.1, noise=0), problem, weights, x, y)
    monkeypatch.setattr("defenses.per_example.PER_EXAMPLE_BYTES", 4 * 43 * 3)  # three examples at once
    assert close(compute_gradient(dp_sgd(0.1, noise=0), problem, weights, x, y), whole, atol=1e-8)


class _Twice(nn.Module):
    """A network that calls one linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).sigmoid()).sigmoid())


class _Sequence(_Twice):
    """A network that calls a linear layer with two vectors for each example."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.stack([x, x.square()], dim=1)).sigmoid().sum(dim=1))


@pytest.mark.parametrize("spec", ["dp_sgd(0.1, noise=0)", "fed_cdp(0.05, noise=0)"])
@pytest.mark.parametrize("kind", [None, _Twice, _Sequence])
def test_large_linear_layers_need_no_gradient_of_each_example(
    spec: str, kind: type[nn.Module] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, weights = classifier()
    if kind is not None:
        torch.manual_seed(0)
        model = kind()
        problem = problem._replace(model=model, forward=lambda weights, x: functional_call(model, dict(weights), (x,)))
        weights = {name: p.detach() for name, p in model.named_parameters()}
    x, y = draw_examples(7)
    x[0] = 0.0
    rule = GradientSpec.parse(spec).build()

    def total(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = rule.expected(problem, weights, x, y)
        return sum((g.sin().sum() for g in found.values()), start=x.new_zeros(())), found

    slope, (_, plainly) = grad_and_value(total, has_aux=True)(x)
    monkeypatch.setattr("defenses.per_example.LARGE_LINEAR", 1)
    monkeypatch.setattr("defenses.per_example.MAX_AT_ONCE", 3)
    fast, (_, factored) = grad_and_value(total, has_aux=True)(x)
    assert close(factored, plainly, atol=1e-7)
    assert torch.allclose(fast, slope, atol=1e-6)
    assert close(compute_gradient(rule, problem, weights, x, y), plainly, atol=1e-7)


@pytest.mark.parametrize("spec", ["dp_sgd(0.2, noise=1.5)", "fed_cdp(0.2, noise=1.5)"])
def test_the_noise_has_the_deviation_of_the_sum_divided_by_the_batch_size(spec: str) -> None:
    problem, weights = classifier()
    x, y = draw_examples(6)
    rule, silent = GradientSpec.parse(spec).build(), GradientSpec.parse(spec.replace("1.5", "0")).build()
    still = compute_gradient(silent, problem, weights, x, y)
    drawn = [compute_gradient(rule, problem, weights, x, y, seed=s) for s in range(300)]
    noise = torch.stack([torch.cat([(g[name] - still[name]).flatten() for name in g]) for g in drawn])
    assert noise.shape == (300, 43)
    std, count = 1.5 * 0.2 / 6, noise.numel()
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(count)
    assert abs(float(noise.std()) / std - 1) < 4 / math.sqrt(2 * count)
    each = noise.std(dim=0) / std  # on every coordinate
    assert each.min() > 0.8
    assert each.max() < 1.2
    correlation = torch.corrcoef(noise.T) - torch.eye(43)
    assert correlation.abs().max() < 5 / math.sqrt(300)


@pytest.mark.parametrize("scope", ["tensor", "gradient"])
def test_the_noise_has_the_asked_ratio_to_the_signal(scope: str) -> None:
    problem, weights = classifier()
    x, y = draw_examples(6)
    still = compute_gradient(fed_cdp(0.2, noise=0), problem, weights, x, y)
    rule = fed_cdp(0.2, snr_db=10, snr_scope=scope)
    drawn = [compute_gradient(rule, problem, weights, x, y, seed=s) for s in range(400)]
    whole = sum(float(g.square().sum()) for g in still.values()) / 43
    for name, g in still.items():
        noise = torch.stack([d[name] - g for d in drawn]).square().mean()
        signal = float(g.square().mean()) if scope == "tensor" else whole
        assert float(noise) / signal == pytest.approx(0.1, rel=4 * math.sqrt(2 / (400 * g.numel())))


def test_the_same_generator_gives_the_same_noise_and_another_other_noise() -> None:
    problem, weights = classifier()
    batch, rule = draw_examples(), dp_sgd(1.0, noise=1.0)
    one, same, other = (compute_gradient(rule, problem, weights, *batch, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name]) for name in one)


def test_noise_is_fresh_in_every_step() -> None:
    problem, weights = classifier()
    x, y = draw_examples()
    rng = Generator().manual_seed(0)
    current = {name: w.clone().requires_grad_() for name, w in weights.items()}
    one, two = (dp_sgd().gradient(problem, current, x, y, rng)[0] for _ in range(2))
    assert not torch.equal(one["0.weight"], two["0.weight"])


@pytest.mark.parametrize("spec", ["plain", "dp_sgd(0.05, noise=3)", "fed_cdp(0.05, snr_db=-3)", "soteria"])
def test_the_reported_loss_is_the_mean_and_arguments_are_unchanged(spec: str) -> None:
    problem, weights = classifier()
    x, y = draw_examples()
    before = {name: w.clone() for name, w in weights.items()}
    current = {name: w.requires_grad_() for name, w in weights.items()}
    _, loss = GradientSpec.parse(spec).build().gradient(problem, current, x, y, Generator().manual_seed(0))
    assert loss.item() == pytest.approx(problem.compute_loss(before, x, y).item(), rel=1e-6)
    assert all(torch.equal(w, before[name]) and w.grad is None for name, w in weights.items())
    assert not x.requires_grad


@pytest.mark.parametrize("spec", ["dp_sgd(0.1, noise=0)", "fed_cdp(0.05, noise=0)", "plain"])
def test_what_an_attacker_expects_is_the_clients_gradient_and_maps_over_problems(spec: str) -> None:
    problem, weights = classifier()
    rule = GradientSpec.parse(spec).build()
    xs, ys = (
        torch.stack([draw_examples(seed=s)[0] for s in (1, 2, 3)]),
        torch.stack([draw_examples(seed=s)[1] for s in (1, 2, 3)]),
    )
    together = vmap(lambda x, y: rule.expected(problem, weights, x, y), randomness="different")(xs, ys)
    for i in range(3):
        assert close({n: g[i] for n, g in together.items()}, compute_gradient(rule, problem, weights, xs[i], ys[i]), atol=1e-7)
    soft = nn.functional.one_hot(ys[0], 3).float()
    assert close(rule.expected(problem, weights, xs[0], soft), {n: g[0] for n, g in together.items()}, atol=1e-7)


@pytest.mark.parametrize("spec", ["dp_sgd(0.1)", "fed_cdp(0.05, noise=1)"])
def test_the_expected_gradient_can_be_differentiated_by_the_inputs(spec: str) -> None:
    """Compare the derivative of a squared distance by x with finite differences."""
    problem, weights = classifier()
    problem = GradientProblem(problem.model.double(), problem.forward, problem.criterion)
    weights = {name: w.double() for name, w in weights.items()}
    x, y = draw_examples(3)
    rule = GradientSpec.parse(spec).build()

    def distance(x: Tensor) -> Tensor:
        return sum(g.square().sum() for g in rule.expected(problem, weights, x, y).values())

    assert torch.autograd.gradcheck(distance, x.double().requires_grad_())


def test_batch_norm_is_refused_in_training_mode_and_not_in_eval_mode() -> None:
    problem, weights = classifier(norm=True)
    batch = draw_examples()
    compute_gradient(dp_sgd(), problem, weights, *batch)
    problem.model.train()
    with pytest.raises(ValueError, match=r"as 1 does: set training\.mode to 'eval'"):
        compute_gradient(dp_sgd(), problem, weights, *batch)
    compute_gradient(plain(), problem, weights, *batch)


def facts(*steps: tuple[int, float]) -> TrainingContext:
    return TrainingContext(nn.Linear(2, 1), [LocalStep(*step) for step in steps], exact=len(steps) == 1)


@pytest.mark.parametrize("steps", [[(4, 0.5)], [(4, 0.5), (2, 0.25)]])
def test_the_attacker_knows_the_power_of_fixed_noise(steps: list[tuple[int, float]]) -> None:
    channel = dp_sgd(max_norm=2.0, noise=0.3).channel(facts(*steps))
    seen = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    expected = 3 * sum((share * 0.3 * 2.0 / size) ** 2 for size, share in steps)
    assert float(channel.noise(seen)) == pytest.approx(expected)
    assert channel.expect(seen, channel.learn(seen)) is seen
    assert fed_cdp(max_norm=2.0, noise=0.3).channel(facts(*steps)).noise(seen) == channel.noise(seen)


def test_the_attacker_estimates_noise_that_follows_the_signal() -> None:
    """A signal of power 9 with noise of a tenth of it has a total power of 9.9, of which 0.9 is noise."""
    seen = {"weight": torch.tensor([[9.9**0.5, 0.0]]), "bias": torch.zeros(1)}
    rule = fed_cdp(snr_db=10)
    assert float(rule.channel(facts((4, 0.5))).noise(seen)) == pytest.approx(0.9)
    two = float(rule.channel(facts((4, 0.5), (4, 0.5))).noise(seen))  # the signal adds up to twice, its noise to sqrt(2)
    assert two == pytest.approx(9.9 * 0.05 / 1.05)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", "plain"),
        ("plain", "plain"),
        ("plain()", "plain"),
        ("dp_sgd(2, noise=0.5)", "dp_sgd(2, noise=0.5)"),
        ("fed_cdp(max_norm=4, snr_db=10)", "fed_cdp(4, snr_db=10)"),
        ("soteria(prune=0.5, layer='6')", "soteria(0.5, layer='6')"),
    ],
)
def test_a_specification_is_printed_as_it_reads_back(text: str, printed: str) -> None:
    spec = GradientSpec.parse(text)
    assert str(spec) == printed
    assert str(GradientSpec.parse(printed)) == printed
    assert hash(spec) == hash(GradientSpec.parse(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp_sgd(max_norm=-1)", "max_norm must be positive and finite, got -1"),
        ("dp_sgd(clip=1)", r"dp_sgd: .*'clip'.*Its parameters: \(max_norm"),
        ("fed_cdp(4)", "give either noise or snr_db"),
        ("fed_cdp(4, snr_db=1e999)", "snr_db must be finite, got inf"),
        ("fed_cdp(4, snr_db=3, snr_scope='layer')", "snr_scope must be 'tensor' or 'gradient', got 'layer'"),
        ("soteria(prune=1)", r"prune must be in \[0, 1\), got 1"),
        ("soteria | plain", "has 2 parts; give only one"),
        ("sotera", "unknown name 'sotera'.*Did you mean 'soteria'"),
    ],
)
def test_wrong_arguments_raise_with_the_range(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GradientSpec.parse(text)


def test_all_rules_are_registered_and_described() -> None:
    assert list(GRADIENTS) == ["dp_sgd", "fed_cdp", "plain", "soteria"]
    assert all((GRADIENTS[name].__doc__ or "").split("\n")[0].endswith(".") for name in GRADIENTS)
