"""Partitioners of the stand-in."""


class IidPartitioner:
    """As many partitions as clients, of about the same size."""

    def __init__(self, num_partitions):
        self.num_partitions = num_partitions
