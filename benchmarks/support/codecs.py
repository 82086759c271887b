"""Codecs on an update of ResNet-18: bytes in Flower's messages relative to the dense codec, and time to pack and to unpack.

The update is made by one step on CIFAR-10 images or, without --data, embedded photographs, changed by the defense for which the
codec is intended. Bytes are counted in Flower's record, with the names and headers of all arrays. `encode_seconds` and
`decode_seconds` are CPU time of one thread, `seconds` is their sum in one turn; each is the median of several turns. `--quick`
takes a smaller batch and one turn.
"""

from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor

from defenses import DefenseSpec
from fedsim import models
from fedsim.flower import records
from fedsim.recording import ModelSpec, Training
from fedsim.recording.codec import decode, encode
from fedsim.training.local import train
from support.contract import Options, print_results
from support.splits import load_images

DEFENSE_SPECS = (
    "",
    "sign()",
    "sign('mean')",
    "qsgd(levels=3)",
    "qsgd(levels=3, norm='linf')",
    "qsgd(levels=127, norm='linf')",
    "uniform(8)",
    "uniform(16)",
    "top_k(0.01)",
    "top_k(0.01, scope='global')",
    "top_k(0.1)",
    "top_k(0.01) | qsgd(levels=1, norm='linf')",
)
CODEC_NAMES = ("dense", "sparse", "bits", "levels")
SUMMARY_KEYS = {"qsgd3_ratio": "qsgd(levels=3", "sign_ratio": "sign(", "topk1_ratio": "top_k(0.01"}
"""Dict from a key of the summary to the beginning of defense specifications.

The value of the key is the largest ratio of packed to dense bytes among these defenses, each with its codec.
"""


def measure_codecs(options: Options) -> None:
    """Print bytes and CPU-seconds for each of `DEFENSE_SPECS` with its codec, and for each of `CODEC_NAMES` without a defense.

    Raises RuntimeError if a codec changes a bit of an update.
    """
    weights, update = _step(options)
    dense = records.to_arrays(update).count_bytes()
    turns = 1 if options.quick else 5
    rows = []
    for text in DEFENSE_SPECS:
        spec, rng = DefenseSpec.parse(text), torch.Generator().manual_seed(options.seed)
        built = spec.build()
        sent, _ = built.apply(update, built.init(update), rng)
        # without a defense, every codec is measured: each must be lossless on any update
        codecs = CODEC_NAMES if not text else (spec.choose_codec(),)
        shown = text.replace(" |", ", then")
        rows += [{"defense": shown, **_measure(codec, sent, weights, dense, turns=turns)} for codec in codecs]
    summary = {key: max(row["ratio"] for row in rows if row["defense"].startswith(start)) for key, start in SUMMARY_KEYS.items()}
    print_results("recording --codecs", rows, {**summary, "worst_seconds": max(row["seconds"] for row in rows)}, options)


def _step(options: Options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return random weights of ResNet-18 and the update of one step from them, both as dicts from parameter to tensor."""
    size = 2 if options.quick else 16
    drawn = load_images(options, "cifar10", size)
    model = models.build(ModelSpec(name="resnet18"), drawn.data, seed=options.seed)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    training = Training(learning_rate=0.05, batch_size=size, steps=1, mode="train", buffers="local")
    torch.set_num_threads(1)
    return weights, train(model, weights, [(drawn.x, drawn.y)], training, drawn.data).update


def _measure(codec: str, update: dict[str, Tensor], weights: dict[str, Tensor], dense: int, *, turns: int) -> dict[str, Any]:
    seconds = []
    for _ in range(turns):
        began = process_time()
        payload = encode(update, codec)
        between = process_time()
        decoded = decode(payload, weights)
        seconds.append((between - began, process_time() - between))
    for name, tensor in update.items():
        if decoded[name].view(torch.int32).ne(tensor.view(torch.int32)).any():
            raise RuntimeError(f"the codec {codec} is not lossless: {name} differs after unpacking")
    size = records.to_arrays(payload.tensors).count_bytes()
    return {
        "codec": codec,
        "bytes": size,
        "ratio": size / dense,
        "encode_seconds": median(one for one, _ in seconds),
        "decode_seconds": median(other for _, other in seconds),
        "seconds": median(sum(both) for both in seconds),
    }
