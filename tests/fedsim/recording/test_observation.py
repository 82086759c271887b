"""Tests of what a server knows: the fields are fixed, invalid settings are refused, and rounding errors are bounded."""

from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
import torch
from awkward_tensors import are_identical
from hypothesis import given, settings
from hypothesis import strategies as st

from defenses import DefenseSpec
from fedsim.recording import Column, DataSpec, Manifest, ModelSpec, Observation, Payload, Reply, Row, Training
from fedsim.recording.codec import encode

PUBLIC = {
    Observation: {
        *("round", "client", "cohort", "num_examples", "model", "data", "training", "defenses", "gradient", "inputs"),
        *("weights", "payload", "buffers", "buffers_after", "metrics"),
    },
    DataSpec: {"shape", "num_classes", "mean", "std", "columns", "ranges_from"},
    Column: {"name", "kind", "low", "high", "category"},
    ModelSpec: {"name", "arguments", "network"},
    Payload: {"tensors", "codec"},
    Training: {
        *("learning_rate", "batch_size", "steps", "epochs", "momentum", "weight_decay"),
        *("shuffle", "drop_last", "loss", "mode", "buffers"),
        *("optimiser", "nesterov", "betas", "eps", "schedule", "round_decay", "accumulation", "clip_norm"),
        *("frozen", "precision", "augmentation", "examples"),
    },
    Manifest: {
        *("name", "model", "data", "training", "defense", "gradient", "inputs"),
        *("secure_aggregation", "codec", "created", "software"),
    },
    Reply: {"client", "node", "status", "reason", "payload", "buffers", "num_examples", "bytes", "metrics"},
    Row: {
        *("round", "client", "node", "attempt", "status", "reason", "num_examples"),
        *("file", "sha256", "codec", "bytes", "metrics", "received_at", "reported"),
    },
}


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_the_fields_that_a_server_knows_are_fixed(kind: type) -> None:
    """A new field must be added here, after checking that it reveals nothing that only clients know."""
    assert {field.name for field in fields(kind)} == PUBLIC[kind]


def make_observation(**changes: Any) -> Observation:
    return Observation(
        **{
            "round": 7,
            "client": "anna",
            "cohort": ("anna",),
            "num_examples": 3,
            "model": ModelSpec(name="mlp"),
            "data": DataSpec(shape=(2,), num_classes=2),
            "training": Training(learning_rate=1, batch_size=1, steps=1),
            "defenses": DefenseSpec(),
            "weights": {"w": torch.ones(2)},
            "payload": encode({"w": torch.tensor([1.0, -2.0])}),
            **changes,
        }
    )


def test_an_observation_has_no_other_fields_and_is_frozen() -> None:
    with pytest.raises(TypeError, match="labels"):
        make_observation(labels=torch.zeros(1))
    made = make_observation()
    for name, value in (("labels", 1), ("round", 8), ("truth", 1)):
        with pytest.raises(FrozenInstanceError):
            setattr(made, name, value)


def test_the_update_is_decoded_from_the_payload() -> None:
    made = make_observation()
    assert made.update["w"].tolist() == [1, -2]
    assert made.sent == {}
    assert made.key == "00007-anna"
    with pytest.raises(ValueError, match=r"unknown codec 'zip'\. Known: bits, dense"):
        _ = make_observation(payload=Payload(tensors={}, codec="zip")).update


def test_the_rounding_error_of_returned_weights_is_bounded() -> None:
    """From 1 to 2, float32 numbers are 2^-23 apart, so that a weight is rounded by at most half of that."""
    sent_back = {"w": torch.tensor([1.0, -1.5, 3.0]), "n": torch.tensor([1])}
    start = {name: torch.zeros_like(t) for name, t in sent_back.items()}
    made = make_observation(weights=start, payload=Payload(tensors=sent_back, codec="weights"))
    assert {name: t.tolist() for name, t in made.rounding.items()} == {"w": [2**-24, 2**-24, 2**-23]}
    assert make_observation().rounding == {}


