"""Tests of apps whose server sends only the weights that are trained, such as a head or adapters."""

from typing import Any

import pytest
import torch
from generators import seed_default
from torch import Tensor, nn

from attacker.attacks import AttackSpec, Case, Need, find_unmet
from attacker.attacks.networks.forward import run_forward_pass
from attacker.attacks.networks.input_layer import find_input_layer
from attacker.audit.findings import NotChecked
from attacker.audit.label_checks import check_labels
from defenses.spec import DefenseSpec
from fedsim import models
from fedsim.engine.engines import EngineError
from fedsim.models import admit
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode

RATE = 0.05


@pytest.fixture
def app(app: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The quickstart app, with a function as in the tutorial, whose network has only the last layer as parameters."""

    def make_trained_part() -> nn.Module:
        torch.manual_seed(5)  # in place of a pretrained file: the same weights for server, clients and attacker
        net: nn.Module = app.task.Net()
        net.requires_grad_(False)
        net.get_submodule("fc3").requires_grad_(True)
        for module in net.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if not weight.requires_grad:
                    delattr(module, name)
                    module.register_buffer(name, weight.detach(), persistent=False)
        return net

    make_trained_part.__module__ = "task"
    monkeypatch.setattr(app.task, "make_trained_part", make_trained_part, raising=False)
    return app


def test_a_part_that_the_server_sends_is_refused_with_the_remedy(app: Any) -> None:
    with pytest.raises(EngineError, match="holds the other weights as buffers that are not saved"):
        app.run(app.record(net="Net"), net="make_trained_part")
    with pytest.raises(EngineError) as error:  # another network, of which the weights sent are no part
        app.run(app.record(net="make_trained_part"), net="Net")
    assert "buffers" not in str(error.value)


def test_the_update_of_a_trained_part_is_the_gradient_of_the_named_network(app: Any) -> None:
    app.run(app.record(net="make_trained_part"), net="make_trained_part", rounds=1)
    data = app.recording.manifest.data
    seen = next(iter(app.recording.read_observations()))
    assert set(seen.weights) == {"fc3.weight", "fc3.bias"}
    net = models.build(ModelSpec(name="task:make_trained_part"), data)
    net.load_state_dict(seen.weights)
    errors = []
    for client in range(3):
        x, y = app.example(client)
        loss = nn.functional.cross_entropy(net(data.normalise(x)), y)
        gradient = dict(zip(seen.weights, torch.autograd.grad(loss, list(net.parameters())), strict=True))
        errors.append(max(float((seen.update[name] + RATE * g).abs().max()) for name, g in gradient.items()))
    assert min(errors) < 1e-6


class Adapter(nn.Module):
    """A frozen linear layer, held as buffers that are not saved, and a trained product of two small matrices beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        for name, weight in list(self.base.named_parameters()):
            delattr(self.base, name)
            self.base.register_buffer(name, weight.detach(), persistent=False)
        self.low, self.high = nn.Parameter(torch.randn(8, inputs) / 20), nn.Parameter(torch.randn(outputs, 8) / 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.low.T @ self.high.T


def make_adapted() -> nn.Module:
    """Return a network of which only adapters (LoRA) are trained and sent, also in its last layer."""
    with seed_default(3):
        return nn.Sequential(nn.Flatten(), Adapter(64, 24), nn.Tanh(), Adapter(24, 10))


def test_adapters_are_audited_and_searched_for_without_a_last_layer_that_is_trained() -> None:
    admit(f"{__name__}:make_adapted")
    data, spec = DataSpec(shape=(1, 8, 8), num_classes=10), ModelSpec(name=f"{__name__}:make_adapted")
    net = models.build(spec, data)
    x, y = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([6])
    gradient = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    weights = {name: w.detach() for name, w in net.named_parameters()}
    update = {name: -0.1 * g for name, g in zip(weights, gradient, strict=True)}
    seen = Observation(
        round=1,
        client="anna",
        cohort=("anna",),
        num_examples=1,
        model=spec,
        data=data,
        training=Training(learning_rate=0.1, batch_size=1, steps=1, mode="eval"),
        defenses=DefenseSpec(),
        weights=weights,
        payload=encode(update),
    )
    (labels,) = check_labels([seen])
    assert isinstance(labels, NotChecked)
    assert find_input_layer(spec, data) is None
    case = Case((seen,))
    assert not Need.LINEAR_HEAD.is_met(case)
    assert find_unmet(AttackSpec(name="inverting_gradients").build(), case)
    cpl = AttackSpec(name="cpl", arguments={"label_rule": "joint", "steps": 200, "restarts": 2})
    (found,) = cpl.build()([case], rng=torch.Generator().manual_seed(0))
    assert float((found.x - x).square().mean()) < 1e-3
    wide = {name: w.double() for name, w in weights.items()}
    torch.testing.assert_close(run_forward_pass(net, wide, x.double()), net(x).double(), rtol=1e-5, atol=1e-5)
