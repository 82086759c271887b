"""Tests of the check of an audit that compares what clients returned with the stated training."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from observations import make_observation
from torch import Tensor, nn

from attacker.audit import Finding, NotChecked, PassedCheck
from attacker.audit.training_checks import check_shape, check_training
from fedsim import models
from fedsim.models import ModuleSpec
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import Payload

TRAINING = Training(learning_rate=0.1, batch_size=2, steps=1)


def observe(returned: dict[str, Tensor], start: dict[str, Tensor], training: Training = TRAINING) -> Observation:
    """Return the observation of a client that returned the tensors `returned` instead of its weights after training."""
    change = {name: returned[name] - tensor for name, tensor in start.items()}
    made = make_observation(
        change, start, training=training, model=ModelSpec(name="mlp"), data=DataSpec(shape=(6,), num_classes=3)
    )
    return replace(made, payload=Payload(tensors=returned, codec="weights"))


@pytest.fixture
def start() -> dict[str, Tensor]:
    return {"hidden.weight": torch.randn(8, 6, generator=torch.Generator().manual_seed(0))}


def test_changes_in_place_of_weights_are_a_finding_and_weights_are_none(start: dict[str, Tensor]) -> None:
    step = {name: 0.01 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) for name, w in start.items()}
    after = {name: w + step[name] for name, w in start.items()}
    assert isinstance(check_training([observe(after, start)]), PassedCheck)
    assert isinstance(
        check_training([observe(after, start), observe(step, start)]), PassedCheck
    )  # one update may be odd by chance
    found = check_training([observe(step, start), observe(after, start), observe(step, start)])
    assert isinstance(found, Finding)
    assert (found.rule, found.grade) == ("training-misstated", "low")
    assert "In 2 of 3 updates" in found.evidence
    assert "look like changes of the weights instead of weights" in found.evidence


def test_a_learning_rate_that_adam_cannot_have_is_a_finding(start: dict[str, Tensor]) -> None:
    after = {name: w + 0.5 * torch.sign(w) for name, w in start.items()}
    stated = replace(TRAINING, optimiser="adam", learning_rate=1e-3)
    found = check_training([observe(after, start, stated)])
    assert isinstance(found, Finding)
    assert "compare learning_rate" in found.evidence


def test_packed_updates_are_not_compared(start: dict[str, Tensor]) -> None:
    packed = make_observation(
        start, start, training=TRAINING, model=ModelSpec(name="mlp"), data=DataSpec(shape=(6,), num_classes=3)
    )
    assert isinstance(check_training([packed]), NotChecked)


@pytest.mark.parametrize(("stated", "momentum", "named"), [(0.1, 0.0, False), (0.01, 0.0, True), (0.02, 0.9, False)])
def test_a_learning_rate_too_small_for_the_heads_change_is_a_finding(stated: float, momentum: float, named: bool) -> None:
    """The client's rate is 0.1, with which a step changes the bias by up to 0.1."""
    data = DataSpec(shape=(6,), num_classes=3)
    net = models.build(ModelSpec(name="mlp"), data)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    torch.nn.functional.cross_entropy(net(torch.rand(2, 6)), torch.tensor([0, 0])).backward()
    after = {name: start[name] - 0.1 * p.grad for name, p in net.named_parameters() if p.grad is not None}
    found = check_training([observe(after, start, replace(TRAINING, learning_rate=stated, momentum=momentum))])
    assert isinstance(found, Finding) is named
    if isinstance(found, Finding):
        assert re.search(r"changed by 0\.1\d* in all, and 1 step of SGD", found.evidence), found.evidence
        assert "can change it by at most 0.02: compare learning_rate" in found.evidence


class TwiceUsed(nn.Module):
    """A network that uses one weight for both halves of its input, so that one example adds a matrix of rank two."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(20, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x[:, :20])) + torch.tanh(self.hidden(x[:, 20:])))


class Attending(nn.Module):
    """A network with self-attention over the tokens of a text. It adds a matrix of rank one per token to a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 16), nn.Parameter(0.02 * torch.randn(40, 16))
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x.long()) + self.place
        return self.head(torch.tanh(rows + self.attention(rows, rows, rows)[0]).mean(1))


