"""The attacked clients of systematic.py: one step, or several, on a batch, through a defense of the batch's gradient."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from support.single_cases import make_client
from support.splits import Images

from attacker.attacks import Case
from fedsim.recording import Training

RATE, LOCAL_RATE = 1.0, 0.01
"""Learning rate of an attacked client with one step, whose update is the gradient up to its sign, on which defenses act as in the
paper; and learning rate with several steps."""


def count_local_steps(defense: str) -> int:
    """Return the number of local steps of a client: more than 1 if `defense` is, for example, "3 local steps"."""
    return int(defense.split()[0]) if defense.endswith("local steps") else 1


def get_defense(defense: str) -> str:
    """Return the specification of a defense as `DefenseSpec.parse` takes it; "" for none and for local steps."""
    return "" if defense == "none" or count_local_steps(defense) > 1 else defense


def make_cases(name: str, arguments: Mapping[str, Any], images: Images, defense: str, batch: int, *, seed: int = 0) -> list[Case]:
    """Return one case per batch of images, each with one update of a different client.

    name, arguments: of the network, whose weights are drawn with `seed`. batch: number of images in each batch.
    """
    steps = count_local_steps(defense)
    training = Training(learning_rate=RATE if steps == 1 else LOCAL_RATE, batch_size=batch, epochs=steps)
    client = replace(make_client(name, images.data, arguments=arguments, seed=seed), training=training)
    cases = []
    for i, (x, y) in enumerate(zip(images.x.split(batch), images.y.split(batch), strict=True)):
        update = client.compute_update([(x, y)] * steps)
        cases.append(Case((client.observe(update, i + 1, f"c{i}", (), len(y), get_defense(defense)),)))
    return cases
