"""Tests of random blocks before the last layer: their values, when they draw, and that other layers are unchanged."""

import math
from typing import Any

import pytest
import torch
from generators import seed_default
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, grad, vmap

from defenses.networks import Bottleneck, NetworkSpec, draw_at_random, dropout, find_hidden, precode, start_drawing, take_penalty
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(3, 16, 16), num_classes=5)
ALL = ["mlp", "lenet_cpl", "lenet_rog", "resnet20_4"]


def mlp(seed: int = 0) -> nn.Module:
    with seed_default(seed):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def build_guarded(beta: float = 0.5) -> nn.Module:
    with seed_default(0):
        return precode(mlp(), bottleneck=2, beta=beta)


def block_of(model: nn.Module) -> Bottleneck:
    (block,) = [m for m in model.modules() if isinstance(m, Bottleneck)]
    return block


X = torch.tensor([[0.1, 0.4, -0.3, 0.9], [1.0, -0.2, 0.6, 0.0], [0.3, 0.3, 0.3, -0.8]])
Y = torch.tensor([0, 2, 1])


@pytest.fixture(autouse=True)
def _restored_generator() -> Any:
    with seed_default(11):
        yield


def test_the_penalty_is_the_divergence_from_the_standard_normal_in_bits() -> None:
    model, features = build_guarded(beta=0.25).eval(), torch.tanh(mlp()[0](X))
    model(X)
    block = block_of(model)
    mean, raw = block.encoder(features).chunk(2, dim=-1)
    normal = Normal(mean, torch.log1p(raw.exp()))
    expected = kl_divergence(normal, Normal(0.0, 1.0)).sum(dim=1).mean() * 0.25 / math.log(2)
    assert torch.allclose(take_penalty(model), expected, rtol=1e-5)
    assert expected > 0.01


def test_the_bottleneck_decodes_a_draw_around_the_mean_in_training_and_the_mean_in_evaluation() -> None:
    model = build_guarded()
    block, features = block_of(model), torch.tanh(mlp()[0](X))
    mean, raw = block.encoder(features).chunk(2, dim=-1)
    assert torch.allclose(model.eval()(X), model[2].head(block.decoder(mean)))
    start_drawing(model)
    values: list[Tensor] = []
    handle = block.decoder.register_forward_pre_hook(lambda _, given: values.append(given[0]))
    for _ in range(3000):
        model(X)
    handle.remove()
    drawn, mean, std = torch.stack(values).detach(), mean.detach(), nn.functional.softplus(raw).detach()
    assert torch.allclose(drawn.mean(dim=0), mean, atol=float(4 * std.max() / math.sqrt(3000)))
    assert torch.allclose(drawn.std(dim=0) / std, torch.ones_like(std), atol=4 / math.sqrt(6000))


def test_a_penalty_can_be_taken_once_and_only_from_a_bottleneck() -> None:
    model = build_guarded()
    assert take_penalty(model) is None
    model(X)
    assert take_penalty(model) is not None
    assert take_penalty(model) is None
    plain = mlp()
    plain(X)
    assert take_penalty(plain) is None
    dropped = dropout(mlp())
    dropped(X)
    assert take_penalty(dropped) is None


def test_the_penalty_has_gradients_only_up_to_the_encoder() -> None:
    model = build_guarded()
    weights = dict(model.named_parameters())

    def penalty(weights: dict[str, Tensor]) -> Tensor:
        functional_call(model, weights, (X,))
        found = take_penalty(model)
        assert found is not None
        return found

    pulled = {name for name, g in grad(penalty)(weights).items() if g.abs().max() > 0}
    assert pulled == {f"{name}.{kind}" for name in ("0", "2.bottleneck.encoder") for kind in ("weight", "bias")}


def test_extreme_values_give_finite_penalties_and_gradients() -> None:
    model = build_guarded()
    with torch.no_grad():
        block_of(model).encoder.bias[:] = torch.tensor([0.0, 0.0, -200.0, 200.0])
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        logits = functional_call(model, weights, (X,))
        penalty = take_penalty(model)
        assert penalty is not None
        return logits.sum() + penalty

    assert all(g.isfinite().all() for g in grad(loss)(weights).values())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("network", ["precode(bottleneck=7)", "dropout(0.5)"])
