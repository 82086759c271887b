"""A federation of one client, whose global model can also be trained on other images between its rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from support.contract import Options
from support.single_cases import LocalClient
from support.splits import Images, load_images
from torch import Tensor

from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.training.local import train


class ResNetFederation:
    """A federation of one client, which makes one step per round with `learning_rate`; `weights` are the global ones.

    name: of the network, which has random weights at first; by default ResNet20-4, a ResNet-20 of four times the width.
    """

    def __init__(self, options: Options, data: DataSpec, *, learning_rate: float = 1e-4, name: str = "resnet20_4") -> None:
        self.spec, self.data, self.learning_rate = ModelSpec(name=name), data, learning_rate
        self.model = models.build(self.spec, data, seed=options.seed)
        self.weights: Mapping[str, Tensor] = {key: p.detach().clone() for key, p in self.model.named_parameters()}

    def observe_client(self, found: Images, rows: Sequence[int], *, round: int) -> Observation:
        """Return what the server receives after the client's step on one batch from the present global weights.

        The global weights stay as they are. rows: indices in `found` of the images of the batch; these indices are
        appended to the client's name.
        """
        training = Training(learning_rate=self.learning_rate, batch_size=len(rows), steps=1)
        client = LocalClient(self.spec, self.data, training, self.weights)
        batch = found.x[list(rows)], found.y[list(rows)]
        (observation,) = client.make_case([batch], f"client-{'-'.join(map(str, rows))}").observations
        return replace(observation, round=round)

    def train(self, options: Options, steps: int, apart: Images, *, batch: int = 16, learning_rate: float = 0.01) -> None:
        """Train the global weights by `steps` steps on images that are not in `apart`, and store the result in `weights`.

        The images are CIFAR-100's if the network has 100 classes, otherwise CIFAR-10's, with labels modulo the number of classes.
        Without these files in --data, they are embedded photographs. batch: number of images per step.
        """
        pool = load_images(options, "cifar100" if self.data.num_classes == 100 else "cifar10", 16 * batch + 7)
        others = pool.of([i for i, x in enumerate(pool.x) if not (apart.x == x).flatten(1).all(dim=1).any()])
        rng = torch.Generator().manual_seed(options.seed + 1)
        chosen = [torch.randint(len(others), (batch,), generator=rng).tolist() for _ in range(steps)]
        batches = [(others.x[rows], others.y[rows] % self.data.num_classes) for rows in chosen]
        training = Training(learning_rate=learning_rate, batch_size=batch, steps=steps)
        update = train(self.model, self.weights, batches, training, self.data).update
        self.weights = {name: w + update[name] for name, w in self.weights.items()}
