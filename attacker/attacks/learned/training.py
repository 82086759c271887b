"""Training of learned priors on public images, with the l1 distance and, if wanted, an adversarial loss."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from time import monotonic
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import interpolate, l1_loss, relu

from attacker.attacks.learned.degradation import add_noise, degrade
from attacker.attacks.learned.networks import PatchCritic
from attacker.attacks.learned.prior_file import PriorFacts, build_network

CHECKPOINT_SECONDS = 30.0
"""Seconds between two checkpoints."""
MIN_CROP = 0.5
"""Smallest side of a random crop, relative to the shorter side of its image. No crop is smaller than the size in training."""
ADAM_BETAS = (0.5, 0.999)
ADVERSARIAL_OF_ENHANCERS = 0.03
"""Default weight of the adversarial loss for enhancers. With the 0.01 of the other kinds, their images are more blurred."""

TrainingProgress = Callable[[int, int, str], None]
"""Callback for progress, called with (steps done, number of steps, a short text)."""


@dataclass(frozen=True, kw_only=True)
class PriorTraining:
    """The settings of a training.

    steps: number of batches. batch: images in each. learning_rate: of Adam; it falls linearly towards zero over the last half.
    adversarial: weight of the critic's judgement beside the l1 distance; 0 trains without a critic. The critic takes part from a
    quarter of the steps on; a denoiser has none, since it is to return means. divergence: weight of the mean KL divergence of a
    generator's latents from the standard normal distribution, per value of the images.
    """

    steps: int = 2000
    batch: int = 16
    learning_rate: float = 5e-4
    adversarial: float = 0.01
    divergence: float = 0.05

    def compute_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.learning_rate * min(1.0, 2 * (1 - step / self.steps))


@dataclass
class Trainer:
    """A training that can be saved and resumed.

    images: (N, 3, H, W) uint8, with sides of at least `facts.size`; ValueError otherwise.
    facts: metadata of the prior; steps, images and data_hash are filled in. Its seed determines initial weights and batches.
    labels: classes (N,) of the images, int64, for a generator of several classes; None if all are of one class, 0.
    checkpoint: file for checkpoints, which `clean_up` removes; None for none.
    """

    images: Tensor
    facts: PriorFacts
    training: PriorTraining = field(default_factory=PriorTraining)
    device: str = "cpu"
    checkpoint: Path | None = None
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        images, size = self.images, self.facts.size
        if self.labels is not None and len(self.labels) != len(images):
            raise ValueError(f"there must be one label for each image, got {len(self.labels)} for {len(images)} images")
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3 or not len(images):
            raise ValueError(f"images must be uint8 of shape (N, 3, H, W), got {images.dtype} of shape {tuple(images.shape)}")
        if min(images.shape[-2:]) < size:
            raise ValueError(
                f"images of {images.shape[-2]}x{images.shape[-1]} pixels are smaller than --size {size}; lower --size"
            )
        self.facts = replace(self.facts, steps=self.training.steps, images=len(images), data_hash=_hash_images(images))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.facts.seed)
            self.network, self.critic = build_network(self.facts).to(self.device), PatchCritic().to(self.device)
        self.optimiser, self.critics_optimiser = (
            torch.optim.Adam(module.parameters(), lr=self.training.learning_rate, betas=ADAM_BETAS)
            for module in (self.network, self.critic)
        )
        self.done = 0

    def run(self, progress: TrainingProgress | None = None) -> nn.Module:
        """Train to the last step, from the checkpoint if there is one, and return the network, which is still in training mode.

        After Ctrl-C, KeyboardInterrupt is raised, and the state is saved first if `checkpoint` names a file. Raises ValueError if
        the checkpoint is of a training with other images or settings, or is damaged.
        """
        self._load()
        saved = monotonic()
        try:
            while self.done < self.training.steps:
                loss = self._take_step()
                self.done += 1
                if progress is not None:
                    progress(self.done, self.training.steps, f"l1 {loss:.4f}")
                if monotonic() - saved > CHECKPOINT_SECONDS:
                    self._save()
                    saved = monotonic()
        except KeyboardInterrupt:
            self._save()
            raise
        return self.network

    def clean_up(self) -> None:
        """Remove the checkpoint file if there is one; to be called once the result is written."""
        if self.checkpoint is not None:
            self.checkpoint.unlink(missing_ok=True)

    def _take_step(self) -> float:
        """Train on one batch and return its l1 distance before the step."""
        settings, rng = self.training, Generator().manual_seed(_hash_seed(self.facts.seed, self.done))
        for optimiser in (self.optimiser, self.critics_optimiser):
            for group in optimiser.param_groups:
                group["lr"] = settings.compute_rate(self.done)
        rows = draw_rows(self.images, settings.batch, rng)
        clean = crop_at_random(self.images, rows, self.facts.size, rng).to(self.device)
        output, penalty = self._apply(clean, rows, rng)
        distance = l1_loss(output, clean)
        loss = distance + penalty
        if settings.adversarial and self.facts.kind != "denoiser" and self.done >= settings.steps // 4:
            self._train_critic(clean, output.detach())
            loss = loss - settings.adversarial * self.critic(output).mean()
        self.optimiser.zero_grad()
        torch.autograd.backward(loss)
        self.optimiser.step()
        return float(distance.detach())

    def _apply(self, clean: Tensor, rows: Tensor, rng: Generator) -> tuple[Tensor, Tensor | float]:
        """Return the network's images for the batch `clean`, and a penalty that is added to their l1 distance from `clean`.

        An enhancer is given degraded images, a denoiser noisy ones, all others the images themselves. Only a generator has a
        penalty: the KL divergence of its latents, times `PriorTraining.divergence`. clean: images (B, 3, size, size). rows: their
        indices in `images`.
        """
        if self.facts.kind == "generator":
            labels = torch.zeros(len(rows), dtype=torch.long) if self.labels is None else self.labels[rows]
            output, divergence = self.network(clean, labels.to(self.device), rng)
            return output, self.training.divergence * divergence
        if self.facts.kind == "enhancer":
            return self.network(degrade(clean.cpu(), rng).to(self.device)), 0.0
        return self.network(add_noise(clean, rng) if self.facts.kind == "denoiser" else clean), 0.0

    def _train_critic(self, real: Tensor, generated: Tensor) -> None:
        loss = relu(1 - self.critic(real)).mean() + relu(1 + self.critic(generated)).mean()
        self.critics_optimiser.zero_grad()
        torch.autograd.backward(loss)
        self.critics_optimiser.step()

    @property
    def _identity(self) -> str:
        """Hash of metadata (with the hash of the images), settings and labels. A checkpoint of another hash raises ValueError."""
        labels = None if self.labels is None else self.labels.tolist()
        return hashlib.sha256(repr((asdict(self.facts), asdict(self.training), labels)).encode()).hexdigest()

    @property
    def _parts(self) -> dict[str, Any]:
        named = (self.network, self.critic, self.optimiser, self.critics_optimiser)
        return dict(zip(("network", "critic", "optimiser", "critics_optimiser"), named, strict=True))

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        state = {name: part.state_dict() for name, part in self._parts.items()}
        temporary = self.checkpoint.with_name(self.checkpoint.name + ".new")
        torch.save({**state, "done": self.done, "identity": self._identity}, temporary)
        temporary.replace(self.checkpoint)

    def _load(self) -> None:
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"{self.checkpoint} is cut off or damaged, so that the training cannot be continued; remove it to begin anew"
            ) from error
        if state["identity"] != self._identity:
            raise ValueError(
                f"{self.checkpoint} is of a training with other images or settings; repeat the command of that training, "
                "give another --out, or remove this file to begin anew"
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.done = state["done"]


def draw_rows(images: Tensor, count: int, rng: Generator) -> Tensor:
    """Return the indices (count,) of random images; one may occur several times."""
    return torch.randint(len(images), (count,), generator=rng)


def crop_at_random(images: Tensor, rows: Tensor, size: int, rng: Generator) -> Tensor:
    """Return one random square crop of each of the images (N, 3, H, W), uint8, with the indices `rows`.

    Crops are shrunk to `size`, with values in [0, 1]. The side of a crop is drawn between the larger of `size` and MIN_CROP times
    the image's shorter side, and that shorter side. Each crop is mirrored horizontally with probability 1/2.
    """
    crops = []
    for i in rows.tolist():
        height, width = images.shape[-2:]
        shorter = min(height, width)
        minimum = max(size, round(MIN_CROP * shorter))
        side = minimum + int(torch.randint(shorter - minimum + 1, (), generator=rng))
        top, left = (int(torch.randint(length - side + 1, (), generator=rng)) for length in (height, width))
        crop = images[i : i + 1, :, top : top + side, left : left + side].float() / 255
        if side != size:
            crop = interpolate(crop, size=(size, size), mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)
        crops.append(crop.flip(-1) if bool(torch.rand((), generator=rng) < 0.5) else crop)
    return torch.cat(crops)


def _hash_images(images: Tensor) -> str:
    """Return the SHA-256 of the shape and the bytes of images, as hexadecimal digits."""
    return hashlib.sha256(str(tuple(images.shape)).encode() + images.contiguous().numpy().tobytes()).hexdigest()


def _hash_seed(seed: int, step: int) -> int:
    """Return the seed of one training step's random numbers, computed from the training's seed and the step's number."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:8], "big") >> 1
