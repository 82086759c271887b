"""A federation of one client, whose global model can also be trained on other images between its rounds."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from support.contract import Options
from support.single_cases import make_client
from support.splits import Images, load_images

from fedsim.recording import DataSpec, Observation, Training


class ResNetFederation:
    """A federation of one client, which makes one step per round. Its weights are the global ones.

    name: of the network, which has random weights at first; by default ResNet20-4, a ResNet-20 of four times the width.
    """

    def __init__(self, options: Options, data: DataSpec, *, name: str = "resnet20_4") -> None:
        training = Training(learning_rate=1e-4, batch_size=1, steps=1)
        self.client = replace(make_client(name, data, seed=options.seed), training=training)

    def observe_client(self, images: Images, rows: Sequence[int], *, round: int) -> Observation:
        """Return what the server receives after the client's step on one batch from the present global weights.

        The global weights stay as they are. rows: indices in `images` of the images of the batch; these indices are
        appended to the client's name.
        """
        client = replace(self.client, training=replace(self.client.training, batch_size=len(rows)))
        update = client.compute_update([(images.x[list(rows)], images.y[list(rows)])])
        return client.observe(update, round, f"client-{'-'.join(map(str, rows))}", (), len(rows))

    def train(self, options: Options, steps: int, apart: Images, *, batch: int = 16, learning_rate: float = 0.01) -> None:
        """Train the global weights by `steps` steps on images that are not in `apart`.

        The images are CIFAR-100's if the network has 100 classes, otherwise CIFAR-10's, with labels modulo the number of classes.
        Without these files in --data, they are embedded photographs. batch: number of images per step.
        """
        classes = self.client.data.num_classes
        pool = load_images(options, "cifar100" if classes == 100 else "cifar10", 16 * batch + 7)
        others = pool.of([i for i, x in enumerate(pool.x) if not (apart.x == x).flatten(1).all(dim=1).any()])
        rng = torch.Generator().manual_seed(options.seed + 1)
        chosen = [torch.randint(len(others), (batch,), generator=rng).tolist() for _ in range(steps)]
        batches = [(others.x[rows], others.y[rows] % classes) for rows in chosen]
        training = Training(learning_rate=learning_rate, batch_size=batch, steps=steps)
        self.client = self.client.add(replace(self.client, training=training).compute_update(batches))
