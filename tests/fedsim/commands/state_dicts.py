"""Functions that write state dicts as users of other frameworks would, and the network that they belong to."""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(1, 8, 8), num_classes=4)
RATE = 0.5
SETTINGS = """
model = "lenet_dlg"
num_examples = 1
training.learning_rate = 0.5
training.batch_size = 1
training.steps = 1
data.shape = [1, 8, 8]
data.num_classes = 4
"""
Arrays = dict[str, np.ndarray]


def network() -> nn.Module:
    return models.build(ModelSpec(name="lenet_dlg"), DATA, seed=1)


def write(path: Path, arrays: Arrays) -> Path:
    """Write NumPy arrays to an .npz or .safetensors file, as a user of JAX or Keras would, or to a .pt file with torch.save."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        save_file(arrays, path)
    else:
        torch.save({name: torch.from_numpy(a.copy()) for name, a in arrays.items()}, path)
    return path
