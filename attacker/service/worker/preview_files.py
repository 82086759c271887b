"""Preview of a running job: a file of intermediate images, which its worker replaces about once a second during a search."""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from attacker.attacks.base import IntermediateResult

PARTIAL_SUFFIX = ".partial"
"""Suffix of a file that is not completely written yet."""
MAX_IMAGES = 48
"""Largest number of images in a preview; those that changed last are shown."""


class ImagePlace(NamedTuple):
    """The place of an image in the recording, and its recovered label.

    batch: number of the local step, from 1. position: index in the batch of this step, from 0.
    """

    round: int
    client: str
    batch: int
    position: int
    label: int


@dataclass(frozen=True)
class Preview:
    """Intermediate images of the searches of a running job, each the best of its restart so far by the attack's own loss.

    images: (n, H, W, C), 8 bit, C as in the data; n is at most `MAX_IMAGES`. places: place in the recording and recovered label
    of each image.
    iteration: current iteration of the search within one restart. most: maximum number of iterations of a restart, as set for the
    attack.
    loss: median of the attack's loss over the cases that are searched together; None if it is not finite.
    version: number of the preview. It increases with every preview of a job, also when the next attack, null or attempt of the
    job begins.
    """

    images: NDArray[np.uint8]
    places: tuple[ImagePlace, ...]
    iteration: int
    most: int
    loss: float | None
    version: int


def make_preview_path(state: Path, job: str) -> Path:
    """Return the path of a job's preview in the state folder. Raises ValueError if `job` is not a valid id."""
    if re.fullmatch("[0-9a-f]{16}", job) is None:
        raise ValueError(f"{job!r} is not the id of a job: ids have 16 hexadecimal digits")
    return state / "previews" / f"{job}.safetensors"


def read(state: Path, job: str) -> Preview | None:
    """Return the preview of a running job; None if there is none, as for table rows and before a search has run for a second.

    state: the state folder of the service. Raises ValueError if `job` is not a valid id.
    """
    try:
        with safe_open(make_preview_path(state, job), framework="numpy") as file:
            about = json.loads(file.metadata()["about"])
            images = file.get_tensor("images")
    except (OSError, SafetensorError):  # not written yet, or deleted already
        return None
    return Preview(images=images, places=tuple(ImagePlace(*place) for place in about.pop("places")), **about)


class Painter:
    """Callback for intermediate results of a replay (`Replay.look`) that writes their images to the preview file `path`.

    It keeps the images of earlier calls, one for each place (round, client, batch and position), and writes the `MAX_IMAGES` that
    changed last.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._version = path, 0
        self._images: dict[tuple[int, str, int, int], tuple[NDArray[np.uint8], int]] = {}

    def __call__(self, results: Sequence[IntermediateResult], iteration: int, total: int) -> None:
        for result in results:
            if result.x.ndim == 4:
                self._take(result)
        if self._images:
            # begins at the time in microseconds, so that it is above those of earlier painters and attempts of the job
            self._version = max(self._version + 1, time.time_ns() // 1000)
            self._write(iteration, total, float(np.median([result.loss for result in results])))

    def _take(self, result: IntermediateResult) -> None:
        pixels, seen = _to_bytes(result.x), set[int]()
        for slot in result.slots:
            if slot.example not in seen:
                seen.add(slot.example)
                place = (slot.round, slot.client, slot.batch, slot.position)
                self._images.pop(place, None)  # moves the image to the end of the dictionary, whose beginning is dropped
                self._images[place] = (pixels[slot.example], int(result.y[slot.example]))
        for place in list(self._images)[:-MAX_IMAGES]:
            del self._images[place]

    def _write(self, iteration: int, total: int, loss: float) -> None:
        places = [[*place, label] for place, (_, label) in self._images.items()]
        known = loss if np.isfinite(loss) else None
        about = {"places": places, "iteration": iteration, "most": total, "loss": known, "version": self._version}
        content = save({"images": np.stack([pixels for pixels, _ in self._images.values()])}, {"about": json.dumps(about)})
        beside = self.path.with_suffix(PARTIAL_SUFFIX)
        with os.fdopen(os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        os.replace(beside, self.path)  # no fsync: after a crash of the machine the preview is useless anyway


def _to_bytes(x: Tensor) -> NDArray[np.uint8]:
    """Convert images (N, C, H, W) to (N, H, W, C) in 8 bit: clamped to [0, 1], scaled by 255 and rounded; NaN becomes 0."""
    eight = (x.detach().nan_to_num(0.0).clamp(0, 1) * 255).round().byte()
    result: NDArray[np.uint8] = eight.permute(0, 2, 3, 1).numpy()
    return result
