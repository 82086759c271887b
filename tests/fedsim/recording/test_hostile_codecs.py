"""Tests of malicious payloads: codecs refuse what no encoder produces, and allocate little memory for it."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.recording.codec import CODECS, Payload, decode, encode, find_codec
from fedsim.recording.packing.bits import pack

Tensors = dict[str, Tensor]

PACKING = ("bits", "levels", "sparse")
N = 4096
START = {"w": torch.zeros(64, 64), "b": torch.zeros(())}


def u8(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def index(*values: int) -> Tensor:
    return torch.from_numpy(np.array(values, np.uint16))


HIGH = pack(np.array([1, 1, 0, 0, 0, 0, 1]), 1)
"""The upper parts, in unary, of 3 positions among 4096, which have 10 lower bits each."""

FORGED: dict[str, tuple[str, Tensors, str]] = {
    "nothing": ("levels", {}, "a combination"),
    "no part": ("levels", {"w": torch.zeros(64, 64)}, "the name of tensor 'w' has no '/'"),
    "an unknown part": ("levels", {"w/exec": zeros(1)}, "a combination"),
    "codes alone": ("levels", {"w/codes": zeros(512)}, "a combination"),
    "a layout of another codec": ("levels", {"w/mask": zeros(512), "w/values": torch.zeros(0)}, "a combination"),
    "another shape": ("levels", {"w/dense": torch.zeros(N)}, r"has shape \(4096,\), but the weight that was sent has \(64, 64\)"),
    "an empty palette": ("levels", {"w/palette": torch.zeros(0)}, r"'palette' of shape \(0,\), .* vector of 1 to 4096"),
    "a palette of many": ("levels", {"w/palette": torch.zeros(N + 1), "w/codes": zeros(13 * 512)}, "with 'palette' of shape"),
    "a palette of rows": ("levels", {"w/palette": torch.zeros(1, 1)}, "with 'palette' of shape"),
    "three bits": ("bits", {"w/palette": torch.zeros(3), "w/codes": zeros(1024)}, r"\(3,\), .* of 1 to 2 values"),
    "a palette without codes": ("levels", {"w/palette": torch.zeros(2)}, r"2 values \('palette'\) without an index"),
    "codes for one value": ("levels", {"w/palette": torch.zeros(1), "w/codes": zeros(0)}, "a single value"),
    "too few codes": ("levels", {"w/palette": torch.zeros(2), "w/codes": zeros(511)}, r"\(511,\), .* of 512 values"),
    "too many codes": ("levels", {"w/palette": torch.zeros(2), "w/codes": zeros(513)}, r"'codes' of shape \(513,\)"),
    "codes of a wide type": ("levels", {"w/palette": torch.zeros(2), "w/codes": torch.zeros(512)}, r"'codes' of type .*32"),
    "complex values": ("levels", {"w/palette": torch.zeros(1, dtype=torch.complex128)}, r"'palette' of type torch\.complex128"),
    "a code too high": ("levels", {"w/palette": torch.zeros(3), "w/codes": zeros(1024) + 255}, "index 3 into a table of 3"),
    "values for no place": ("sparse", {"w/values": torch.zeros(1)}, r"'values' of shape \(1,\), .* of 0 values"),
    "places for no value": ("sparse", {"w/index": index(1)}, "a combination"),
    "two kinds of places": ("sparse", {"w/values": torch.ones(1), "w/index": index(1), "w/mask": zeros(512)}, "a combination"),
    "half the gaps": ("sparse", {"w/values": torch.ones(1), "w/high": zeros(1)}, "a combination"),
    "a place outside": ("sparse", {"w/values": torch.ones(1), "w/index": index(N)}, "position 4096, .* only 4096 entries"),
    "places twice": ("sparse", {"w/values": torch.ones(2), "w/index": index(7, 7)}, "position 7 after 7, .* ascend"),
    "places that descend": ("sparse", {"w/values": torch.ones(2), "w/index": index(7, 3)}, "position 3 after 7, .* ascend"),
    "no places": ("sparse", {"w/values": torch.ones(0), "w/index": index()}, "without positions"),
    "more values than places": ("sparse", {"w/values": torch.ones(2), "w/index": index(7)}, "with 2 values for 1 positions"),
    "more values than weights": ("sparse", {"w/values": torch.ones(N + 1), "w/index": index(7)}, "'values' of shape"),
    "a wide index": ("sparse", {"w/values": torch.ones(1), "w/index": torch.tensor([7])}, r"'index' of type torch\.int64"),
    "a short mask": ("sparse", {"w/values": torch.ones(1), "w/mask": zeros(511)}, "is packed with 511 bytes for 4096 numbers"),
    "a long mask": ("sparse", {"w/values": torch.ones(1), "w/mask": zeros(513)}, r"'mask' of shape \(513,\)"),
    "an empty mask": ("sparse", {"w/values": torch.ones(0), "w/mask": zeros(512)}, "without positions"),
    "no gaps": ("sparse", {"w/values": torch.ones(0), "w/high": zeros(1), "w/low": zeros(0)}, "1 bytes in .* 0 positions"),
    "gaps that run on": ("sparse", {"w/values": torch.ones(3), "w/high": torch.cat([HIGH, u8(0)]), "w/low": zeros(10)}, "2 byt"),
    "gaps that run out": ("sparse", {"w/values": torch.ones(3), "w/high": u8(0b11000001), "w/low": zeros(10)}, "position 5120, "),
    "too many gaps": ("sparse", {"w/values": torch.ones(N), "w/high": zeros(512) + 255, "w/low": zeros(9)}, "512 bytes in "),
    "short lower bits": ("sparse", {"w/values": torch.ones(3), "w/high": HIGH, "w/low": zeros(9)}, "with 9 bytes for 3 numbers"),
    "endless lower bits": ("sparse", {"w/values": torch.ones(3), "w/high": HIGH, "w/low": zeros(10**5)}, "'low' of shape"),
    "equal gaps": ("sparse", {"w/values": torch.ones(3), "w/high": HIGH, "w/low": zeros(10)}, "position 4096, "),
    "codes of no place": (
        "sparse", {"w/palette": torch.ones(2), "w/codes": zeros(2), "w/index": index(7)}, "with 2 bytes for 1 numbers"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_payload_that_no_encoder_produces_is_refused_with_a_short_message(name: str) -> None:
    codec, tensors, words = FORGED[name]
    whole = {**tensors, "b/dense": torch.zeros(())} if tensors else {"w/": zeros(1), "b/dense": torch.zeros(())}
    with pytest.raises(ValueError, match=words) as error:
        decode(Payload(tensors=whole, codec=codec), START)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("codec", PACKING)
def test_payloads_with_missing_or_additional_names_are_refused(codec: str) -> None:
    for update in ({"w": torch.zeros(64, 64)}, {**START, "x": torch.zeros(1)}):
        with pytest.raises(ValueError, match=r"the update (lacks|has) tensor '[bx]'"):
            decode(encode(update, codec), START)


@pytest.mark.parametrize("codec", ["bits", "levels"])
@pytest.mark.parametrize("shape", [(63, 64), (65, 64), (0,)])
def test_an_update_of_another_size_is_refused(codec: str, shape: tuple[int, ...]) -> None:
    for value in (0.0, 1.0):
        update = {"w": torch.full(shape, value), "b": torch.zeros(())}
        update["w"].view(-1)[1:2] = -3.0
        with pytest.raises(ValueError, match=r"'w' (has|is packed with)"):
            decode(encode(update, codec), START)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_payload_that_is_too_large_is_refused_by_its_shapes(codec: str) -> None:
    """Only names, types and shapes are given, as in the header of a file; no values are in memory."""
    at = torch.arange(N)
    updates = {
        "dense": torch.ones(N),
        "few": at % 2 + 1.0,
        "high and low": torch.where(at % 10 == 0, at + 1.0, 0.0),
        "mask": torch.where(at % 3 > 0, at + 1.0, 0.0),
        "index": torch.where(at == 7, 2.0, 0.0),
        "codes": torch.where(at % 3 > 0, at % 5 + 1.0, 0.0),
    }
    seen = set()
    for update in updates.values():
        fair = encode({"w": update.reshape(64, 64)}, "dense" if codec == "weights" else codec).tensors
        described = {name: t.to("meta") for name, t in fair.items()}
        find_codec(codec).fits(described, {"w": START["w"]})
        for name, t in described.items():
            seen.add(name)
            with pytest.raises(ValueError, match=r"shape \(1099511627776,\)"):
                find_codec(codec).fits({**described, name: t.new_empty(2**40)}, {"w": START["w"]})
    parts = {"sparse": {"values", "palette", "codes", "index", "mask", "high", "low"}, "dense": set(), "weights": set()}
    assert seen >= {f"w/{part}" for part in parts.get(codec, {"palette", "codes"})}


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_random_bytes_are_refused_or_give_tensors_of_the_right_shapes(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(PACKING))
    fair = encode({"w": (torch.arange(N) % 40 == 0).float().reshape(64, 64), "b": torch.zeros(())}, codec).tensors
    tensors = {name: t.clone() for name, t in fair.items()}
    name = data.draw(st.sampled_from(sorted(tensors)))
    flat = tensors[name].reshape(-1)
    if len(flat):
        raw = flat.view(torch.uint8)
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        tensors[name] = flat[: data.draw(st.integers(0, len(flat)))]
    try:
        found = decode(Payload(tensors=tensors, codec=codec), START)
    except ValueError:
        return
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in START.items()}


@pytest.mark.parametrize("codec", PACKING)
def test_decoding_takes_no_more_memory_than_the_weights_justify(codec: str) -> None:
    start = {"w": torch.empty(1_000_000, device="meta")}
    w = torch.zeros(1_000_000)
    w[:: 3 if codec == "sparse" else 2] = 1.0
    payload = encode({"w": w}, codec)
    tracemalloc.start()
    decode(payload, start)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * w.nbytes
