"""Settings of the clients' local training, such as the learning rate. They are public, so that attacks know them."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from fedsim.recording.field_types import adopt_types

OPTIMISERS = ("sgd", "adam", "adamw")
MAX_STEPS = 10**7
"""Largest value of `batch_size`, `steps`, `epochs`, `accumulation` and `examples`, and of the number of steps of a round."""
MIN_FLOAT, MAX_FLOAT = 1e-38, 1e38
"""Smallest and largest learning rate; float32 holds no more.

`MAX_FLOAT` also limits `weight_decay`, `eps`, `round_decay`, `clip_norm` and the factors of `schedule`.
"""
PRECISIONS = ("float32", "bfloat16", "float16")


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the clients' local training, with either `steps` or `epochs` per round. Raises ValueError for invalid values.

    steps:     optimiser steps per round. The next round continues with the next batches of the client's epoch.
    epochs:    passes over the client's data per round (FedAvg).
    optimiser: sgd, adam or adamw, as in torch.optim, with a new state in each round. momentum, nesterov: for sgd. betas, eps: for
               adam and adamw.
    weight_decay: as in torch.optim.
    schedule:  factors of the learning rate at the local steps 1, 2, ... of each round; the last factor applies to all further
               steps. Empty for a constant rate.
    round_decay: factor by which the learning rate is multiplied after each round.
    accumulation: number of batches of `batch_size` whose mean gradient makes one optimiser step.
    clip_norm: largest L2 norm of a step's gradient (torch.nn.utils.clip_grad_norm_); None for no limit.
    shuffle:   whether the client draws a new order of its examples for every epoch.
    drop_last: whether an epoch's last batch is left out if it has fewer than `batch_size` examples.
    loss:      cross_entropy with one logit per class, or logistic with a single logit for two classes.
    mode:      mode of the model while the client trains: train or eval. unstated (the default) stands for eval; `record()`,
               `fedsim import` and `fedsim run` refuse it for networks that compute differently in the two modes (batch norm,
               dropout).
    buffers:   treatment of batch-norm statistics. none: they keep their initial values. shared: the server sends them with the
               weights, clients send theirs back, and the server averages them. local: each client keeps its own.
    frozen:    names of parameters that are not trained, with * as wildcard; for example the base weights of a LoRA.
    precision: type that clients compute in; bfloat16 and float16 stand for automatic mixed precision.
    augmentation: the user's words on how clients augment examples, such as "random crop and flip"; "" for no augmentation.
    examples:  number of distinct examples behind each update, in place of the numbers that clients report; None to use these.
    """

    learning_rate: float
    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: tuple[float, ...] = ()
    round_decay: float = 1.0
    accumulation: int = 1
    clip_norm: float | None = None
    shuffle: bool = True
    drop_last: bool = False
    loss: Literal["cross_entropy", "logistic"] = "cross_entropy"
    mode: Literal["train", "eval", "unstated"] = "unstated"
    buffers: Literal["none", "shared", "local"] = "none"
    frozen: tuple[str, ...] = ()
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    augmentation: str = ""
    examples: int | None = None

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        adopt_types(self, "training.")
        require(self.learning_rate > 0, f"training.learning_rate must be positive, got {self.learning_rate}")
        require(
            MIN_FLOAT <= self.learning_rate <= MAX_FLOAT,
            f"training.learning_rate must be {MIN_FLOAT} to {MAX_FLOAT}, as float32 holds, got {self.learning_rate}",
        )
        require((self.steps is None) != (self.epochs is None), "training needs either steps or epochs; give exactly one of them")
        whole = {
            "batch_size": self.batch_size,
            "steps": self.steps,
            "epochs": self.epochs,
            "accumulation": self.accumulation,
            "examples": self.examples,
        }
        for key, value in whole.items():
            require(value is None or value > 0, f"training.{key} must be positive, got {value}")
            require(value is None or value <= MAX_STEPS, f"training.{key} must be 1 to {MAX_STEPS}, got {value}")
        require(0 <= self.momentum < 1, f"training.momentum must be in [0, 1), got {self.momentum}")
        require(self.weight_decay >= 0, f"training.weight_decay must not be negative, got {self.weight_decay}")
        require(self.weight_decay <= MAX_FLOAT, f"training.weight_decay must be {MAX_FLOAT} at most, got {self.weight_decay}")
        losses = ("cross_entropy", "logistic")
        require(self.loss in losses, f"unknown training.loss {self.loss!r}. Known: {', '.join(losses)}")
        require(self.mode in ("train", "eval", "unstated"), f"training.mode must be 'train' or 'eval', got {self.mode!r}")
        require(
            self.buffers in ("none", "shared", "local"), f"training.buffers must be none, shared or local, got {self.buffers!r}"
        )
        self._check_optimiser()

    def _check_optimiser(self) -> None:
        for key, word, known in (("optimiser", self.optimiser, OPTIMISERS), ("precision", self.precision, PRECISIONS)):
            require(word in known, f"unknown training.{key} {word!r}. Known: {', '.join(known)}")
        require(
            self.optimiser == "sgd" or not self.momentum, f"training.momentum is for sgd; {self.optimiser} has training.betas"
        )
        require(not self.nesterov or self.momentum > 0, "training.nesterov needs a momentum above 0")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"training.betas must be two numbers in [0, 1), got {self.betas}",
        )
        for key, value in (("eps", self.eps), ("round_decay", self.round_decay), ("clip_norm", self.clip_norm)):
            require(value is None or value > 0, f"training.{key} must be positive, got {value}")
            require(value is None or value <= MAX_FLOAT, f"training.{key} must be {MAX_FLOAT} at most, got {value}")
        good = all(0 <= factor <= MAX_FLOAT for factor in self.schedule) and (not self.schedule or self.schedule[0] > 0)
        require(good, f"training.schedule must hold factors of at least 0, the first above 0, got {self.schedule}")

    @property
    def step_size(self) -> int:
        """Return the number of examples of one optimiser step with full batches: `batch_size * accumulation`."""
        return self.batch_size * self.accumulation

    @property
    def is_linear(self) -> bool:
        """Return whether the optimiser is sgd, with or without momentum, and no gradient is clipped (`clip_norm` is None).

        Each step is then a weighted sum of the round's gradients so far, plus a term of the weights if there is weight decay.
        """
        return self.optimiser == "sgd" and self.clip_norm is None

    @property
    def decay(self) -> float:
        """Return the factor c of the weights in a round's first step, `weights -= r * (direction + c * weights)`.

        r is positive: the learning rate or, with Nesterov momentum, a multiple of it. For sgd, the direction is the gradient, and
        c is `weight_decay`. For adamw, the direction is Adam's normalised gradient, and c is `weight_decay`. For adam, the
        direction is Adam's normalisation of `gradient + weight_decay * weights`, so that c is 0.
        """
        return 0.0 if self.optimiser == "adam" else self.weight_decay

    def compute_rate(self, step: int) -> float:
        """Return a local step's learning rate by `schedule`, steps from 0. `fix_round` applies `round_decay`."""
        return self.learning_rate * (self.schedule[min(step, len(self.schedule) - 1)] if self.schedule else 1.0)

    def fix_round(self, number: int) -> "Training":
        """Return the settings for the round `number` (from 1): `round_decay` is applied to the learning rate, and then set to 1.

        The learning rate is clamped to `MIN_FLOAT` .. `MAX_FLOAT`, about the range of float32.
        """
        if self.round_decay == 1:
            return self
        try:
            rate = self.learning_rate * self.round_decay ** (number - 1)
        except OverflowError:
            rate = MAX_FLOAT
        return replace(self, learning_rate=min(max(rate, MIN_FLOAT), MAX_FLOAT), round_decay=1.0)

    def is_frozen(self, name: str) -> bool:
        """Return whether the parameter `name` matches a pattern of `frozen`, so that it is not trained."""
        return any(fnmatchcase(name, pattern) for pattern in self.frozen)

    def count_step_examples(self, num_examples: int) -> tuple[int, ...] | None:
        """Return the number of examples of each optimiser step of one round, in order; None if unknown.

        num_examples: number of distinct examples that the client trains on in the round, see `count_examples`.
        With `epochs`, each epoch is divided into steps of `step_size` examples and one with the rest; with `drop_last`, examples
        that do not fill a batch are left out. With `steps`, the numbers are known for a single step, or if `num_examples` is
        `steps * step_size`. Raises ValueError if there would be more than `MAX_STEPS` steps.
        """
        if self.epochs is not None:
            if self.drop_last:
                num_examples -= num_examples % self.batch_size
            full, rest = divmod(num_examples, self.step_size)
            if (full + 1) * self.epochs > MAX_STEPS:
                raise ValueError(
                    f"{num_examples:,} examples, as the client reported, would be more than {MAX_STEPS:,} local steps of "
                    f"{self.step_size}; if the number is wrong, set training.examples"
                )
            return ((self.step_size,) * full + ((rest,) if rest else ())) * self.epochs
        assert self.steps is not None
        if num_examples == self.steps * self.step_size:
            return (self.step_size,) * self.steps
        return (num_examples,) if self.steps == 1 else None

    def count_examples(self, reported: int | None) -> int | None:
        """Return the number of distinct examples behind an update, given the number that the client reports, if any.

        If the setting `examples` is given, the result is this setting. If it is not given and nothing is reported, the result is
        None. With `steps`, the result is the reported number, at most `steps * step_size`; if an epoch ends within the round,
        some examples may be used twice, so that the true number is lower. With `epochs`, the result is the reported number; with
        `drop_last` only the examples that fill whole batches count, or all if they fill no batch.
        """
        if self.examples is not None:
            return self.examples
        if reported is None:
            return None
        if self.steps is not None:
            return min(reported, self.steps * self.step_size)
        used = reported - reported % self.batch_size if self.drop_last else reported
        return used or reported

    def list_beliefs(self) -> list[str]:
        """Return sentences on what attacks assume about every update, to be confirmed by the user.

        One states the number of examples, one the local steps (optimiser, learning rate, mode); the sentences of `list_limits`
        follow.
        """
        return [self._describe_amount(), self._describe_steps(), *self.list_limits()]

    def _describe_amount(self) -> str:
        size = f"{self.batch_size}" if self.accumulation == 1 else f"{self.batch_size} x {self.accumulation} accumulated"
        if self.examples is not None:
            return f"examples behind an update: {self.examples}, as training.examples states, whatever clients report"
        if self.steps is not None:
            steps = f"{self.steps} step{'s' * (self.steps != 1)}"
            return (
                f"examples behind an update: at most {self.steps * self.step_size} ({steps} of {size}), fewer where a client "
                "reports fewer; where it reports none, attacks estimate the number from the update; set training.examples if "
                "that is wrong"
            )
        left = ", without an epoch's last batch where it is not full (drop_last)" if self.drop_last else ""
        return (
            f"examples behind an update: as many as the client reports{left}, in batches of {size}, {self.epochs} "
            f"time{'s' * (self.epochs != 1)}; "
            "where it reports none, attacks estimate the number from the update; set training.examples if that is wrong"
        )

    def _describe_steps(self) -> str:
        name = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[self.optimiser]
        parts = [f"learning rate {self.learning_rate:g}"]
        parts += [f"momentum {self.momentum:g}{' (Nesterov)' * self.nesterov}"] if self.momentum else []
        parts += [f"weight decay {self.weight_decay:g}"] if self.weight_decay else []
        parts += [f"gradients clipped to {self.clip_norm:g}"] if self.clip_norm is not None else []
        parts += ["a schedule of the learning rate"] if self.schedule else []
        return f"each step: {name} with {', '.join(parts)}, the network in mode {'train' if self.mode == 'train' else 'eval'!r}"

    def list_limits(self) -> list[str]:
        """Return one sentence for each setting that makes attacks harder or less exact; empty if there is none.

        These settings are the optimisers adam and adamw, a `precision` other than float32, and an `augmentation`.
        """
        limits = []
        if self.optimiser != "sgd":
            limits.append(
                f"{self.optimiser} makes updates that hold little more than the signs of gradients: attacks match the signs, "
                "closed forms fail, and inferred labels are often wrong"
            )
        if self.precision != "float32":
            limits.append(f"clients compute in {self.precision} and attacks in float32: the difference acts as noise")
        if self.augmentation:
            limits.append(f"clients augment their examples ({self.augmentation}): attacks find the augmented examples")
        return limits
