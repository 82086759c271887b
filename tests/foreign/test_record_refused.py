"""Tests of arguments, networks, strategies and folders that `record` refuses before anything is sent or written."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedsim.engine.engines import EngineError
from fedsim.recording import DataSpec, Training

TRAINING = Training(learning_rate=0.05, batch_size=1, steps=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"net": "NormedNet"},
            "the server sends no 'bn1.bias', and the model task:NormedNet has 'bn1.bias' of shape (6,); give record()",
        ),
        ({"model": "lenet_cpl"}, "give record() the network that is trained"),
    ],
)
def test_another_network_is_refused_before_anything_is_sent_or_written(app: Any, given: Any, words: str) -> None:
    from fedsim.server import record

    trained: list[int] = []

    def watch(message: Message, context: Any, call_next: Any) -> Message:
        trained.append(1)
        answer: Message = call_next(message, context)
        return answer

    if "model" in given:
        strategy = record(
            FedAvg(), app.folder, model="lenet_cpl", training=TRAINING, data=DataSpec(shape=(3, 32, 32), num_classes=10)
        )
    else:
        strategy = app.record(FedAvg(), **given)
    with pytest.raises(EngineError) as error:
        app.run(strategy, mods=[watch])
    assert words in str(error.value)
    assert not trained
    assert not app.folder.exists()
    app.run(app.record(), rounds=1)  # the correct network can be recorded in the same folder


def test_a_strategy_that_sends_each_client_other_weights_is_refused(app: Any) -> None:
    """Otherwise updates would be computed from weights that a client never had."""

    class Personal(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            other = ArrayRecord({name: Array(array.numpy() * 0.5) for name, array in arrays.items()})
            messages[1].content = RecordDict({"arrays": other, "config": config})
            return messages

    with pytest.raises(EngineError, match="is sent arrays other than the global weights"):
        app.run(app.record(Personal(fraction_evaluate=0.0)))


def test_a_strategy_that_is_started_again_is_refused(app: Any) -> None:
    strategy = app.record()
    app.run(strategy)
    with pytest.raises(EngineError, match="round 1 is recorded already; record"):
        app.run(strategy)
    assert len(app.recording.read_rows()) == 6


def test_a_second_recording_in_one_folder_is_refused(app: Any) -> None:
    app.run(app.record(), rounds=1)
    before = {path: path.read_bytes() for path in app.folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="holds a recording already; choose another folder, or remove it with"):
        app.record()
    assert {path: path.read_bytes() for path in app.folder.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("app")
def test_a_relative_folder_is_explained_at_the_start_and_if_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fedsim.server import record

    facts: Any = {"model": "task:Net", "training": TRAINING, "data": DataSpec(shape=(3, 32, 32), num_classes=10)}
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, logger="flwr"):
        record(FedAvg(), "mine", **facts)
        record(FedAvg(), tmp_path / "absolute", **facts)
    logged = [record.getMessage() for record in caplog.records if "will record" in record.getMessage()]
    assert logged[0].startswith(f"fedleak: will record in {tmp_path / 'mine'} ('mine' is relative and starts in the folder of")
    assert logged[1] == f"fedleak: will record in {tmp_path / 'absolute'}"
    (tmp_path / "mine" / "recording").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"'mine' is relative and .*SuperLink was started.* holds a recording already"):
        record(FedAvg(), "mine", **facts)


def test_an_object_that_is_no_strategy_is_refused_with_advice(app: Any) -> None:
    with pytest.raises(TypeError, match=r"builtins\.dict is not a Flower strategy: record\(\) needs one of flwr"):
        app.record({"fraction_fit": 1.0})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "task:Nett"}, "cannot import task:Nett"),
        ({"model": "nosuch"}, "nosuch"),
        ({"model": torch.nn.Linear}, r"must be a name as text, such as 'task:Net' .* got <class 'torch\.nn\.\S+Linear'>"),
        ({"model": torch.nn.Linear(1, 1)}, r"must be a name as text, .* got <class 'torch\.nn\.\S+Linear'>"),
        ({"model": "task:load_images"}, "must return a torch.nn.Module"),
        ({"data": DataSpec(shape=(3, 32, 32), num_classes=7)}, "7 classes"),
        ({"data": DataSpec(shape=(1, 32, 32), num_classes=10)}, "does not fit inputs of shape"),
        ({"defense": "clipp(1)"}, "clip"),
        ({"training": replace(TRAINING, loss="logistic")}, "takes a single logit, and this model has 10"),
        ({"data": DataSpec(shape=(3, 32, 32), num_classes=2), "model": "task:OneLogit"}, "set training.loss to 'logistic'"),
        ({"rounds": "none"}, "cannot read rounds"),
    ],
)
def test_wrong_arguments_of_record_are_refused_at_once(app: Any, options: Any, words: str) -> None:
    from fedsim.server import record

    app.task.OneLogit = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 1))
    facts = {"model": "task:Net", "training": TRAINING, "data": DataSpec(shape=(3, 32, 32), num_classes=10), **options}
    with pytest.raises(ValueError, match=words):
        record(FedAvg(), app.folder, **facts)
    assert not app.folder.exists()


def test_the_mode_of_a_network_with_batch_norm_must_be_stated(app: Any) -> None:
    """Most apps call `net.train()`. Without batch norm and dropout, the mode makes no difference and can be omitted."""
    with pytest.raises(ValueError, match=r"set training\.mode to 'train' if they call net\.train\(\), as most apps do"):
        app.record(net="NormedNet", training=TRAINING)
    assert not app.folder.exists()
    app.run(app.record(training=TRAINING), rounds=1)
    assert app.recording.manifest.training.mode == "eval"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"training": replace(TRAINING, frozen=("conv1.*", "body.*"))}, "no parameter of the network is named body.*; its names"),
        (
            {"data": DataSpec(shape=(3, 32, 32), num_classes=10, mean=(127.5,), std=(127.5,))},
            "whose mean cannot be (127.5,); if it is that of pixels from 0 to 255, divide mean and std by 255",
        ),
    ],
)
def test_settings_that_are_probably_wrong_are_named_in_the_log(
    app: Any, caplog: pytest.LogCaptureFixture, options: Any, words: str
) -> None:
    from fedsim.server import record

    good = {"training": replace(TRAINING, frozen=("conv1.*",)), "data": DataSpec(shape=(3, 32, 32), num_classes=10, mean=(1.0,))}
    with caplog.at_level(logging.INFO, logger="flwr"):
        record(FedAvg(), app.folder, model="task:Net", **good)
        assert words not in caplog.text
        record(FedAvg(), app.folder, model="task:Net", **{**good, **options})
    assert words in caplog.text
