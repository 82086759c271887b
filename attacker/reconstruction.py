"""What an attack returns, and the files that hold it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.recording.files import write_tensors


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

    def write(self, path: Path, *, settle: bool = True) -> None:
        """Write as one safetensors file, at once. settle: see `replacing`."""
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
        write_tensors(path, tensors, {"facts": json.dumps(facts)}, settle=settle)

    @classmethod
    def read(cls, path: Path) -> "Reconstruction":
        """Read what `write` wrote. Raises ValueError, naming the file, where it is something else.

        In files without `explained`, what stands as confidence is the share explained: the confidence of those is undecided.
        """
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()["facts"])
                tensors = {name: file.get_tensor(name) for name in ("x", "y", "confidence", "loss")}
                old = "explained" not in file.keys()  # noqa: SIM118
                tensors["explained"] = tensors["confidence"] if old else file.get_tensor("explained")
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a reconstruction: {error}") from None
        slots = tuple(Slot(*slot) for slot in facts.pop("slots"))
        if old:
            tensors["confidence"] = torch.full_like(tensors["confidence"], torch.nan)
        words = {key: tuple(facts.get(key, ())) for key in ("oracles", "notes")}
        facts["evidence"] = {name: tuple(values) for name, values in facts.get("evidence", {}).items()}
        return cls(**tensors, **{**facts, **words}, slots=slots)


def slots_of(round: int, client: str, batch_sizes: Sequence[int], examples: int | None = None) -> tuple[Slot, ...]:
    """The slots of all `examples` of one observation, by default one a place, in the order of their use: epoch after epoch."""
    count = examples or sum(batch_sizes)
    at = [(b, p) for b, size in enumerate(batch_sizes, start=1) for p in range(size)]
    return tuple(Slot(round, client, b, p, example % count) for example, (b, p) in enumerate(at))
