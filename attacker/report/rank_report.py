"""Arguments and output of `attacker rank`: how many values of its input the gradient of one example determines in a network."""

from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from attacker.attacks.closed_form.rank.analysis import MAX_PROVED_UNKNOWNS, RankReport, analyse_rank
from attacker.attacks.closed_form.rank.verdict import write_headline, write_verdict
from attacker.attacks.networks.chain import Chain, Layer, NotAChain, read_chain
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

__all__ = [
    "analyse_chain",
    "check_picture",
    "describe_layer",
    "draw",
    "load_chain",
    "make_table",
    "parse_shape",
    "to_json",
    "write_headline",
    "write_verdict",
]


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse the shape of one input: `3x32x32` (channels, height, width), or `30` (columns of a table row).

    Raises ValueError unless the text is one or three positive whole numbers.
    """
    parts = text.lower().split("x")
    if len(parts) not in (1, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--input {text!r}: write 3x32x32 (channels, height, width) for images, or 30 for table rows")
    return tuple(map(int, parts))


def check_picture(path: Path) -> None:
    """Raise ValueError if `path` does not end in .png, .svg or .pdf, or if its folder does not exist."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--out {path}: a picture's name ends in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.absolute().parent}")


def load_chain(model: str, shape: tuple[int, ...], classes: int, arguments: dict[str, Any]) -> Chain:
    """Return a network as a chain: a sequence of layers, each of which takes the output of the one before it.

    model: name of a built-in model, or `module:function`, which is imported. shape: shape of one input. classes: number of
    classes. arguments: arguments of the model.

    Raises ValueError if there is no such model or it does not fit the shape, and RuntimeError with the reason if attacks with a
    closed form do not support it, as with residual connections, max pooling and normalisation.
    """
    if ":" in model:
        models.admit(model)
    network = models.build_layout(ModelSpec(name=model, arguments=arguments), DataSpec(shape=shape, num_classes=classes))
    try:
        return read_chain(network, shape)
    except NotAChain as reason:
        raise RuntimeError(
            f"attacks that solve linear equations layer by layer do not support the network {model}: {reason}; choose another one"
        ) from reason


def analyse_chain(chain: Chain, *, dead: float, prove: bool) -> RankReport:
    """Analyse how many values of each layer's input the gradient of one example determines.

    dead: assumed share, in [0, 1), of outputs that are 0 after a ReLU and therefore give no equation. prove: whether to compute
    the rank by elimination for layers whose gradient leaves at most `MAX_PROVED_UNKNOWNS` unknowns open, instead of only counting
    equations. Raises RuntimeError with the reason if a layer cannot be analysed, and ValueError for `dead` out of range.
    """
    try:
        return analyse_rank(chain, dead=dead, prove=MAX_PROVED_UNKNOWNS if prove else 0)
    except NotAChain as reason:
        raise RuntimeError(str(reason)) from reason


def draw(report: RankReport, chain: Chain, path: Path, *, title: str) -> None:
    """Write a picture of the chain and its rank analysis as PNG, SVG or PDF, depending on the suffix of `path`.

    title: text above the picture.
    """
    from attacker.report.chain_figure import write_chain_picture

    write_chain_picture(
        report, [describe_layer(layer) for layer in chain.layers], path, title=title, verdict=write_headline(report)
    )


def to_json(report: RankReport, model: str) -> dict[str, Any]:
    """Return the results of the analysis as a dict of values for JSON. model: name of the network, which the dict repeats."""
    return {
        "model": model,
        "full": report.full,
        "locally_unique": report.locally_unique,
        "undetermined": report.undetermined,
        "unused": report.unused,
        "index": report.index,
        "critical": report.layers[report.critical].name,
        "headline": write_headline(report),
        "verdict": write_verdict(report),
        "dead": report.dead,
        "layers": [{**asdict(one), "missing": one.missing, "dependent": one.dependent} for one in report.layers],
    }


def make_table(report: RankReport, chain: Chain) -> Table:
    """Return a table with one row per layer; the critical layer, which lacks the most equations, is red.

    If several layers lack equally many equations, the critical one has the largest RA. The columns are the layer's name, its
    description, and fields of `LayerRank`:

    unknowns: number of values of the layer's input. gradient, weight, virtual: numbers of constraints on them, as R-GAP (Zhu and
    Blaschko 2021, section 4) counts them; virtual ones are further constraints from earlier layers. RA: R-GAP's index, the
    unknowns minus these three numbers. rank: number of independent equations; "≤" marks an upper bound found by counting, "~" a
    rank that depends on the data. missing: number of missing equations.
    """
    made = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    made.add_column("layer", overflow="fold")
    made.add_column("what", overflow="fold", min_width=8)
    for title in ("unknowns", "gradient", "weight", "virtual", "RA", "rank", "missing"):
        made.add_column(title, justify="right", no_wrap=True)
    for i, (one, layer) in enumerate(zip(report.layers, chain.layers, strict=True)):
        numbers = (one.unknowns, one.gradients, one.weights, one.virtual, one.index)
        made.add_row(
            escape(one.name),
            escape(describe_layer(layer)),
            *(f"{number:,}" for number in numbers),
            f"{'' if one.proved else '≤' if one.counted else '~'}{one.rank:,}",
            Text(f"{one.missing:,}" if one.missing else "", style="bold red"),
            style="red" if i == report.critical else "",
        )
    return made


def describe_layer(layer: Layer) -> str:
    """Return a layer's type and sizes as short text, such as "conv 16 3x3 /2 pad 1" or "linear 10".

    In these examples, the convolution has 16 output channels, a kernel of 3x3, stride 2 and padding 1, and the linear layer has
    10 outputs. "pooled" is added if values are averaged before or after a convolution.
    """
    if layer.kernel is None:
        return f"linear {layer.shape[0]}"
    words = [f"conv {layer.shape[0]}", _format_sides(layer.kernel)]
    words += [f"/{_format_sides(layer.stride, short=True)}"] * (layer.stride != (1, 1))
    words += [f"pad {_format_sides(layer.padding, short=True)}"] * (layer.padding != (0, 0))
    words += [f"dilation {_format_sides(layer.dilation, short=True)}"] * (layer.dilation != (1, 1))
    pooled = prod(layer.inputs) != prod(layer.taken) or prod(layer.given) != prod(layer.outputs)
    return " ".join(words + ["pooled"] * pooled)


def _format_sides(sides: tuple[int, int], *, short: bool = False) -> str:
    return str(sides[0]) if short and sides[0] == sides[1] else f"{sides[0]}x{sides[1]}"
