"""Tests that codecs, the formats in which updates are sent, keep every bit and need no more space than necessary."""

from math import ceil, log2
from typing import Any

import numpy as np
import pytest
import torch
from awkward_tensors import are_identical
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from torch import Tensor

from fedsim.recording.codec import CODECS, Payload, decode, encode, find_sent
from fedsim.recording.packing import positions
from fedsim.recording.packing.bits import compute_width, count_packed_bytes, pack, to_bits, unpack
from fedsim.recording.packing.parts import TENSOR_OVERHEAD_BYTES
from fedsim.recording.packing.values import find_palette

Tensors = dict[str, Tensor]

PACKING = ("bits", "levels", "sparse")


def blank(update: Tensors) -> Tensors:
    """Return weights with shapes but without values, since codecs that pack may only use the shapes."""
    return {name: torch.empty(t.shape, device="meta") for name, t in update.items()}


def back(update: Tensors, codec: str) -> Tensors:
    return decode(encode(update, codec), blank(update))


def size(payload: Payload) -> int:
    return sum(t.nbytes for t in payload.tensors.values())


# --- exact ---


def oddities() -> dict[str, Tensors]:
    """Return updates as defenses make them, and unusual ones, by name."""
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn(3000, generator=rng)
    few = torch.tensor([-1.5, -0.0, 0.0, float("nan"), float("inf"), 1e-45])[torch.randint(6, (3000,), generator=rng)]
    top = torch.where(normal.abs() > 2, normal, 0.0)
    return {
        "all zero": {"w": torch.zeros(7, 3), "big": torch.zeros(4000), "minus": -torch.zeros(4000), "scalar": torch.tensor(0.0)},
        "one entry": {"w": torch.zeros(4000).index_fill(0, torch.tensor([3999]), 1.0)},
        "first entry": {"w": torch.zeros(4000).index_fill(0, torch.tensor([0]), 1.0)},
        "dense": {"w": normal, "v": normal.reshape(50, 60)},
        "signs": {"w": normal.sign() * 0.25, "v": torch.full((3000,), -2.0)},
        "few": {"w": few, "half": few.half(), "double": few.double(), "bfloat": few.bfloat16()},
        "sparse": {"w": top, "half": top.half(), "double": top.double(), "bfloat": top.bfloat16()},
        "sparse and few": {"w": top.sign(), "half": top.half().sign()},
        "nearly dense": {"w": torch.where(normal.abs() < 2, normal, 0.0)},
        "whole": {n: torch.arange(-1500, 1500).clamp(-2, 2).to(getattr(torch, n)) for n in ("int64", "int32", "int16", "int8")},
        "unsigned": {n: torch.arange(3000).clamp(0, 4).to(getattr(torch, n)) for n in ("uint64", "uint32", "uint16", "uint8")},
        "truth": {"w": normal > 0, "v": normal > 3, "all": normal > -9},
        "turned": {"w": top.reshape(50, 60).T, "every": normal.sign()[::2], "spread": torch.ones(1).expand(2000)},
        "not a number": {"w": torch.tensor([0x7F800001, -1, 0x7FC00000, 0] * 500, dtype=torch.int32).view(torch.float32)},
        "with gradient": {"w": torch.nn.Parameter(top)},
        "names": {"a": top, "a/codes": top.sign(), "a/dense": normal, "buffer": top, "": top, "/": top.sign(), "z.b:x": normal},
        "nothing": {},
    }


@pytest.mark.parametrize("codec", sorted(set(CODECS) - {"weights"}))
@pytest.mark.parametrize("name", oddities())
def test_every_bit_and_the_order_of_names_are_kept(codec: str, name: str) -> None:
    update = oddities()[name]
    found = back(update, codec)
    bytewise = {n: t.detach().contiguous().flatten().view(torch.uint8) for n, t in update.items() if t.numel()}
    assert are_identical({n: found[n].contiguous().flatten().view(torch.uint8) for n in bytewise}, bytewise)
    assert [(n, t.dtype, t.shape) for n, t in found.items()] == [(n, t.dtype, t.shape) for n, t in update.items()]


@pytest.mark.parametrize("codec", PACKING)
def test_encoding_and_decoding_change_no_argument(codec: str) -> None:
    update = {"w": torch.tensor([0.0, 1.0, -1.0, 0.0]).repeat(1000), "v": torch.randn(9, generator=torch.Generator())}
    before = {name: t.clone() for name, t in update.items()}
    payload = encode(update, codec)
    kept = {name: t.clone() for name, t in payload.tensors.items()}
    decode(payload, blank(update))
    assert all(torch.equal(t, before[name]) for name, t in update.items())
    assert all(torch.equal(t, kept[name]) for name, t in payload.tensors.items())


ENTRIES = st.sampled_from([0, 0, 0, 1, 0x80000000, 0x3F800000, 0x7FC00001, 0xFFFFFFFF])