@pytest.mark.parametrize(
    ("training", "examples", "steps"), [({"steps": 3}, 12, 3), ({"epochs": 2}, 10, 6), ({"epochs": 1}, 2**52, 2**50)]
)
def test_rounding_counts_every_step_and_the_larger_weight(training: dict[str, int], examples: int, steps: int) -> None:
    made = make_observation(
        weights={"w": torch.tensor([-3.0, 1.0])},
        payload=Payload(tensors={"w": torch.tensor([0.001, 1.5])}, codec="weights"),
        training=Training(learning_rate=0.1, batch_size=4, **training),
        num_examples=examples,
    )
    assert made.rounding["w"].tolist() == [steps * 2**-23, steps * 2**-24]


# --- DataSpec ---


@settings(deadline=None, max_examples=30)
@given(
    mean=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    std=st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
    batch=st.sampled_from([(), (1,), (4,), (2, 3)]),
)
def test_denormalise_is_the_inverse_of_normalise(mean: list[float], std: list[float], batch: tuple[int, ...]) -> None:
    spec = DataSpec(shape=(3, 2, 5), num_classes=2, mean=tuple(mean), std=tuple(std))
    x = torch.rand(*batch, 3, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(spec.denormalise(spec.normalise(x)), x, rtol=1e-12, atol=1e-12)
    assert spec.normalise(x).dtype == torch.float64


def test_normalise_uses_the_mean_and_deviation_of_each_channel_or_column() -> None:
    spec = DataSpec(shape=(2, 1, 1), num_classes=2, mean=(1.0, 2.0), std=(2.0, 4.0))
    assert spec.normalise(torch.tensor([5.0, 6.0]).reshape(1, 2, 1, 1)).flatten().tolist() == [2, 1]
    rows = DataSpec(shape=(3,), num_classes=2, mean=(1.0,), std=(2.0,))
    assert rows.normalise(torch.tensor([[1.0, 3.0, 5.0]])).tolist() == [[0, 1, 2]]
    columns = DataSpec(shape=(3,), num_classes=2, mean=(1.0, 2.0, 0.0), std=(2.0, 4.0, 1.0))
    assert columns.normalise(torch.tensor([[[5.0, 6.0, 7.0]], [[1.0, 2.0, 0.0]]])).tolist() == [[[2, 1, 7]], [[0, 0, 0]]]
    assert columns.denormalise(torch.tensor([[2.0, 1.0, 7.0]])).tolist() == [[5, 6, 7]]
    plain = DataSpec(shape=(3,), num_classes=2)
    assert torch.equal(plain.normalise(torch.tensor([0.1, 0.2, 0.3])), torch.tensor([0.1, 0.2, 0.3]))


def test_images_and_rows_are_distinguished() -> None:
    assert DataSpec(shape=(3, 4, 5), num_classes=2).is_image
    assert DataSpec(shape=(3, 4, 5), num_classes=2).size == 60
    assert not DataSpec(shape=(7,), num_classes=2).is_image
    assert DataSpec(shape=(7,), num_classes=2).size == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": (4, 4)}, r"data shape must be .*got \(4, 4\)"),
        ({"shape": (3, 0, 4)}, r"positive, got \(3, 0, 4\)"),
        ({"num_classes": 1}, "num_classes must be at least 2, also for a single output, got 1"),
        ({"mean": (0.0, 0.0), "std": (1.0, 1.0)}, "mean and std"),
        ({"shape": (3,), "mean": (0.0, 0.0), "std": (1.0, 1.0)}, "have 1 or 3 entries, one for each column of .*; got 2 and 2"),
        ({"shape": (8, 8, 3), "mean": (0.5,) * 3, "std": (0.5,) * 3}, r"1 or 8 entries, .* channel .*as \(C, H, W\); got 3"),
        ({"shape": "3"}, "data.shape must be a whole number, got '3'"),
        ({"mean": (None,)}, "data.mean must be a number, got None"),
        ({"std": (0.0,)}, "std must be positive"),
        ({"shape": (3,), "columns": (Column(name="age"),)}, "1 columns for 3 features"),
    ],
)
def test_invalid_data_specifications_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataSpec(**{"shape": (3, 4, 4), "num_classes": 2, **changes})


