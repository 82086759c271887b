"""Partitioners of the replacement of flwr_datasets."""


class IidPartitioner:
    """A given number of partitions of about the same size."""

    def __init__(self, num_partitions):
        self.num_partitions = num_partitions
