"""A client that trains on given examples, and what the server sees of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attacker.attacks import Case
from defenses import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode
from fedsim.training.local import train


@dataclass(frozen=True)
class LocalClient:
    """A client: a network, its weights and its training settings. `make_case` returns what the server sees for given examples."""

    model: ModelSpec
    data: DataSpec
    training: Training
    weights: Mapping[str, Tensor]

    def make_case(self, batches: Sequence[tuple[Tensor, Tensor]], key: str, defense: str = "", *, noise_seed: int = 0) -> Case:
        """Train from the client's weights, one step on each of `batches`, and return what the server sees: a case of one update.

        batches: pairs (x, y), one for each local step. For several epochs, the pairs of the first, then those of the second etc.
        key: name of the client in the case. defense: specification as in an experiment, such as "clip(4)"; "" for none.
        noise_seed: seed of the defense's randomness.
        """
        model = models.build(self.model, self.data)
        trained = train(model, self.weights, batches, self.training, self.data)
        spec = DefenseSpec.parse(defense, learning_rate=self.training.learning_rate) if defense else DefenseSpec()
        update = trained.update
        if spec.steps:
            built = spec.build()
            update, _ = built.apply(update, built.init(update), torch.Generator().manual_seed(noise_seed))
        return Case(
            (
                Observation(
                    round=1,
                    client=key,
                    cohort=(),
                    num_examples=sum(len(y) for _, y in batches) // (self.training.epochs or 1),
                    model=self.model,
                    data=self.data,
                    training=self.training,
                    defenses=spec,
                    weights=self.weights,
                    payload=encode(update, spec.choose_codec()),
                ),
            )
        )


def make_client(
    name: str,
    data: DataSpec,
    *,
    loss: str = "cross_entropy",
    seed: int = 0,
    steps: int = 1,
    batch: int = 1,
    arguments: Mapping[str, Any] | None = None,
) -> LocalClient:
    """Return a client whose network has random initial weights, drawn with `seed`.

    data: shape, number of classes and normalisation of the examples. The client holds none; they are arguments of
    `LocalClient.make_case`. loss: name of the loss function.
    name, arguments: name and arguments of the network's model. steps, batch: number of local steps, and the size of their
    batches. The client's learning rate is 1 for one step, and 0.01 for several.
    """
    spec = ModelSpec(name=name, arguments=arguments or {})
    weights = {key: p.detach() for key, p in models.build(spec, data, seed=seed).named_parameters()}
    training = Training(learning_rate=1.0 if steps == 1 else 0.01, batch_size=batch, steps=steps, loss=loss)
    return LocalClient(spec, data, training, weights)
