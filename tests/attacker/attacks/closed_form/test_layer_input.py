"""Tests of the closed form (route) `layer_input`: a hidden linear layer's input is read exactly and inverted with a prior."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from generators import seeded
from observations import observe_steps
from torch import Tensor, nn

from attacker.attacks import Case, exact
from attacker.attacks.closed_form import layer_input as route
from attacker.attacks.closed_form.observations import observe as observed
from attacker.attacks.matching.smooth_images import build_smooth_spread
from attacker.attacks.timing import time_call
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(3, 16, 16), num_classes=10, mean=(0.5,) * 3, std=(0.5,) * 3)


class Net(nn.Module):
    """A network as in tutorials: two convolutions with an activation and max pooling, and two linear layers."""

    def __init__(self, *, activation: Callable[[Tensor], Tensor] = torch.relu, drop: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 16, 3, padding=1)
        self.pool, self.drop, self.activation = nn.MaxPool2d(2), nn.Dropout(drop), activation
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 32, bias=bias), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.activation(self.conv1(x)))
        x = self.pool(self.activation(self.conv2(x)))
        found: Tensor = self.fc2(self.activation(self.fc1(self.drop(x.flatten(1)))))
        return found


def plain() -> Net:
    return Net()


def sigmoid() -> Net:
    return Net(activation=torch.sigmoid)


def dropped() -> Net:
    return Net(drop=0.3)


def build_normalised() -> Net:
    """Return the network with weight norm on its first linear layer, whose weight is then no parameter."""
    net = Net()
    nn.utils.parametrizations.weight_norm(net.fc1)
    return net


def build_unbiased() -> Net:
    return Net(bias=False)


def convolutional() -> nn.Module:
    """Return a network whose only linear layer is the last one, without a bias."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10, bias=False)),
    )


def make_case(build: Callable[[], nn.Module], count: int = 1, network: str = "", **settings: Any) -> tuple[Case, Tensor, Tensor]:
    reference = f"{__name__}:{build.__name__}"
    models.admit(reference)
    spread = build_smooth_spread(DATA)
    x = (0.5 + spread(torch.randn(count, *DATA.shape, generator=torch.Generator().manual_seed(5)))).clamp(0, 1)
    y = torch.arange(count) + 3
    model = ModelSpec(name=reference, network=network)
    return Case((observe_steps((x, y), model=model, data=DATA, **settings),)), x, y


def psnr(found: Tensor, x: Tensor) -> float:
    return float(-10 * (found - x).square().mean().log10())


def attack_case(one: Case) -> Any:
    (found,) = exact(route="layer_input", fallback="none")([one], rng=torch.Generator().manual_seed(0))
    return found


def test_example_behind_relu_and_max_pooling_is_5_db_above_grey() -> None:
    one, x, y = make_case(plain)
    found = attack_case(one)
    assert (found.route, found.y.tolist()) == ("layer_input", y.tolist())
    assert psnr(found.x, x) > psnr(torch.full_like(x, 0.5), x) + 5
    assert any("256 inputs of fc1" in note for note in found.notes)


