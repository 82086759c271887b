"""Tests of scoring federations whose clients have separate data sets, to which their files of used examples refer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacker.scoring.score import Scorer
from attacker.scoring.truth.originals import CaseObservation
from attacker.scoring.truth.run_truth import load_holdings
from fedsim import data as datasets
from fedsim.data import Dataset, Examples
from fedsim.data import client_parts as parts
from fedsim.recording import DataSpec
from fedsim.truth import TruthReader, TruthWriter, describe_dataset


def client(folder: Path, values: list[int], labels: list[int], *, classes: int = 3) -> Path:
    """Write a client's folder with one-pixel images, of which it used the last and the first in round 1; return its truth."""
    images = np.array(values, np.uint8).reshape(-1, 1, 1, 1)
    data = Dataset(
        name="own",
        spec=DataSpec(shape=(1, 1, 1), num_classes=classes),
        class_names=tuple("abcdef"[:classes]),
        train=Examples(values=images, labels=np.array(labels)),
        test=Examples(values=images[:0], labels=np.array(labels[:0])),
    )
    parts.write_part(folder / "data", data, data.train)
    describe_dataset(folder / "truth", lambda: describe(folder / "data"))
    TruthWriter(folder / "truth", folder.name).write(1, 1, [[len(values) - 1], [0]])
    return folder / "truth"


def describe(path: Path) -> dict[str, Any]:
    return datasets.describe(parts.part(str(path)), f"part:{path}", {})


def test_each_client_is_compared_with_its_own_examples(tmp_path: Path) -> None:
    truth = [client(tmp_path / "one", [10, 20], [0, 1]), client(tmp_path / "two", [30, 40, 50], [2, 1, 0])]
    scorer = Scorer(tmp_path, truth)
    for name, pixels, labels in (("one", [20, 10], [1, 0]), ("two", [50, 30], [0, 2])):
        _, x, y = scorer.truth.read_originals([CaseObservation(1, 1, (name,))])
        assert torch.equal(x.flatten(), torch.tensor(pixels) / 255)
        assert y.tolist() == labels
    originals, x, _ = scorer.truth.read_originals([CaseObservation(1, 1, ("one", "two"))])
    assert (255 * x.flatten()).round().tolist() == [20, 10, 50, 30]
    assert len({one.index for one in originals}) == 4, "indices of different clients are different examples"


def test_moved_client_folder_can_be_scored(tmp_path: Path) -> None:
    client(tmp_path / "there", [10, 20], [0, 1])
    (tmp_path / "there").rename(tmp_path / "here")
    scorer = Scorer(tmp_path, [tmp_path / "here" / "truth"])
    assert scorer.truth.read_originals([CaseObservation(1, 1, ("there",))])[1].flatten().tolist() == pytest.approx(
        [20 / 255, 10 / 255]
    )


def test_changed_examples_are_refused(tmp_path: Path) -> None:
    truth = client(tmp_path / "one", [10, 20], [0, 1])
    data = parts.part(str(tmp_path / "one" / "data"))
    changed = Examples(values=data.train.values + np.uint8(1), labels=data.train.labels)
    parts.write_part(tmp_path / "one" / "data", data, changed)
    datasets._load.cache_clear()
    with pytest.raises(ValueError, match=r"the content of data set .* differs from the data that the truth"):
        load_holdings([TruthReader(truth)])


def test_clients_of_different_federations_are_not_scored_together(tmp_path: Path) -> None:
    truth = [client(tmp_path / "one", [10], [0]), client(tmp_path / "two", [20], [1], classes=4)]
    with pytest.raises(ValueError, match="differ in shape, classes or columns"):
        Scorer(tmp_path, truth)


def test_common_data_set_keeps_its_indices(tmp_path: Path) -> None:
    digits = datasets.load("digits")
    describe_dataset(tmp_path / "truth", lambda: datasets.describe(digits, "digits", {}))
    TruthWriter(tmp_path / "truth", "one").write(1, 1, [[7, 3]])
    scorer = Scorer(tmp_path, [tmp_path / "truth"])
    assert scorer.data is digits
    assert [one.index for one in scorer.truth.read_originals([CaseObservation(1, 1, ("one",))])[0]] == [7, 3]
