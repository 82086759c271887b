"""Tests of objectives, priors, starts and simulated gradients, with values by hand and by autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacker.attacks.matching.initialisation import STARTS, get_start
from attacker.attacks.matching.objectives import cosine_distance, squared_distance
from attacker.attacks.matching.priors import colour_variation, total_variation
from attacker.attacks.simulation.client import compute_total_step, convert_to_gradient, simulate_channel
from attacker.attacks.simulation.gradients import build_gradient
from defenses import DefenseSpec, clip
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training
from fedsim.training.local import train

A = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
B = {"b": torch.tensor(0.0), "w": torch.tensor([0.0, 2.0])}
DATA = DataSpec(shape=(1, 8, 8), num_classes=3, mean=(0.4,), std=(0.3,))
MODEL = ModelSpec(name="lenet_dlg")


def test_squared_distance_by_hand_and_by_name() -> None:
    assert squared_distance(A, B).item() == 9 + 4 + 16
    assert squared_distance(A, A).item() == 0


def test_cosine_distance_by_hand() -> None:
    twice = {name: 2 * t for name, t in A.items()}
    opposite = {name: -t for name, t in A.items()}
    assert cosine_distance(A, B).item() == 1
    assert cosine_distance(A, twice).item() == pytest.approx(0, abs=1e-6)
    assert cosine_distance(A, opposite).item() == pytest.approx(2)


def test_cosine_is_global_not_a_mean_over_tensors() -> None:
    a = {"big": torch.tensor([100.0]), "small": torch.tensor([1.0])}
    b = {"big": torch.tensor([100.0]), "small": torch.tensor([-1.0])}
    assert cosine_distance(a, b).item() == pytest.approx(2 / 10001, rel=1e-2)


def test_total_variation_is_the_mean_of_absolute_differences() -> None:
    x = torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]])
    assert total_variation(x).item() == pytest.approx((0 + 2) / 2 + (1 + 3) / 2)
    assert total_variation(torch.full((2, 3, 5, 5), 0.7)).item() == 0


@pytest.mark.parametrize(
    ("colour", "expected"),
    [((1, 1, 1), 3.0), ((1, 0, -1), 2.5 * 6**0.5), ((1, -2, 1), 4 * 18**0.5), ((0, 1, 0), 1.0 + 4 * 2**0.5)],
)
def test_colour_variation_counts_differences_of_colour_more(colour: tuple[int, ...], expected: float) -> None:
    """Two pixels differ by `colour`; the expected value times 1/3 is computed by hand from lengths along the three axes."""
    x = torch.tensor([[0.0, 0.0, 0.0], colour]).T.reshape(1, 3, 1, 2)
    assert colour_variation(x).item() == pytest.approx(expected / 3)
    assert colour_variation(x.mT).item() == pytest.approx(expected / 3)


def test_colour_variation_of_grey_images_is_total_variation() -> None:
    x = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(0))
    for images in (x, x.expand(-1, 2, -1, -1), x.expand(-1, 3, -1, -1), torch.rand_like(x.expand(-1, 4, -1, -1))):
        assert colour_variation(images).item() == pytest.approx(total_variation(images).item())


@pytest.mark.parametrize("name", sorted(STARTS))
@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 9, 7)])
def test_starts_have_the_shape_of_the_batch_and_depend_on_the_seed(name: str, shape: tuple[int, ...]) -> None:
    data, labels = DataSpec(shape=shape, num_classes=3), torch.tensor([0, 2])
    first, again, other = (get_start(name)(data, labels, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert first.shape == (2, *shape)
    assert torch.equal(first, again)
    drawn = name in ("random", "uniform", "coarse4", "patterned", "patterned4", "smooth")
    assert torch.equal(first, other) != drawn


def test_patterned_start_repeats_its_block_and_is_not_constant() -> None:
    x = get_start("patterned4")(DataSpec(shape=(3, 32, 32), num_classes=2), torch.tensor([0]), torch.Generator().manual_seed(0))
    assert torch.equal(x[..., :8, :8], x[..., 24:, 8:16])
    assert x[..., :8, :8].std() > 0.2


def test_starts_of_one_colour() -> None:
    data, labels, rng = DataSpec(shape=(3, 4, 4), num_classes=2), torch.tensor([0]), torch.Generator()
    assert get_start("red")(data, labels, rng)[0, :, 0, 0].tolist() == [1, 0, 0]
    assert get_start("blue")(data, labels, rng)[0, :, 3, 3].tolist() == [0, 0, 1]
    assert get_start("dark")(data, labels, rng).max() == 0
    assert get_start("light")(data, labels, rng).min() == 1
    with pytest.raises(ValueError, match="images with 3 channels"):
        get_start("red")(DataSpec(shape=(1, 4, 4), num_classes=2), labels, rng)


def test_insider_start_is_an_image_of_the_same_class(tmp_path) -> None:
    import numpy as np

    images = np.stack([np.full((4, 4, 3), value, np.uint8) for value in (0, 51, 255)])
    np.savez(tmp_path / "own.npz", images=images, labels=np.array([0, 1, 1]))
    data, rng = DataSpec(shape=(3, 4, 4), num_classes=2), torch.Generator().manual_seed(0)
    x = get_start("insider", str(tmp_path / "own.npz"))(data, torch.tensor([0, 1]), rng)
    assert x[0].max() == 0
    assert float(x[1].mean()) in (pytest.approx(0.2), 1.0)
    with pytest.raises(ValueError, match="auxiliary"):
        get_start("insider")


def test_file_of_an_insider_start_is_checked_and_a_pipe_refused(tmp_path) -> None:
    import os

    import numpy as np

    data, rng = DataSpec(shape=(3, 4, 4), num_classes=2), torch.Generator().manual_seed(0)
    os.mkfifo(tmp_path / "pipe.npz")
    np.savez(tmp_path / "wide.npz", images=np.zeros((3, 4, 4, 3)), labels=np.zeros(3, int))
    np.savez(tmp_path / "short.npz", images=np.zeros((3, 4, 4, 3), np.uint8), labels=np.zeros(2, int))
    for name, words in (("pipe", "is not a regular file"), ("wide", "got float64"), ("short", "labels of shape")):
        with pytest.raises(ValueError, match=words):
            get_start("insider", str(tmp_path / f"{name}.npz"))(data, torch.tensor([0]), rng)


def test_simulated_gradient_agrees_with_autograd_on_normalised_inputs() -> None:
    network = models.build(MODEL, DATA, seed=1)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    x, y = torch.rand(2, 1, 8, 8), torch.tensor([0, 2])
    simulated = build_gradient(network, DATA)(weights, x, y)
    loss = torch.nn.functional.cross_entropy(network((x - 0.4) / 0.3), y)
    expected = torch.autograd.grad(loss, list(network.parameters()))
    for name, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(simulated[name], gradient)


@settings(max_examples=20, deadline=None)
@given(momentum=st.floats(0, 0.95), decay=st.floats(0, 0.1), rate=st.floats(1e-3, 1.0))
def test_gradient_is_computed_exactly_from_the_update_of_one_step(momentum: float, decay: float, rate: float) -> None:
    network = models.build(MODEL, DATA, seed=1).double()
    weights = {name: p.detach() for name, p in network.named_parameters()}
    training = Training(learning_rate=rate, batch_size=1, steps=1, momentum=momentum, weight_decay=decay)
    x, y = torch.rand(1, 1, 8, 8, dtype=torch.float64), torch.tensor([1])
    update = train(network, weights, [(x, y)], training, DATA).update
    expected = build_gradient(network, DATA)(weights, x, y)
    for name, gradient in convert_to_gradient(update, weights, training, 1).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-10)


def test_total_step_of_momentum_by_hand() -> None:
    training = Training(learning_rate=0.5, batch_size=1, steps=3, momentum=0.1)
    assert compute_total_step(training, 3) == pytest.approx(0.5 * (1 + 1.1 + 1.11))


def test_simulated_clipping_agrees_with_the_clipped_update() -> None:
    rng = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(5, generator=rng), "b": torch.randn(2, generator=rng)}
    gradient = {name: torch.randn(w.shape, generator=rng) for name, w in weights.items()}
    training = Training(learning_rate=0.2, batch_size=1, steps=1, weight_decay=0.01)
    update = {name: -0.2 * (g + 0.01 * weights[name]) for name, g in gradient.items()}
    sent, _ = clip(0.05).apply(update, {}, rng)
    expected = convert_to_gradient(sent, weights, training, 1)
    seen = simulate_channel(DefenseSpec.parse("clip(0.05)").build_channel(), {}, gradient, weights, training, 1)
    for name in weights:
        torch.testing.assert_close(seen[name], expected[name])
