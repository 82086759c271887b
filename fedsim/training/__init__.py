"""Local training of a client: order of its examples, optimiser steps, and privacy accounting."""

from fedsim.training.local import Batch, TrainingResult, evaluate, train

__all__ = ["Batch", "TrainingResult", "evaluate", "train"]
