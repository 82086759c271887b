"""Tests of apps whose server sends only the weights that are trained, such as a head or adapters."""

from typing import Any

import pytest
import torch
from torch import nn

from fedsim import models
from fedsim.engine.engines import EngineError
from fedsim.recording import ModelSpec

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
