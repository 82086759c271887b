"""A client that trains on given examples, and what the server sees of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Generator, Tensor

from attacker.attacks import Case
from defenses import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode
from fedsim.training.local import evaluate, train
from support.contract import Options
from support.splits import Images, load_images

LocalBatch = tuple[Tensor, Tensor]
"""Examples x and labels y of one local step."""


@dataclass(frozen=True)
class LocalClient:
    """A client: its network, the weights that the server sent, and the settings of its training.

    It holds no examples; they are arguments of its methods.
    """

    model: ModelSpec
    data: DataSpec
    training: Training
    weights: Mapping[str, Tensor]

    def compute_update(self, batches: Sequence[LocalBatch]) -> dict[str, Tensor]:
        """Return the update of the client after one step on each of `batches` in turn."""
        return train(models.build(self.model, self.data), self.weights, batches, self.training, self.data).update

    def add(self, update: Mapping[str, Tensor]) -> "LocalClient":
        """Return the client with its weights plus `update`, as the server sends them in the next round."""
        return replace(self, weights={name: w + update[name] for name, w in self.weights.items()})

    def measure_accuracy(self, images: Images) -> float:
        """Return the share of `images` that the network classifies rightly."""
        model = models.build(self.model, self.data)
        return evaluate(model, self.weights, images.x, images.y, self.data, self.training)["accuracy"]

    def observe(
        self,
        update: Mapping[str, Tensor],
        number: int,
        client: str,
        cohort: tuple[str, ...],
        examples: int,
        defense: str = "",
        *,
        noise_seed: int | None = None,
    ) -> Observation:
        """Apply `defense` with a fresh state to an update or a mean of updates, and return what the server then sees.

        number: number of the round. client: name of the sender. cohort: names of the clients in the round. examples: number of
        examples behind the update. defense: specification as in an experiment, such as "clip(4)"; "" for none.
        noise_seed: seed of the defense's randomness; by default the number of the round.
        """
        spec = DefenseSpec.parse(defense, learning_rate=self.training.learning_rate)
        built = spec.build()
        rng = Generator().manual_seed(number if noise_seed is None else noise_seed)
        sent, _ = built.apply(dict(update), built.init(dict(update)), rng)
        return self.observe_sent(sent, number, client, cohort, examples, spec)

    def observe_sent(
        self, sent: Mapping[str, Tensor], number: int, client: str, cohort: tuple[str, ...], examples: int, spec: DefenseSpec
    ) -> Observation:
        """Return what the server sees of an update to which the defense `spec` has been applied already.

        The other arguments are those of `observe`.
        """
        return Observation(
            round=number,
            client=client,
            cohort=cohort,
            num_examples=examples,
            model=self.model,
            data=self.data,
            training=self.training,
            defenses=spec,
            weights=self.weights,
            payload=encode(sent, spec.choose_codec()),
        )

    def make_case(self, batches: Sequence[LocalBatch], key: str, defense: str = "", *, noise_seed: int = 0) -> Case:
        """Train, one step on each of `batches`, and return what the server sees: a case of one update.

        batches: for several epochs, the batches of the first, then those of the second etc. key: name of the client in the case.
        defense, noise_seed: as in `observe`.
        """
        examples = sum(len(y) for _, y in batches) // (self.training.epochs or 1)
        return Case((self.observe(self.compute_update(batches), 1, key, (), examples, defense, noise_seed=noise_seed),))


def make_image_cases(options: Options, network: str, count: int) -> tuple[LocalClient, list[Case], Tensor]:
    """Return a client, `count` cases of one CIFAR-10 image each, and these images (count, C, H, W)."""
    images = load_images(options, "cifar10", count)
    client = make_client(network, replace(images.data, num_classes=10), seed=options.seed)
    cases = [client.make_case([(x[None], y[None] % 10)], f"{i}") for i, (x, y) in enumerate(zip(images.x, images.y, strict=True))]
    return client, cases, images.x


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
