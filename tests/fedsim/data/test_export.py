"""Tests of splitting data into one folder for each party, after which a federation gives the same results."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_experiments import Federate, make_tiny

from fedsim import data as datasets
from fedsim.data import Examples
from fedsim.data import client_parts as parts
from fedsim.data import export as splitting
from fedsim.engine import apps as app
from fedsim.engine import engines as engine
from fedsim.engine.locations import PartyLocations
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording


def own_parts(experiment: Any, folder: Path) -> tuple[FederationRun, list[FederationRun]]:
    """Split the data into `folder`; return the run as the server sees it, and as each client sees it."""
    splitting.split(experiment, folder)
    server = FederationRun(
        experiment=experiment, out=folder / "run", device="cpu", locations=PartyLocations(public=folder / "public")
    )
    homes = [splitting.make_client_path(folder, number) for number in range(experiment.clients.count)]
    clients = [
        FederationRun(
            experiment=experiment,
            out=Path("/nowhere"),
            device="cpu",
            client_seed=5,
            locations=PartyLocations(data=f"part:{home / 'data'}", private=home / "private", truth=home / "truth"),
        )
        for home in homes
    ]
    return server, clients


def run_apart(server: FederationRun, clients: list[FederationRun]) -> None:
    both = app.make_server_app(lambda _: server), app.make_client_app(lambda c: clients[int(c.node_config["partition-id"])])
    engine.run_local(*both, len(clients))


def test_clients_with_only_their_own_data_send_the_updates_of_a_simulation_bit_for_bit(
    federate: Federate, tmp_path: Path
) -> None:
    whole = federate("whole")
    run_apart(*own_parts(make_tiny(), tmp_path / "apart"))
    ours, theirs = ({(o.round, o.client): o.update for o in Recording(f / "recording").read_observations()} for f in
                    (tmp_path / "apart" / "run", whole.out))  # fmt: skip
    assert ours.keys() == theirs.keys()
    assert len(ours) == 6
    assert all(torch.equal(t, theirs[key][name]) for key in ours for name, t in ours[key].items())
    rows = [json.loads(line) for line in (tmp_path / "apart/run/metrics.jsonl").read_text().splitlines()]
    same = [json.loads(line) for line in (whole.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [row["loss"] for row in same]


def test_a_clients_truth_names_its_own_part_and_the_servers_folder_holds_nothing_of_a_client(tmp_path: Path) -> None:
    server, clients = own_parts(make_tiny(), tmp_path)
    run_apart(server, clients)
    assert {path.name for path in server.out.iterdir()} == {"experiment.toml", "metrics.jsonl", "recording", "state"}
    used = []
    for number in range(3):
        home = splitting.make_client_path(tmp_path, number)
        described = json.loads((home / "truth" / "dataset.json").read_text())
        own = datasets.load(described["name"], **described["arguments"])
        assert described["content_hash"] == own.compute_hash()
        assert described["size"] == len(own.train) in (479, 480)
        (rows,) = (path.read_text().splitlines() for path in (home / "truth").glob("*.jsonl"))
        used.append([json.loads(row)["indices"] for row in rows])
        assert max(max(indices) for indices in used[-1]) < len(own.train)
    assert len({str(one) for one in used}) == 3


def test_the_parts_contain_all_examples_and_the_public_folder_only_held_out_ones(tmp_path: Path) -> None:
    experiment = make_tiny(partition={"name": "dirichlet", "alpha": 0.3})
    handed = splitting.split(experiment, tmp_path)
    data = datasets.load("digits")
    examples = [datasets.load("part", path=str(path)).train for path in handed.clients]
    assert sorted(x.tobytes() for one in examples for x in one.values) == sorted(x.tobytes() for x in data.train.values)
    public = datasets.load("public", path=str(handed.public))
    assert (public.spec, len(public.train)) == (data.spec, 0)
    assert np.array_equal(public.test.values, data.test.values)
    assert parts.read_sizes(handed.public) == sorted(handed.sizes)
    assert list(handed.sizes) != sorted(handed.sizes)  # sorted, so that the server does not learn which client has which
    assert {path.name for path in handed.public.iterdir()} == {"data.json", "examples.npz", "experiment.toml"}
    assert splitting.read_split(tmp_path) == experiment


def test_without_held_out_examples_a_federation_runs_and_its_accuracy_is_unknown(tmp_path: Path) -> None:
    experiment = make_tiny()
    server, clients = own_parts(experiment, tmp_path)
    data = datasets.load("digits")
    nothing = data.test.select(np.zeros(len(data.test), dtype=bool))
    parts.write_public(tmp_path / "public", datasets.Dataset(**{**vars(data), "test": nothing}), [479, 479, 480])
    run_apart(server, clients)
    row = json.loads((server.out / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["round"], row["loss"], row["accuracy"]) == (2, None, None)


def archive(path: Path, images: Any, labels: Any) -> str:
    np.savez(path, images=images, labels=labels)
    return f"npz:{path}"


def test_data_that_only_one_machine_has_become_its_part(tmp_path: Path) -> None:
    splitting.split(make_tiny(), tmp_path)
    images, labels = np.random.default_rng(0).random((7, 8, 8, 1), dtype=np.float32), np.arange(7) % 3
    count = splitting.write_own_part(archive(tmp_path / "own.npz", images, labels), tmp_path / "public", tmp_path / "mine")
    own = datasets.load("part", path=str(tmp_path / "mine"))
    assert count == len(own.train) == 7
    assert own.spec == datasets.load("digits").spec  # ten classes, of which these examples have three
    assert sorted(x.tobytes() for x in own.train.values) == sorted(x.tobytes() for x in images.transpose(0, 3, 1, 2))


def write_pictures(folder: Path, *names: str) -> str:
    from PIL import Image

    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for index in range(5):
            Image.new("RGB", (8, 8), (40 * number, 0, index)).save(folder / name / f"{index}.png")
    return f"imagefolder:{folder}"


def test_a_client_with_some_of_the_classes_numbers_them_as_the_others_do(tmp_path: Path) -> None:
    facts = datasets.load_text(write_pictures(tmp_path / "all", "ant", "cat", "dog"))
    parts.write_public(tmp_path / "public", facts, [5])
    mine = write_pictures(tmp_path / "mine", "cat", "dog")
    splitting.write_own_part(mine, tmp_path / "public", tmp_path / "part")
    own = datasets.load("part", path=str(tmp_path / "part")).train
    assert {(int(x[0, 0, 0]), int(y)) for x, y in zip(own.values, own.labels, strict=True)} == {(0, 1), (40, 2)}
    words = r"class 'cat' has another index than in public:.*; write your data with `fedsim part`, .*: ant, cat, dog"
    with pytest.raises(ValueError, match=words):
        PartyLocations(data=mine, public=tmp_path / "public").load_dataset()
    with pytest.raises(ValueError, match="class 'eel' is not one of public:"):
        splitting.write_own_part(write_pictures(tmp_path / "other", "cat", "eel"), tmp_path / "public", tmp_path / "part")


def test_pictures_of_another_size_than_the_default_are_converted_as_the_error_says(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    facts = datasets.load("imagefolder", path=write_pictures(folder, "ant", "cat").partition(":")[2], size=8)
    parts.write_public(tmp_path / "public", facts, [10])
    with pytest.raises(ValueError, match="load your data in that shape, such as") as refused:
        splitting.write_own_part(f"imagefolder:{folder}", tmp_path / "public", tmp_path / "part")
    advised = str(refused.value).split('"')[1].replace("FOLDER", str(folder))
    assert splitting.write_own_part(advised, tmp_path / "public", tmp_path / "part") == 10


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((5, 9, 9, 1), np.uint8), [0, 1, 0, 1, 0], r"shape \(1, 9, 9\), but those of"),
        (np.zeros((5, 8, 8, 1), np.uint8), [0, 11, 0, 1, 0], "label 11 is not one of the 10 classes"),
    ],
)
def test_data_that_contradict_the_public_facts_are_refused(images: Any, labels: list[int], words: str, tmp_path: Path) -> None:
    splitting.split(make_tiny(), tmp_path)
    with pytest.raises(ValueError, match=words):
        splitting.write_own_part(archive(tmp_path / "own.npz", images, np.array(labels)), tmp_path / "public", tmp_path / "mine")


def test_damaged_parts_are_named(tmp_path: Path) -> None:
    home = splitting.split(make_tiny(), tmp_path).clients[0]
    (home / "examples.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"examples\.npz"):
        parts.part(str(home))
    np.savez(home / "examples.npz", values=np.full((2, 1, 8, 8), 2, np.float32), labels=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got \[2.0, 2.0\]"):
        parts.part(str(home))
    (home / "data.json").unlink()
    with pytest.raises(FileNotFoundError, match="fedsim split"):
        parts.part(str(home))


def test_a_second_split_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    splitting.split(make_tiny(), tmp_path)
    with pytest.raises(ValueError, match="exists already"):
        splitting.split(make_tiny(), tmp_path)


def test_an_experiment_with_another_number_of_clients_is_refused(tmp_path: Path) -> None:
    splitting.split(make_tiny(), tmp_path)
    run = FederationRun(
        experiment=make_tiny(clients={"count": 2}), out=tmp_path / "run", locations=PartyLocations(public=tmp_path / "public")
    )
    with pytest.raises(ValueError, match=r"lists the sizes of 3 clients, and clients\.count = 2"):
        run.check()


def test_pixels_and_floats_can_be_concatenated() -> None:
    pixels = Examples(values=np.array([[255]], np.uint8), labels=np.array([1]))
    numbers = Examples(values=np.array([[0.25]], np.float32), labels=np.array([0]))
    joined = parts.concatenate(pixels, numbers)
    assert joined[:][0].flatten().tolist() == [1.0, 0.25]
    assert parts.concatenate(pixels, pixels).values.dtype == np.uint8
