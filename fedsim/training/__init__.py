"""Training of one client: batches, local steps, and in `privacy` an accountant for what they reveal."""

from fedsim.training.local import Batch, Trained, evaluate, train

__all__ = ["Batch", "Trained", "evaluate", "train"]