def test_values_of_numpy_and_pytorch_lists_and_single_values_become_plain() -> None:
    """Only plain values can be written to the manifest, and read from it."""
    stated = Training(
        learning_rate=np.float32(0.5),
        batch_size=np.int64(4),
        epochs=torch.tensor(2),
        schedule=np.array([1.0, 0.25]),
        frozen="head.*",
        shuffle=np.bool_(False),
    )
    plain = Training(learning_rate=0.5, batch_size=4, epochs=2, schedule=(1.0, 0.25), frozen=("head.*",), shuffle=False)
    assert repr(stated) == repr(plain)
    shape: Any = torch.zeros(3, 4, 5).shape
    data = DataSpec(shape=shape, num_classes=np.int64(2), mean=0.5, std=torch.tensor([2.0]))
    assert repr(data) == repr(DataSpec(shape=(3, 4, 5), num_classes=2, mean=(0.5,), std=(2.0,)))
    assert repr(Column(name="age", high=np.float64(90))) == repr(Column(name="age", high=90.0))


# --- Training ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 0}, "learning_rate must be positive, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive, got nan"),
        ({"batch_size": 0}, "batch_size must be positive, got 0"),
        ({"steps": None}, "either steps or epochs"),
        ({"epochs": 1}, "either steps or epochs"),
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"momentum": 1.0}, "momentum must be in .*, got 1.0"),
        ({"weight_decay": -1}, "weight_decay must not be negative, got -1"),
        ({"loss": "hinge"}, "'hinge'.*cross_entropy"),
        ({"mode": "test"}, "'test'"),
        ({"buffers": "global"}, "'global'"),
        ({"learning_rate": "0.1"}, r"training\.learning_rate must be a number, got '0\.1'"),
        ({"batch_size": 4.0}, "batch_size must be a whole number, got 4.0"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"shuffle": 1}, "shuffle must be True or False, got 1"),
        ({"schedule": "cosine"}, "schedule must be a number, got 'cosine'"),
        ({"loss": None}, "loss must be a text, got None"),
    ],
)
def test_invalid_training_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Training(**{"learning_rate": 0.1, "batch_size": 2, "steps": 1, **changes})


@pytest.mark.parametrize(
    ("settings_", "num_examples", "sizes"),
    [
        ({"steps": 1}, 4, (4,)),
        ({"steps": 1}, 3, (3,)),  # a client with only three examples
        ({"steps": 3}, 12, (4, 4, 4)),
        ({"steps": 3}, 11, None),  # one of the three batches was smaller, and the server cannot know which
        ({"epochs": 1}, 8, (4, 4)),
        ({"epochs": 1}, 10, (4, 4, 2)),
        ({"epochs": 2}, 10, (4, 4, 2, 4, 4, 2)),
        ({"epochs": 2}, 3, (3, 3)),
        ({"epochs": 2, "drop_last": True}, 8, (4, 4, 4, 4)),
    ],
)
def test_batch_sizes_are_known_only_if_they_follow_from_the_number_of_examples(
    settings_: dict[str, Any], num_examples: int, sizes: tuple[int, ...]
) -> None:
    assert Training(learning_rate=1, batch_size=4, **settings_).count_step_examples(num_examples) == sizes


def test_number_of_examples_that_would_be_too_many_steps_is_refused() -> None:
    epoch = Training(learning_rate=1, batch_size=4, epochs=1)
    assert len(epoch.count_step_examples(2**20) or ()) == 2**18
    with pytest.raises(ValueError, match=r"4,503,599,627,370,496 examples, .* more than 10,000,000 local steps of 4"):
        epoch.count_step_examples(2**52)


def test_the_fixtures_compare_bits_and_describe_images(manifest: Manifest) -> None:
    assert not are_identical({"w": torch.tensor(0.0)}, {"w": torch.tensor(-0.0)})
    assert not are_identical({"w": torch.tensor(0.0)}, {"w": torch.tensor([0.0])})
    assert manifest.data.is_image
