"""The columns of figures 3 and 8 of ROG (Yue et al. 2022), each a defense of a client, and the updates that they lead to."""

from dataclasses import dataclass

import torch
from support.splits import Images
from torch import Tensor
from torch.nn.functional import interpolate

from attacker.attacks import Case
from defenses import DefenseSpec
from defenses.gradients import GradientSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode
from fedsim.training.local import train

CLASSES = 1000
"""Classes of the network's head, as in ImageNet."""


@dataclass(frozen=True)
class DefendedColumn:
    """One column of the figures: one defense, or none.

    defense, rule, network: the specification of the defense stands in the field for its kind, and the others are "". A `defense`
    changes the update before it is sent, a `rule` the computation of gradients, `network` the network.
    paper: LPIPS (a distance, lower is better) that the paper gives for its attack ROG; None for a defense that is not in it.
    is_equalized: whether images are also measured after `enhancer.equalize`, as the paper treats them in this column.
    tv: weight of the total variation in Inverting Gradients, which is that of ROG, see `rog.SIGN_FACTOR`.
    cost: approximate CPU-seconds of all attacks on this column, by which columns are ordered.
    """

    name: str
    defense: str = ""
    rule: str = ""
    network: str = ""
    paper: float | None = None
    tv: float = 1e-2
    cost: float = 0.0
    is_equalized: bool = False

    @property
    def table(self) -> str:
        """The first word of the name, which selects the column."""
        return self.name.split(",")[0].split(" ")[0]


COLUMNS = (
    DefendedColumn("raw", paper=0.210, cost=115),
    DefendedColumn("uniform, 3 bits", defense="rog_uniform(3)", paper=0.213, cost=190),
    DefendedColumn("QSGD, 3 bits", defense="rog_qsgd(3)", paper=0.215, cost=95),
    DefendedColumn("top-k, 5 % sent", defense="rog_top_k(0.95)", paper=0.237, cost=115),
    DefendedColumn("sign", defense="sign()", paper=0.347, tv=2e-2, cost=170, is_equalized=True),
    DefendedColumn("Soteria, 80 %", rule="soteria(0.8)", paper=0.180, cost=100),
    DefendedColumn("PRECODE", network="precode()", paper=0.307, cost=120),
    DefendedColumn("Fed-CDP, 0 dB", rule="fed_cdp(4, snr_db=0)", paper=0.376, cost=140),
)
"""The columns of figure 3 and figure 8 of the paper."""
OTHER_COLUMNS = (
    DefendedColumn("DGC, 5 % sent", defense="dgc(0.05)"),
    DefendedColumn("uniform-code, 5 bits", defense="rog_uniform(5)", paper=0.213),
)
"""Columns that are not in the figures, and run only if they are selected. DGC is in the first round of its client. The paper's
text has a uniform quantiser of 3 bits, the settings of its code one of 5 (`quant_level` 16)."""


@dataclass(frozen=True, kw_only=True)
class BatchSetting:
    """The network, the side of its images in pixels, and the training: full-batch epochs, and their learning rate."""

    model: str = "lenet_rog"
    side: int = 64
    epochs: int = 5
    learning_rate: float = 5e-3


def resize(images: Images, side: int) -> Tensor:
    """Return square images resized to (N, C, side, side) by bicubic interpolation, in [0, 1]; unchanged if they have this side.

    When images are shrunk, a low-pass filter is applied.
    """
    if images.x.shape[-1] == side:
        return images.x
    return interpolate(images.x, size=(side, side), mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)


def observe(
    column: DefendedColumn, setting: BatchSetting, x: Tensor, y: Tensor, *, key: str, seed: int, classes: int = CLASSES
) -> Case:
    """Return what the server sees of a client that trains on all examples as one batch, with the defense of the column.

    x, y: examples (N, *shape) and labels (N,). key: name of the client. seed: of the initial weights and the defense's
    randomness. classes: of the network's head.
    """
    data = DataSpec(shape=tuple(x.shape[1:]), num_classes=classes)
    spec = ModelSpec(name=setting.model, network=column.network)
    model = models.build(spec, data, seed=seed)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = Training(learning_rate=setting.learning_rate, batch_size=len(x), steps=None, epochs=setting.epochs, mode="eval")
    rule, defense = GradientSpec.parse(column.rule), DefenseSpec.parse(column.defense)
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # random blocks of a network draw from the global generator
    update = train(model, weights, [(x, y)] * setting.epochs, training, data, rule=rule.build(), rng=rng).update
    if defense.steps:
        built = defense.build()
        update, _ = built.apply(update, built.init(update), rng)
    observation = Observation(
        round=1,
        client=key,
        cohort=(),
        num_examples=len(x),
        model=spec,
        data=data,
        training=training,
        defenses=defense,
        gradient=rule,
        weights=weights,
        payload=encode(update, defense.choose_codec()),
    )
    return Case((observation,))
