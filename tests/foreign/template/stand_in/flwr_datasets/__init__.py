"""A replacement of the package flwr_datasets without downloads; it reads the archive that FLWR_DATASETS_FILE names."""

import os

import numpy as np
from PIL import Image


class FederatedDataset:
    """All training images, in partitions with at most FLWR_DATASETS_EXAMPLES examples."""

    def __init__(self, dataset, partitioners):
        with np.load(os.environ["FLWR_DATASETS_FILE"]) as archive:
            self.images, self.labels = archive["images"], archive["labels"]
        self.partitioner = partitioners["train"]

    def load_partition(self, partition_id):
        rows = np.arange(partition_id, len(self.labels), self.partitioner.num_partitions)
        rows = rows[: int(os.environ.get("FLWR_DATASETS_EXAMPLES", len(rows)))]
        return Partition(self.images[rows], self.labels[rows])


class Partition:
    """Images and labels of a partition, with the methods of `datasets.Dataset` that the app calls."""

    def __init__(self, images, labels, transform=None):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        batch = {"img": [Image.fromarray(self.images[row])], "label": [int(self.labels[row])]}
        found = self.transform(batch) if self.transform else batch
        return {key: values[0] for key, values in found.items()}

    def train_test_split(self, test_size, seed):
        order = np.random.default_rng(seed).permutation(len(self))
        held_out = -int(-test_size * len(self) // 1)
        train, test = order[held_out:], order[:held_out]
        return Split({"train": self._of(train), "test": self._of(test)})

    def _of(self, rows):
        return Partition(self.images[rows], self.labels[rows], self.transform)


class Split(dict):
    """Partitions by name."""

    def with_transform(self, transform):
        return Split({name: Partition(one.images, one.labels, transform) for name, one in self.items()})
