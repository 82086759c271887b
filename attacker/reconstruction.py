"""What an attack returns, and the files that hold it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedsim.recording.files import write_tensors
from fedsim.recording.safe_files import DamagedFile, opened_tensors, parse_json, shorten

MAX_BYTES = 8 * 2**30
"""Size of the largest file of a reconstruction that is read."""
FACTS = {
    "case": str,
    "route": str,
    "attack": str,
    "seconds": float,
    "interrupted": bool,
    **dict.fromkeys(("iterations", "evaluations", "restarts", "seed"), int),
}
"""What a file says beside its tensors, slots, texts and evidence, with types."""


@dataclass(frozen=True)
class Slot:
    """Where a reconstructed example belongs: 1-based round, client, 1-based local step, position in its batch.

    A gradient is the same for any order of its batch: which position is which is a matter of scoring.
    example: which row of the reconstruction fills it.
    """

    round: int
    client: str
    batch: int
    position: int
    example: int


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """What an attack returns for one case.

    x:          (N, *shape), not clamped to [0, 1]. y: (N,) int64.
    confidence: (N,) in [0, 1]: the estimated probability that the example is recovered, by scoring's criterion; NaN where the
                attack cannot tell. See `attacker.attacks.confidence`.
    slots:      every place in the client's batches that the examples fill; more than N where they pass in several epochs.
    loss:       (T,) the attack's own loss, once an iteration, of the restart that was kept.
    iterations: in all restarts together; evaluations: of the simulated gradient.
    seconds:    wall time; of cases attacked at once, each one's equal share.
    route:      how the answer came about. attack: its name. oracles: what it was told beyond the threat model.
    interrupted: whether the user stopped it: the best so far, to be done again.
    notes:      what the attack says of this answer, in words.
    explained:  (N,) in [0, 1]: the share of the observed gradient's power that the gradient of this answer explains; NaN or
                None of an answer that does not say.
    evidence:   what confidence was estimated from, by name, (N,) each.
    """

    case: str
    x: Tensor
    y: Tensor
    confidence: Tensor
    slots: tuple[Slot, ...]
    loss: Tensor
    iterations: int
    evaluations: int
    restarts: int
    seconds: float
    route: str
    attack: str
    oracles: tuple[str, ...]
    seed: int
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    explained: Tensor | None = None
    evidence: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def write(self, path: Path, *, below: Path | None = None, settle: bool = True) -> None:
        """Write as one safetensors file, at once. below, settle: see `replacing`."""
        tensors = {"x": self.x, "y": self.y, "confidence": self.confidence, "loss": self.loss}
        tensors["explained"] = torch.full_like(self.confidence, torch.nan) if self.explained is None else self.explained
        facts: dict[str, Any] = {
            "case": self.case,
            "slots": [[s.round, s.client, s.batch, s.position, s.example] for s in self.slots],
            "iterations": self.iterations,
            "evaluations": self.evaluations,
            "restarts": self.restarts,
            "seconds": self.seconds,
            "route": self.route,
            "attack": self.attack,
            "oracles": list(self.oracles),
            "seed": self.seed,
            "interrupted": self.interrupted,
            "notes": list(self.notes),
            "evidence": {name: list(values) for name, values in self.evidence.items()},
        }
        write_tensors(path, tensors, {"facts": json.dumps(facts)}, below=below, settle=settle)

    @classmethod
    def read(cls, path: Path) -> "Reconstruction":
        """Read what `write` wrote. Raises ValueError, naming the file, where it is something else.

        In files without `explained`, what stands as confidence is the share explained: the confidence of those is undecided.
        """
        try:
            with opened_tensors(path, limit=MAX_BYTES) as file:
                facts = parse_json(file.metadata()["facts"], finite=False)
                tensors = {name: file.get_tensor(name) for name in ("x", "y", "confidence", "loss")}
                old = "explained" not in file.keys()  # noqa: SIM118
                tensors["explained"] = tensors["confidence"] if old else file.get_tensor("explained")
            _check_tensors(tensors)
            facts = _checked(facts, len(tensors["x"]))
        except DamagedFile as error:
            raise ValueError(f"{path}: not a reconstruction: {error.reason}") from None
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a reconstruction: {error}") from None
        if old:
            tensors["confidence"] = torch.full_like(tensors["confidence"], torch.nan)
        return cls(**tensors, **facts)


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError where the tensors of a file are of types or numbers of dimensions that no attack returns."""
    for name, tensor in tensors.items():
        good = tensor.dtype == torch.int64 if name == "y" else tensor.is_floating_point()
        if not good or (tensor.ndim < 1 if name == "x" else tensor.ndim != 1):
            raise ValueError(f"{name} is of {tensor.dtype} and shape {tuple(tensor.shape)}")


def _checked(facts: Any, examples: int) -> dict[str, Any]:
    """Return the facts of a file with so many examples as arguments of a `Reconstruction`.

    Raises ValueError or TypeError where one is of another type, or of other examples.
    """
    for key, kind in FACTS.items():
        value = facts[key] if key != "interrupted" else facts.get(key, False)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{key} is to be {kind.__name__}, got {shorten(value)}")
    slots = tuple(Slot(*slot) for slot in facts["slots"])
    for slot in slots:
        numbers = (slot.round, slot.batch, slot.position, slot.example)
        if not isinstance(slot.client, str) or not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
            raise ValueError(f"{shorten(slot)} is no slot")
    words = {key: tuple(map(str, facts.get(key, ()))) for key in ("oracles", "notes")}
    evidence = {str(name): tuple(map(float, values)) for name, values in facts.get("evidence", {}).items()}
    if any(slot.example >= examples for slot in slots) or any(len(values) != examples for values in evidence.values()):
        raise ValueError(f"slots or evidence are of other than its {examples} examples")
    return {**{key: facts[key] for key in FACTS if key in facts}, **words, "slots": slots, "evidence": evidence}


def slots_of(round: int, client: str, batch_sizes: Sequence[int], examples: int | None = None) -> tuple[Slot, ...]:
    """The slots of all `examples` of one observation, by default one a place, in the order of their use: epoch after epoch."""
    count = examples or sum(batch_sizes)
    at = [(b, p) for b, size in enumerate(batch_sizes, start=1) for p in range(size)]
    return tuple(Slot(round, client, b, p, example % count) for example, (b, p) in enumerate(at))