def test_encoder_of_a_precode_bottleneck_reveals_the_features() -> None:
    """A PRECODE bottleneck draws random values: its answers hardly differ with them, and a batch of two is refused."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        one, x, _ = make_case(convolutional, network="precode(bottleneck=16)")
        found.append(attack_case(one))
        assert psnr(found[-1].x, x) > psnr(torch.full_like(x, 0.5), x) + 5
        assert any("256 inputs of 7.bottleneck.encoder" in note for note in found[-1].notes)
    assert psnr(found[0].x, found[1].x) > 28
    without, _, _ = make_case(convolutional)
    with pytest.raises(ValueError, match="no hidden linear layer"):
        route.find_suitable_layer(observed([without]))
    two, _, _ = make_case(convolutional, count=2, network="precode(bottleneck=16)")
    with pytest.raises(ValueError, match="update of one example and one step, and this update is of 2 examples"):
        route.find_suitable_layer(observed([two]))


def test_true_example_reproduces_layer_input_and_convolution_gradient() -> None:
    """At the true example, the simulated layer input and convolution gradient are the observed ones; at another, not."""
    one, x, _ = make_case(plain)
    seen = observed([one])
    layer = route.find_suitable_layer(seen)
    assert (layer.name, layer.inputs, layer.convolution) == ("fc1", 256, "conv2.weight")
    passed, weight, bias = route.InputRecorder(seen, 0), seen.gradient["fc1.weight"][0], seen.gradient["fc1.bias"][0]
    cotangent = (bias @ seen.get_weights(0)["fc1.weight"]).float()
    changed = {"conv2.weight": passed.state["conv2.weight"].clone().requires_grad_()}

    def missed(example: Tensor) -> tuple[float, float]:
        h = passed.record_inputs(example, changed)["fc1"]
        (made,) = torch.autograd.grad(h, list(changed.values()), cotangent)
        h = h.detach()
        read, whole = (bias @ weight / bias.square().sum()).float(), seen.gradient["conv2.weight"][0].float()
        return float((h - read).norm() / read.norm()), float((made - whole).norm() / whole.norm())

    assert max(missed(x[0])) < 1e-4
    assert min(missed(x[0].flip(-1))) > 0.1


@pytest.mark.parametrize(
    ("build", "count", "settings", "words"),
    [
        (plain, 2, {}, "needs an update of one example and one step"),
        (sigmoid, 1, {}, "no ReLU"),
        (build_unbiased, 1, {}, "no hidden linear layer is suitable: it must have a bias"),
        (build_normalised, 1, {}, "no hidden linear layer is suitable"),
        (plain, 1, {"defense": "gaussian(0.1)"}, "does not have rank one"),
        (plain, 1, {"defense": "withhold(['fc1.*'])"}, "fc1|hidden linear layer"),
    ],
)
def test_unsuitable_layer_is_refused_with_the_reason(
    build: Callable[[], Net], count: int, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        attack_case(make_case(build, count, **settings)[0])


def test_dropout_in_training_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "STAGE_STEPS", (3, 3))
    one, _, _ = make_case(dropped)
    assert attack_case(one).route == "layer_input"
    observation = one.observations[0]
    training = replace(observation.training, mode="train")
    with pytest.raises(ValueError, match="dropout"):
        attack_case(Case((replace(observation, training=training),)))


def test_no_search_continues_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search from there would fit the whole gradient better and move away from the example, so it must not be run."""
    monkeypatch.setattr(route, "STAGE_STEPS", (30, 30))
    one, _, _ = make_case(plain)
    (found,) = exact(fallback="inverting_gradients", steps=2)([one], rng=torch.Generator().manual_seed(0))
    assert (found.route, found.iterations) == ("layer_input", 0)


def build_wide() -> Net:
    """Return the network with a large hidden layer, whose gradient takes much longer than an iteration."""
    net = Net()
    net.fc1, net.fc2 = nn.Linear(16 * 4 * 4, 4000), nn.Linear(4000, 10)
    return net


def test_the_time_of_an_iteration_is_that_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, _ = make_case(build_wide)

    def time_attack(steps: int) -> float:
        monkeypatch.setattr(route, "STAGE_STEPS", (steps, steps))
        return min(time_call(lambda: exact(route="layer_input", fallback="none")([one], rng=seeded()), "cpu") for _ in range(2))

    took = (time_attack(110) - time_attack(10)) / 200
    measured = min(exact(fallback="none").time_evaluation(one) for _ in range(3))
    assert 0.5 < measured / took < 2


def test_a_network_without_convolutions_is_refused_with_the_reason() -> None:
    x, y = torch.rand(1, *DATA.shape, generator=torch.Generator().manual_seed(5)), torch.tensor([3])
    one = Case((observe_steps((x, y), model=ModelSpec(name="mlp", arguments={"hidden": (64, 32)}), data=DATA),))
    with pytest.raises(ValueError, match="no ReLU precedes it"):
        attack_case(one)