def test_the_rest_of_a_network_keeps_its_initial_weights_and_its_head(name: str, network: str) -> None:
    plain, changed = (models.build(ModelSpec(name=name, network=n), DATA, seed=3) for n in ("", network))
    before, after = dict(plain.named_parameters()), dict(changed.named_parameters())
    mine = {key: t for key, t in after.items() if ".bottleneck." not in key}
    assert len(mine) == len(before)
    assert all(torch.equal(t, before[key.replace(".head.", ".")]) for key, t in mine.items())
    weight, bias = models.find_head(changed)
    assert torch.equal(after[weight], before[models.find_head(plain)[0]])
    assert (bias is None) == (models.find_head(plain)[1] is None)
    again = models.build(ModelSpec(name=name, network=network), DATA, seed=3)
    assert all(torch.equal(t, after[key]) for key, t in again.named_parameters())
    laid = models.build_layout(ModelSpec(name=name, network=network), DATA)
    assert {key: t.shape for key, t in laid.named_parameters()} == {key: t.shape for key, t in after.items()}
    expected = {key for key in after if ".bottleneck." in key}
    assert find_hidden(changed) == expected
    assert len(expected) == (4 if network.startswith("precode") else 0)


def test_building_leaves_the_model_that_it_is_given_and_the_global_generator_alone() -> None:
    model = mlp()
    state, names = {n: t.clone() for n, t in model.state_dict().items()}, [n for n, _ in model.named_modules()]
    precode(model)
    dropout(model)
    assert [n for n, _ in model.named_modules()] == names
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    before = torch.get_rng_state()
    NetworkSpec.parse("precode(bottleneck=9)")
    models.build(ModelSpec(name="mlp", network="precode"), DATA)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_is_its_own_head_can_be_changed() -> None:
    model = dropout(nn.Linear(4, 2))
    assert models.find_head(model) == ("head.weight", "head.bias")
    assert model(X).shape == (3, 2)


def test_dropout_keeps_the_mean_and_zeroes_the_asked_share_where_a_client_trains() -> None:
    model = dropout(mlp(), 0.3).eval()
    still = model(X)
    start_drawing(model)
    assert not model.training
    assert torch.allclose(torch.stack([model(X) for _ in range(4000)]).mean(dim=0), still, atol=0.05)
    kept: list[Tensor] = []
    model[2].head.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    for _ in range(200):
        model(X)
    zeros = (torch.stack(kept) == 0).float()
    assert abs(float(zeros.mean()) - 0.3) < 4 * math.sqrt(0.21 / zeros.numel())
    assert torch.equal(model.eval()(X), still)


def test_drawing_at_random_is_limited_to_its_block_and_repeatable() -> None:
    model, x = build_guarded().eval(), torch.ones(2, 4)
    fixed, state = model(x), torch.get_rng_state()

    def draw(seed: int) -> Tensor:
        with torch.no_grad(), draw_at_random(model, torch.Generator().manual_seed(seed)):
            drawn: Tensor = model(x)
        return drawn

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert not torch.equal(draw(1), fixed)
    with pytest.raises(RuntimeError, match="shapes"), draw_at_random(model, torch.Generator()):
        model(torch.ones(2, 3))
    assert torch.equal(model(x), fixed)
    assert torch.equal(torch.get_rng_state(), state)


def test_start_drawing_switches_on_the_added_block_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
    changed = precode(model).eval()
    start_drawing(changed)
    assert {type(m).__name__ for m in changed.modules() if m.training} == {"Bottleneck", "Linear"}
    assert {name for name, m in changed.named_modules() if m.training and ".bottleneck" not in name} == set()


@pytest.mark.parametrize("network", ["precode(bottleneck=3)", "dropout(0.5)"])
def test_vmap_over_problems_draws_for_each_on_its_own(network: str) -> None:
    model = NetworkSpec.parse(network).apply(mlp())
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        value, penalty = nn.functional.cross_entropy(functional_call(model, weights, (x,)), y), take_penalty(model)
        return value if penalty is None else value + penalty

    xs, ys = X.expand(4, 3, 4), Y.expand(4, 3)
    start_drawing(model)
    drawn = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(weights, xs, ys)
    assert not torch.allclose(drawn["0.weight"][0], drawn["0.weight"][1])
    model.eval()
    still = vmap(grad(loss), in_dims=(None, 0, 0))(weights, xs, ys)  # nothing is drawn, so that vmap needs no `randomness`
    alone = grad(loss)(weights, X, Y)
    assert all(torch.allclose(still[n][i], alone[n], atol=1e-6) for n in alone for i in range(4))


def test_a_model_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="Conv2d has no linear layer"):
        precode(nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precode(0)", "bottleneck must be a whole number from 1 to 65536, got 0"),
        ("precode(beta=-1)", "beta must be finite and not negative, got -1"),
        ("dropout(1)", r"p must be in \[0, 1\), got 1"),
        ("dropout(rate=0.5)", r"'rate'.*Its parameters: \(p: float = 0.5\)"),
        ("precoder", "unknown name 'precoder'.*Did you mean 'precode'.*dropout, precode"),
        ("precode | dropout", "has 2 parts; give only one: dropout or precode"),
    ],
)
def test_wrong_arguments_raise_with_the_range(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NetworkSpec.parse(text)
    with pytest.raises(ValueError, match=words):
        ModelSpec(name="mlp", network=text)