def train(
    net: nn.Module,
    *,
    tokens: bool = False,
    steps: int = 1,
    batch: int = 4,
    decay: float = 0.0,
    sum_loss: bool = False,
    sent_in: torch.dtype = torch.float32,
    momentum: float = 0.0,
    earlier_steps: int = 0,
) -> Observation:
    """Return the observation of a client that takes steps of SGD on batches, and states one step on a batch of 4.

    tokens: whether examples are random whole numbers from 0 to 49 instead of random real numbers from 0 to 1. momentum: not
    stated. earlier_steps: steps before the observed round, with the same optimiser, whose momentum the client keeps.
    """
    rng = torch.Generator().manual_seed(2)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=decay, momentum=momentum)
    start: dict[str, Tensor] = {}
    for step in range(earlier_steps + steps):
        if step == earlier_steps:
            start = {name: p.detach().clone() for name, p in net.named_parameters()}
        optimiser.zero_grad()
        x, y = torch.rand(batch, 40, generator=rng), torch.randint(3, (batch,), generator=rng)
        x = (50 * x).floor() if tokens else x
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum" if sum_loss else "mean")
        loss.backward()
        optimiser.step()
    returned = {name: p.detach().clone() for name, p in net.named_parameters()}
    stated = Training(learning_rate=0.1, batch_size=4, steps=1, weight_decay=decay)
    made = make_observation(
        {name: returned[name] - w for name, w in start.items()},
        start,
        training=stated,
        model=ModelSpec(name="mlp"),
        data=DataSpec(shape=(40,), num_classes=3),
    )
    returned = {name: w.to(sent_in).float() for name, w in returned.items()}
    payload = Payload(tensors=returned, codec="weights")
    return replace(made, payload=payload, model=ModuleSpec.of(net), num_examples=4)


def build_perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 3}, r"has the rank of at least (8|9|1\d) examples, and at most 4 follow from batch_size=4, steps=1"),
        ({"batch": 12}, r"has the rank of at least (8|9|1\d) examples, and at most 4 follow"),
        ({"batch": 12, "decay": 0.01}, r"has the rank of at least (8|9|1\d) examples, and at most 4 follow"),
        ({"steps": 12}, r"changed by 0\.\d+ in all|has the rank of at least"),
        ({"momentum": 0.9, "earlier_steps": 1}, r"has the rank of at least (5|6|7|8) examples, and at most 4 follow.*momentum"),
        ({"sum_loss": True}, r"changed by 0\.\d+ in all, and 1 step of SGD"),
    ],
)
def test_more_steps_or_examples_than_stated_are_a_finding(settings: dict[str, Any], words: str) -> None:
    torch.manual_seed(0)
    found = check_training([train(build_perceptron(), **settings)])
    assert isinstance(found, Finding)
    assert re.search(words, found.evidence), found.evidence


def test_layers_that_see_every_token_of_a_text_show_no_number_of_examples() -> None:
    torch.manual_seed(0)
    honest = train(Attending(), tokens=True)
    change = honest.update["attention.out_proj.weight"]
    assert torch.linalg.matrix_rank(change, rtol=0.01) > 4, "the client's four examples have more than four tokens"
    found = check_training([honest])
    assert isinstance(found, PassedCheck), found


def test_noise_that_is_not_stated_is_named_as_a_cause_of_full_rank() -> None:
    torch.manual_seed(0)
    seen = train(build_perceptron())
    noisy = {name: w + 0.01 * torch.randn(w.shape) for name, w in seen.payload.tensors.items()}
    found = check_training([replace(seen, payload=Payload(tensors=noisy, codec="weights"))])
    assert isinstance(found, Finding)
    assert "whether clients add noise, decay weights or keep momentum" in found.evidence


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("make", [build_perceptron, TwiceUsed, lambda: build_perceptron().bfloat16().float()])
def test_steps_and_examples_as_stated_are_no_finding(make: Callable[[], nn.Module], decay: float) -> None:
    torch.manual_seed(0)
    for net in (make() for _ in range(5)):
        assert isinstance(check_training([train(net, decay=decay)]), PassedCheck)


