"""Local training of a client: order of its examples, optimiser steps, and privacy accounting."""

from fedsim.training.local import Batch, Trained, evaluate, train

__all__ = ["Batch", "Trained", "evaluate", "train"]