@pytest.mark.parametrize("codec", PACKING)
@settings(deadline=None, max_examples=60)
@given(
    few=nps.arrays(np.uint32, nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=20), elements=ENTRIES),
    any=nps.arrays(np.uint16, st.integers(0, 400)),
    gaps=st.lists(st.integers(1, 3000), max_size=60),
)
@example(few=np.zeros((0, 3), np.uint32), any=np.zeros(0, np.uint16), gaps=[])
def test_arbitrary_bits_are_kept(codec: str, few: Any, any: Any, gaps: list[int]) -> None:
    scattered = np.zeros(sum(gaps) + 1, np.uint64)
    scattered[np.cumsum(gaps, dtype=np.int64)] = np.arange(1, len(gaps) + 1)
    update = {
        "few": torch.from_numpy(few).view(torch.float32) if few.ndim else torch.from_numpy(few),
        "any": torch.from_numpy(any).view(torch.float16),
        "scattered": torch.from_numpy(scattered).view(torch.float64),
        "many": torch.from_numpy(np.resize(few, 3000) if few.size else np.zeros(3000, np.uint32)).view(torch.float32),
    }
    for name, t in back(update, codec).items():
        assert t.numpy().tobytes() == update[name].numpy().tobytes()
        assert (t.dtype, t.shape) == (update[name].dtype, update[name].shape)


@pytest.mark.parametrize("codec", ["levels", "sparse"])
def test_rare_values_are_kept(codec: str) -> None:
    """The codec first samples some ten thousand of a million entries; the unusual values here are not among them."""
    w = torch.ones(1_000_000)
    w[[1, 500_001, 999_998]] = torch.tensor([5.0, float("nan"), -0.0])
    w[777_777] = 0.0
    found = back({"w": w}, codec)["w"]
    assert torch.equal(found.view(torch.int32), w.view(torch.int32))
    assert size(encode({"w": w}, codec)) < 0.13 * w.nbytes


def test_a_palette_of_values_is_found_only_if_there_are_few_enough() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 200, 5000, 50_000):
        values = rng.choice(2**32, count, replace=False).astype(np.uint32)
        bits = values[np.concatenate([np.arange(count), rng.integers(0, count, 400_000)])]
        found = find_palette(bits)
        assert (found.values == np.unique(values)).all()
        assert (found.values[found.codes] == bits).all()
        assert find_palette(bits, count - 1) is None
    assert find_palette(rng.integers(0, 2**32, 400_000, dtype=np.uint32)) is None


def test_a_type_that_cannot_be_recorded_is_refused() -> None:
    for codec in PACKING:
        with pytest.raises(ValueError, match=r"a tensor of type torch\.complex128 cannot be packed"):
            encode({"w": torch.zeros(3, dtype=torch.complex128)}, codec)


# --- small ---


@pytest.mark.parametrize("levels", [2, 3, 4, 5, 7, 8, 9, 16, 17, 200, 256, 257, 1000])
def test_each_entry_takes_the_true_number_of_bits(levels: int) -> None:
    """The size is N ceil(log2 K) bits plus the table of K values."""
    n = 80_000
    values = torch.linspace(-1, 1, levels)
    w = values[torch.arange(n) % levels]
    payload = encode({"w": w}, "levels")
    assert size(payload) == n * ceil(log2(levels)) // 8 + 4 * levels
    assert {name: t.dtype for name, t in payload.tensors.items()} == {"w/palette": torch.float32, "w/codes": torch.uint8}
    ordered = payload.tensors["w/palette"].view(torch.int32).numpy().view(np.uint32)
    assert (ordered[1:] > ordered[:-1]).all()


def test_codes_by_hand() -> None:
    """Codes 0, 1, 2 are 1.0, 2.0, -1.0, in the order of their bits; the low bits of all codes precede the high bits."""
    w = torch.tensor([2.0, 1.0, -1.0, 2.0, 2.0, 1.0, 1.0, -1.0, 2.0]).repeat(40)[:353]
    payload = encode({"w": w}, "levels")
    assert payload.tensors["w/palette"].tolist() == [1, 2, -1]
    codes = payload.tensors["w/codes"]
    assert len(codes) == 2 * 45
    assert (codes[0].item(), codes[45].item()) == (0b10011000, 0b00100001)


def test_one_value_takes_no_bits() -> None:
    for codec in ("bits", "levels"):
        payload = encode({"w": torch.full((5000,), -0.5, dtype=torch.float16)}, codec)
        assert {name: t.tolist() for name, t in payload.tensors.items()} == {"w/palette": [-0.5]}


def test_signs_take_one_bit_and_other_tensors_are_sent_unpacked() -> None:
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn(8000, generator=rng)
    payload = encode({"signs": normal.sign() * 0.1, "ternary": (normal > 1).float() - (normal < -1).float(), "w": normal}, "bits")
    assert {name: t.nbytes for name, t in payload.tensors.items()} == {
        "signs/palette": 8,
        "signs/codes": 1000,
        "ternary/dense": 32_000,
        "w/dense": 32_000,
    }


@pytest.mark.parametrize("codec", PACKING)
def test_a_small_tensor_is_sent_unpacked(codec: str) -> None:
    """Two tensors, a palette and codes, would take more space than one."""
    assert set(encode({"bias": torch.tensor([1.0, -1.0, 1.0])}, codec).tensors) == {"bias/dense"}