def test_rank_of_weights_rounded_to_half_precision_is_not_judged() -> None:
    torch.manual_seed(0)
    seen = train(build_perceptron(), sent_in=torch.bfloat16)
    assert torch.linalg.matrix_rank(seen.update["0.weight"], rtol=0.01) > 4
    assert isinstance(check_training([seen]), PassedCheck)


def test_rounding_to_bfloat16_is_not_taken_for_more_examples() -> None:
    """Automatic mixed precision that is not stated rounds gradients, whose rank is then full."""
    torch.manual_seed(0)
    net = build_perceptron()
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    seen = train(net)
    rounded = {name: w + (seen.update[name].bfloat16()).float() for name, w in start.items()}
    observation = replace(seen, payload=Payload(tensors=rounded, codec="weights"))
    assert torch.linalg.matrix_rank(observation.update["0.weight"]) > 4
    assert isinstance(check_training([observation]), PassedCheck)


@pytest.mark.parametrize(
    ("shape", "named"),
    [((32, 32, 3), True), ((28, 28, 1), True), ((3, 32, 32), False), ((1, 28, 28), False), ((3, 4, 4), False), ((3072,), False)],
)
def test_a_shape_with_channels_last_is_a_finding_with_the_remedy(shape: tuple[int, ...], named: bool) -> None:
    found = list(check_shape(DataSpec(shape=shape, num_classes=3)))
    assert len(found) == named
    if named:
        assert f"state ({shape[2]}, {shape[0]}, {shape[1]}) and name a network" in found[0].evidence


class SpareHead(nn.Module):
    """A network with a layer that it never calls, beside two that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head, self.spare = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x)))


@pytest.mark.parametrize(("kept", "named"), [(("spare.weight",), False), (("spare.weight", "hidden.weight"), True)])
def test_only_layers_that_the_network_uses_must_change(kept: tuple[str, ...], named: bool) -> None:
    before = {name: p.detach().clone() for name, p in SpareHead().named_parameters()}
    after = {name: w if name in kept else w + 1e-4 * torch.arange(float(w.shape[-1])) ** 2 for name, w in before.items()}
    found = check_training([replace(observe(after, before), model=ModuleSpec.of(SpareHead()))])
    assert isinstance(found, Finding) is named
    if isinstance(found, Finding):
        assert "hidden.weight did not change" in found.evidence
        assert "spare" not in found.evidence


class ScaledLogits(nn.Module):
    """A network that multiplies the outputs of its last layer, whose bias then changes by more than errors of at most 1 allow."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(6, 3), scale

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.scale * self.head(x)
        return logits


@pytest.mark.parametrize(("scale", "named"), [(1.0, True), (20.0, False)])
def test_the_bias_of_a_head_whose_outputs_are_scaled_is_not_judged(scale: float, named: bool) -> None:
    network = ScaledLogits(scale)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    after = {name: w + 1.5 for name, w in before.items()}  # fifteen times the stated rate
    found = check_training([replace(observe(after, before), model=ModuleSpec.of(network))])
    assert isinstance(found, Finding) is named


@pytest.mark.parametrize(("loss", "outputs", "named"), [("logistic", 1, True), ("cross_entropy", 3, False)])
def test_a_regression_stated_as_logistic_is_named_as_a_cause(loss: Any, outputs: int, named: bool) -> None:
    network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, outputs))
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    after = {name: w + 1.5 for name, w in before.items()}
    seen = observe(after, before, replace(TRAINING, loss=loss))
    data = DataSpec(shape=(6,), num_classes=max(2, outputs))
    found = check_training([replace(seen, data=data, model=ModuleSpec.of(network))])
    assert isinstance(found, Finding)
    assert "changed by" in found.evidence
    assert ("the squared error of a regression" in found.evidence) is named
