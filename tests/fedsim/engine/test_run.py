"""Tests of the checks of a run before any work, and of whether a run is done, unfinished or another one."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experiments import Federate, make_tiny

from fedsim.engine import engines as engine
from fedsim.engine.engines import EngineError
from fedsim.engine.run import FederationRun, UnfinishedRun
from fedsim.recording import Recording


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., FederationRun]:
    def make(device: str = "cpu", **changes: Any) -> FederationRun:
        return FederationRun(experiment=make_tiny(**changes), out=tmp_path / "run", device=device)

    return make


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "lenet"}, r"unknown name 'lenet' in the registry fedsim\.models.*lenet_cpl"),
        ({"model": {"name": "mlp", "hiden": [3]}}, "'hiden'"),
        ({"model": {"name": "mlp", "hidden": 3}}, "whole numbers above 0, got 3"),
        ({"model": "lenet_cpl", "data": "breast_cancer"}, r"rows of shape \(30,\).*'mlp'"),
        ({"data": "fotos"}, "Did you mean 'photos'"),
        ({"data": {"name": "photos", "size": 33}}, "got 33"),
        ({"data": {"name": "photos", "scale": "x"}}, "setting data = 'photos' of the experiment has the wrong type"),
        ({"data": "npz:/nowhere.npz"}, "/nowhere.npz does not exist"),
        ({"partition": "dirichlet"}, "'alpha'"),
        ({"partition": {"name": "dirichlet", "alpha": "x"}}, "setting partition = 'dirichlet' .* wrong type"),
        ({"strategy": "FedSGD"}, "unknown name 'FedSGD'"),
        ({"strategy": {"name": "FedAdam", "lr": 1}}, "'lr'"),
        ({"clients": {"count": 2000}}, "clients.count is 2000, but there are only 1438"),
        (
            {"training": {"learning_rate": 1, "batch_size": 500, "steps": 1, "drop_last": True}},
            "a client holds 479 examples, which do not fill one batch of 500",
        ),
        ({"device": "cuda:0"}, "device 'cuda:0' is not available on this machine; use cpu"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, device cuda:0 is to be had")
def test_a_run_that_would_fail_is_refused_before_any_work(
    planned: Callable[..., FederationRun], changes: dict[str, Any], words: str
) -> None:
    run = planned(**changes)
    for attempt in (run.check, lambda: engine.run(run, engine="local")):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            attempt()
    assert not run.out.exists()


def test_clients_without_a_full_batch_are_allowed_if_it_is_not_dropped(planned: Callable[..., FederationRun]) -> None:
    planned(training={"learning_rate": 1, "batch_size": 479, "steps": 1, "drop_last": True}).check()
    planned(training={"learning_rate": 1, "batch_size": 500, "steps": 1}).check()


def test_auto_takes_a_gpu_where_there_is_one(planned: Callable[..., FederationRun], monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(device="auto")
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert run.resolve_device() == device


@pytest.mark.parametrize(("threads", "used"), [(2, 2), (1, 1), (None, 3)])
def test_clients_use_the_given_threads_and_restore_the_number(
    planned: Callable[..., FederationRun], monkeypatch: pytest.MonkeyPatch, threads: int | None, used: int
) -> None:
    from fedsim.client import app as client_side

    real, seen = client_side.train, set()

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.add(torch.get_num_threads())
        return real(*arguments, **named)

    monkeypatch.setattr(client_side, "train", watched)
    torch.set_num_threads(3)
    engine.run(replace(planned(), threads=threads), engine="local")
    assert seen == {used}
    assert torch.get_num_threads() == 3


def test_the_size_on_disk_is_estimated(federate: Federate, planned: Callable[..., FederationRun]) -> None:
    changes = {"rounds": 6, "model": {"name": "mlp", "hidden": [300]}, "clients": {"count": 4, "fraction": 0.5}}
    estimated = planned(**changes).count_megabytes()
    fewer = planned(**changes, record={"rounds": "2", "clients": 1}).count_megabytes()
    run = federate("run", **changes)
    written = sum(path.stat().st_size for path in run.out.rglob("*") if path.is_file()) / 1e6
    assert written < estimated < 1.3 * written
    assert run.count_megabytes() < 0.2 * estimated  # only checkpoints are still to be written
    assert estimated / 6 < fewer < estimated / 3


def test_the_size_of_ten_million_rounds_is_estimated(planned: Callable[..., FederationRun]) -> None:
    one = planned(rounds=10_000_000, record={"rounds": "10000000-99999999999", "clients": "all"})
    all_of_them = planned(rounds=10_000_000)
    kept = 2 * all_of_them._count_checkpoint_bytes() / 1e6
    assert all_of_them.count_megabytes() - kept == pytest.approx(10_000_000 * (one.count_megabytes() - kept))
    with pytest.raises(ValueError, match="rounds"):
        planned(rounds=10_000_000_000)


def test_a_run_is_done_if_the_same_experiment_was_completed(federate: Federate, planned: Callable[..., FederationRun]) -> None:
    assert not planned().is_done()
    planned().out.mkdir()
    assert not planned().is_done()
    assert federate().is_done()
    assert planned().is_done()
    with pytest.raises(ValueError, match="holds another run, or other files; choose another --out"):
        planned(seed=99).is_done()
    with pytest.raises(ValueError, match="holds another run, or other files"):
        planned(rounds=3).is_done()


def test_an_interrupted_run_is_neither_done_nor_overwritten(planned: Callable[..., FederationRun]) -> None:
    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise RuntimeError("power cut")

    with pytest.raises(EngineError, match="power cut"):
        engine.run(planned(), engine="local", on_round=stop)
    with pytest.raises(UnfinishedRun, match="unfinished run, 1 of 2 rounds; continue it with --resume, or delete it first"):
        planned().is_done()
    before = {p: p.read_bytes() for p in planned().out.rglob("*") if p.is_file()}
    with pytest.raises(EngineError, match="unfinished run"):
        engine.run(planned(), engine="local")
    assert {p: p.read_bytes() for p in planned().out.rglob("*") if p.is_file()} == before
    assert not replace(planned(), resume=True).is_done()
    (planned().out / "state" / "server.safetensors").unlink()
    with pytest.raises(EngineError, match=r"server\.safetensors is missing, and .* holds 1 round: these can be attacked, but"):
        engine.run(replace(planned(), resume=True), engine="local")
    assert len(list(Recording(planned().out / "recording").read_observations())) == 3


def test_a_folder_with_other_files_is_left_alone(planned: Callable[..., FederationRun]) -> None:
    run = planned()
    run.out.mkdir()
    (run.out / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds another run, or other files"):
        run.is_done()
    shutil.rmtree(run.out)
    assert not run.is_done()


def test_the_resolved_experiment_lies_beside_the_recording(federate: Federate) -> None:
    from fedsim.config.experiment import read

    run = federate()
    assert read(run.out / "experiment.toml") == run.experiment


def test_truth_names_the_data_that_it_refers_to(federate: Federate) -> None:
    from fedsim.truth import TruthReader

    run = federate()
    assert TruthReader(run.out / "truth").dataset == {
        "name": "digits",
        "arguments": {},
        "content_hash": run.load_data().compute_hash(),
        "size": len(run.load_data().train),
    }


@pytest.mark.parametrize("model", ["resnet20_4", {"name": "torchvision", "architecture": "mobilenet_v3_small"}])
def test_a_network_that_trains_differently_needs_a_stated_mode(planned: Callable[..., FederationRun], model: Any) -> None:
    """Most real apps train with batch norm in training mode, so that neither mode can be assumed."""
    photos = {"model": model, "data": {"name": "photos", "size": 32}, "clients": {"count": 2}}
    training = {"learning_rate": 1, "batch_size": 2, "steps": 1}
    with pytest.raises(ValueError, match=r"set training\.mode to 'train'"):
        planned(**photos, training=training).check()
    for mode in ("train", "eval"):
        run = planned(**photos, training={**training, "mode": mode})
        run.check()
        assert run.make_manifest(run.load_data().spec).training.mode == mode


def test_networks_that_train_alike_in_both_modes_need_no_stated_mode(planned: Callable[..., FederationRun]) -> None:
    run = planned(network="dropout(p=0.5)")
    run.check()
    assert run.make_manifest(run.load_data().spec).training.mode == "eval"


def test_an_old_run_without_a_stated_mode_is_the_same_experiment(planned: Callable[..., FederationRun]) -> None:
    """The stored file has the mode "eval", which was then the default; the experiment omits the mode."""
    run = planned()
    run.prepare()
    (run.out / "experiment.toml").write_text(run.experiment.state_mode().to_toml())
    assert 'mode = "eval"' in (run.out / "experiment.toml").read_text()
    assert not replace(run, resume=True).is_done()
