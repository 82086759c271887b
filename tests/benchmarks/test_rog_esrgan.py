"""Tests of the port of a TensorFlow.js network: its weights are read in the right layout, under the names of our network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.contract import Options
from support.rog.esrgan import port_upscaler, read_weights, rename

from attacker.attacks.learned.enhancer import read_enhancer
from attacker.attacks.learned.networks import Upscaler

NAMES = {
    "enter.0": "F_m1",
    "enter.1": "F_0",
    "join.0": "GFF_1",
    "join.1": "GFF_2",
    "leave": "SR",
    **{f"grow.{i}": f"UPN{i + 1}" for i in range(3)},
    **{f"dense.{i}": f"F_{i + 1}_1" for i in range(10)},
    **{f"fuse.{i}": f"LFF_{i + 1}" for i in range(10)},
}


def write_package(folder: Path) -> Upscaler:
    """Write a random network as TensorFlow.js does, kernels as (height, width, in, out), and return it."""
    folder.mkdir()
    torch.manual_seed(0)
    network, entries, content = Upscaler(), [], b""
    for name, p in sorted(network.named_parameters(), reverse=True):
        layer, _, kind = name.rpartition(".")
        values = p.detach().numpy()
        values = values.transpose(2, 3, 1, 0) if values.ndim == 4 else values
        title = f"{NAMES[layer]}/{'kernel' if kind == 'weight' else 'bias'}"
        entries.append({"name": title, "shape": list(values.shape), "dtype": "float32"})
        content += np.ascontiguousarray(values, dtype="<f4").tobytes()
    (folder / "group1-shard1of1.bin").write_bytes(content)
    manifest = {"weightsManifest": [{"paths": ["group1-shard1of1.bin"], "weights": entries}]}
    (folder / "model.json").write_text(json.dumps(manifest))
    return network


def test_ported_network_computes_what_the_original_does(tmp_path: Path) -> None:
    network = write_package(tmp_path / "esrgan-medium")
    found = rename(read_weights(tmp_path / "esrgan-medium"))
    assert all(torch.equal(found[name], p) for name, p in network.state_dict().items())
    options = Options(quick=True, json=False, data=tmp_path, device="cpu", seed=0, table=None)
    rows, _ = port_upscaler(options, tmp_path / "out" / "esrgan.safetensors")
    x = torch.rand(1, 3, 10, 8)  # sides that 4 does not divide
    made = read_enhancer(tmp_path / "out" / "esrgan.safetensors")(x)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 2), mode="replicate")
    torch.testing.assert_close(made, network(padded)[..., :10, :].clamp(0, 1), atol=5e-3, rtol=0)
    assert rows[0]["hash"][:12] in read_enhancer(tmp_path / "out" / "esrgan.safetensors").name
    with pytest.raises(ValueError, match="npm pack @upscalerjs/esrgan-medium"):
        port_upscaler(Options(quick=True, json=False, data=None, device="cpu", seed=0, table=None), tmp_path / "x.safetensors")
