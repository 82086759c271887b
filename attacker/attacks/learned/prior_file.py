"""Files of learned priors: the weights, and what they were trained on, with a hash that is checked when they are read."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attacker.attacks.learned.generator import ImageGenerator
from attacker.attacks.learned.networks import Autoencoder, UNet, Upscaler
from fedsim.recording.files import write_tensors
from fedsim.recording.safe_files import DamagedFile, open_tensors, parse_json

PriorKind = Literal["enhancer", "autoencoder", "generator", "denoiser", "upscaler"]
NETWORKS: Mapping[PriorKind, Callable[..., nn.Module]] = {
    "enhancer": UNet,
    "autoencoder": Autoencoder,
    "generator": ImageGenerator,
    "denoiser": UNet,
    "upscaler": Upscaler,
}
FILE_ENDING = ".safetensors"
"""Suffix of the files of learned priors."""
MAX_BYTES = 2**30
"""Largest size in bytes of a file that is read."""
MAX_SETTING = 1024
"""Largest setting of a network that is read, such as a number of channels or classes."""


@dataclass(frozen=True, kw_only=True)
class PriorFacts:
    """Metadata of a learned prior.

    kind: key of `NETWORKS`. size: side of the square crops in training. settings: arguments of the network's constructor.
    steps: number of training steps. data: description of the images. images: their number.
    data_hash: SHA-256 of the images' shape and bytes. seed: of initial weights and batches.
    """

    kind: PriorKind
    size: int
    settings: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    data: str = ""
    images: int = 0
    data_hash: str = ""
    seed: int = 0


@dataclass(frozen=True)
class LearnedPrior:
    """A network in evaluation mode, without gradients of its weights, the metadata in its file, and the hash of its weights."""

    network: nn.Module
    facts: PriorFacts
    weights_hash: str

    @property
    def name(self) -> str:
        """The prior in words, for notes: kind, first 12 digits of its weights' hash, and description of its training images."""
        return f"{self.facts.kind} {self.weights_hash[:12]} of {self.facts.data}"


def build_network(facts: PriorFacts) -> nn.Module:
    """Return a new, untrained network of the kind and with the settings in `facts`."""
    return NETWORKS[facts.kind](**facts.settings)


def write_prior(path: Path, network: nn.Module, facts: PriorFacts) -> str:
    """Write weights, rounded to half precision, and metadata into a safetensors file; return the hash of the rounded weights."""
    tensors = {name: tensor.detach().cpu().half().contiguous() for name, tensor in network.state_dict().items()}
    digest = _hash_tensors(tensors)
    write_tensors(path, tensors, {"facts": json.dumps({**asdict(facts), "weights_hash": digest})})
    return digest


def read_prior(path: Path, *kinds: PriorKind) -> LearnedPrior:
    """Return the learned prior in a file that `write_prior` wrote.

    kinds: the kinds that are accepted, at least one.
    Raises ValueError, naming the file, if it is missing, damaged or of another kind.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; train one with attacker train-prior DATA --kind {kinds[0]} --out {path}")
    try:
        with open_tensors(path.parent, path.name, limit=MAX_BYTES) as file:
            fields = parse_json((file.metadata() or {})["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest = fields.pop("weights_hash")
        facts = PriorFacts(**fields)
        _check(facts, kinds, digest, tensors)
        with torch.device("meta"):
            network = build_network(facts)
        network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    except DamagedFile as error:
        raise ValueError(f"{path}: not a learned prior: {error.reason}") from None
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path}: not a learned prior of kind {' or '.join(kinds)}: {error}") from None
    return LearnedPrior(network.requires_grad_(False).eval(), facts, digest)


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, shapes, data types and values of tensors on the CPU, as hexadecimal digits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check(facts: PriorFacts, kinds: Sequence[PriorKind], digest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the content of a file is valid.

    It must be of one of the `kinds`, with settings that are whole numbers from 1 to MAX_SETTING. The hash of its `tensors` must
    be the one that the file states, `digest`, and all their values must be finite.
    """
    if facts.kind not in kinds:
        raise ValueError(f"this file holds a prior of kind {facts.kind!r}; give another file")
    if not all(type(value) is int and 0 < value <= MAX_SETTING for value in facts.settings.values()):
        raise ValueError(
            f"the settings of its network must be whole numbers from 1 to {MAX_SETTING}, got {dict(facts.settings)}; train it "
            "again"
        )
    if _hash_tensors(tensors) != digest:
        raise ValueError("its weights do not have the hash that it states; copy it again, or train it again")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError("its weights hold NaN or infinity; train it again")
