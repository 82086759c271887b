"""Observations made from updates."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from defenses import DefenseSpec
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode


def make_observation(
    update: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    model: ModelSpec,
    data: DataSpec,
    training: Training,
    defense: str = "",
    client: str = "c",
    **facts: Any,
) -> Observation:
    """Return what the server sees of an update, by default that of the only client of the first round.

    defense: what the client declares; `update` is sent as it is given.
    facts:   other fields of the observation. By default, the prescribed steps decide the number of examples.
    """
    spec = DefenseSpec.parse(defense)
    fields = {"round": 1, "cohort": (client,), "num_examples": training.batch_size * (training.steps or 1), **facts}
    return Observation(
        client=client,
        model=model,
        data=data,
        training=training,
        defenses=spec,
        weights=dict(weights),
        payload=encode(dict(update), spec.choose_codec()),
        **fields,
    )