@pytest.mark.parametrize("codec", PACKING)
def test_packing_takes_no_more_space_than_the_tensors(codec: str) -> None:
    def count_bytes(tensors: Tensors) -> int:
        return sum(TENSOR_OVERHEAD_BYTES + t.nbytes for t in tensors.values())

    for name, update in oddities().items():
        assert count_bytes(encode(update, codec).tensors) <= count_bytes(update), name


@pytest.mark.parametrize(("share", "way"), [(1e-5, "index"), (0.001, "gaps"), (0.01, "gaps"), (0.2, "gaps"), (0.7, "mask")])
def test_positions_take_hardly_more_than_their_entropy(share: float, way: str) -> None:
    n = 300_000
    rng = np.random.default_rng(0)
    at = np.sort(rng.choice(n, int(share * n), replace=False))
    parts = positions.pack(at, n)
    assert set(parts) == ({"high", "low"} if way == "gaps" else {way})
    assert (positions.unpack(parts, n) == at).all()
    entropy = n * (-share * log2(share) - (1 - share) * log2(1 - share)) / 8
    if way == "gaps":
        assert sum(t.nbytes for t in parts.values()) < min(entropy + 0.7 * len(at) / 8, n / 8, 4 * len(at)) + 16
    elif way == "mask":
        assert parts["mask"].nbytes == n // 8


def test_gaps_by_hand() -> None:
    """Positions 1, 9, 63 of 64 have 4 lower bits each, and upper parts 0, 0, 3, whose unary code sets the bits 0, 1 and 5."""
    parts = {"high": torch.tensor([0b11000100], dtype=torch.uint8), "low": pack(np.array([1, 9, 15], np.uint8), 4)}
    assert positions.unpack(parts, 64).tolist() == [1, 9, 63]
    assert parts["low"].tolist() == [0b11100000, 0b00100000, 0b00100000, 0b01100000]
    assert positions._count_unary_bits(128, 9, 3) == 9 + 15  # upper parts have 4 bits; the last one is at most 15


def test_few_positions_are_sent_as_one_tensor_instead_of_two() -> None:
    """Of 60,000, 100 positions take 200 bytes as an index and about 140 as gaps, which need a second tensor."""
    assert set(positions.pack(np.arange(100) * 600, 60_000)) == {"index"}
    assert set(positions.pack(np.arange(400) * 150, 60_000)) == {"high", "low"}


@pytest.mark.parametrize(("size", "dtype"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_few_positions_are_as_wide_as_the_tensor_needs(size: int, dtype: str) -> None:
    parts = positions.pack(np.array([3, size - 1]), size)
    assert (parts["index"].dtype, parts["index"].tolist()) == (getattr(torch, dtype), [3, size - 1])


def test_signs_and_positions_of_sparse_signs_are_both_packed() -> None:
    w = torch.zeros(100_000)
    w[::100] = torch.tensor([1.0, -1.0]).repeat(500) * 0.01
    payload = encode({"w": w}, "sparse")
    assert payload.tensors["w/codes"].nbytes == 125
    assert size(payload) < 0.004 * w.nbytes


@pytest.mark.parametrize("width", [0, 1, 5, 8, 9, 17])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_numbers_of_any_bit_width_are_kept(width: int, count: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << width, count)
    packed = pack(numbers, width)
    assert len(packed) == count_packed_bytes(width, count)
    assert (unpack(packed, width, count) == numbers).all()
    with pytest.raises(ValueError, match="bytes for"):
        unpack(torch.cat([packed, packed[:1].new_zeros(1)]), width, count)


def test_width_is_the_ceiling_of_the_logarithm() -> None:
    assert [compute_width(count) for count in range(10)] == [0, 0] + [ceil(log2(count)) for count in range(2, 10)]


# --- which coordinates were sent ---


def test_the_codec_sparse_knows_the_sent_coordinates_in_every_layout() -> None:
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn(20, 400, generator=rng)
    update = {
        "index": torch.zeros(4000).index_fill(0, torch.tensor([5, 3999]), 1.0),
        "gaps": torch.where(normal > 2, normal, 0.0),
        "mask": torch.where(normal > 0, normal, 0.0),
        "dense": normal,
        "small": torch.tensor([0.0, 2.0]),
        "zero": torch.zeros(4000),
        "minus": torch.tensor([-0.0, 0.0]).repeat(2000),
    }
    masks = find_sent(encode(update, "sparse"), blank(update))
    assert set(masks) == set(update)
    for name, mask in masks.items():
        assert (mask.dtype, mask.shape) == (torch.bool, update[name].shape)
        assert torch.equal(mask, (update[name] != 0) | update[name].signbit())
    assert {codec: find_sent(encode(update, codec), update) for codec in ("dense", "bits", "levels")} == {
        "dense": {}, "bits": {}, "levels": {}
    }  # fmt: skip


def test_the_bits_of_a_tensor_are_a_view_of_its_memory() -> None:
    w = torch.zeros(3)
    to_bits(w)[1] = 0x3F800000
    assert w.tolist() == [0, 1, 0]
