"""Port of the x4 super-resolution network in the npm package @upscalerjs/esrgan-medium (MIT) to a learned prior.

The folder holds `model.json` and `group1-shard1of1.bin` of the package's `models/x4`: a layers model of TensorFlow.js, of
convolutions and ReLU only, in float32. The package names DIV2K as its training data.
"""

import json
from pathlib import Path

import numpy as np
import torch
from support.contract import Options, ResultRow, TableAndSummary
from torch import Tensor

from attacker.attacks.learned.networks import Upscaler
from attacker.attacks.learned.prior_file import PriorFacts, write_prior

FACTS = PriorFacts(kind="upscaler", size=128, data="DIV2K, npm package @upscalerjs/esrgan-medium 1.0.0, x4")
BLOCKS = 10


def port_upscaler(options: Options, out: Path) -> TableAndSummary:
    """Write the ported network to the file `out`; return one row on the file, and an empty summary.

    Raises ValueError if --data has no folder esrgan-medium with the package's files.
    """
    folder = None if options.data is None else options.data / "esrgan-medium"
    if folder is None or not (folder / "model.json").exists():
        raise ValueError(
            f"the folder of --data, {options.data}, must have esrgan-medium/model.json: run npm pack @upscalerjs/esrgan-medium, "
            "unpack the archive, and copy its folder package/models/x4 to esrgan-medium"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    network = Upscaler(blocks=BLOCKS)
    network.load_state_dict(rename(read_weights(folder)))
    digest = write_prior(out, network, FACTS)
    row: ResultRow = {"file": out.name, "bytes": out.stat().st_size, "hash": digest}
    return [row], {}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a layers model of TensorFlow.js by name; kernels of convolutions as (out, in, height, width)."""
    weights, at = {}, 0
    for group in json.loads((folder / "model.json").read_text())["weightsManifest"]:
        content = b"".join((folder / name).read_bytes() for name in group["paths"])
        for entry in group["weights"]:
            if entry["dtype"] != "float32" or "quantization" in entry:
                raise ValueError(
                    f"the weight {entry['name']} in {folder / 'model.json'} must have dtype float32 and no quantization, "
                    f"got {entry}; copy package/models/x4 of the npm package again"
                )
            count = int(np.prod(entry["shape"]))
            values = np.frombuffer(content, dtype="<f4", count=count, offset=at).reshape(entry["shape"])
            at += 4 * count
            tensor = torch.from_numpy(values.copy())
            weights[entry["name"]] = tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor
        at = 0
    return weights


def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names of `Upscaler`."""
    layers = {"F_m1": "enter.0", "F_0": "enter.1", "GFF_1": "join.0", "GFF_2": "join.1", "SR": "leave"}
    layers |= {f"UPN{i + 1}": f"grow.{i}" for i in range(3)}
    layers |= {f"F_{i + 1}_1": f"dense.{i}" for i in range(BLOCKS)} | {f"LFF_{i + 1}": f"fuse.{i}" for i in range(BLOCKS)}
    kinds = {"kernel": "weight", "bias": "bias"}
    split = {name: name.split("/") for name in weights}
    return {f"{layers[layer]}.{kinds[kind]}": weights[name] for name, (layer, kind) in split.items()}
