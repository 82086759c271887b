"""Arguments and output of `attacker rank`: how many values of its input the gradient of one example determines in a network."""

from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from attacker.attacks.closed_form.rank.analysis import MAX_PROVED_UNKNOWNS, RankReport, analyse_rank
from attacker.attacks.networks.chain import Chain, read_chain
from attacker.attacks.networks.layers import Layer
from attacker.attacks.networks.traced import NotAChain
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec


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
    from attacker.commands.rank_figure import write_chain_picture

    write_chain_picture(
        report, [_describe_layer(layer) for layer in chain.layers], path, title=title, verdict=write_headline(report)
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
        "layers": [{**asdict(rank), "missing": rank.missing, "dependent": rank.dependent} for rank in report.layers],
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
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    table.add_column("what", overflow="fold", min_width=8)
    for title in ("unknowns", "gradient", "weight", "virtual", "RA", "rank", "missing"):
        table.add_column(title, justify="right", no_wrap=True)
    for i, (rank, layer) in enumerate(zip(report.layers, chain.layers, strict=True)):
        numbers = (rank.unknowns, rank.gradients, rank.weights, rank.virtual, rank.index)
        table.add_row(
            escape(rank.name),
            escape(_describe_layer(layer)),
            *(f"{number:,}" for number in numbers),
            f"{'' if rank.proved else '≤' if rank.counted else '~'}{rank.rank:,}",
            Text(f"{rank.missing:,}" if rank.missing else "", style="bold red"),
            style="red" if i == report.critical else "",
        )
    return table


def _describe_layer(layer: Layer) -> str:
    """Return a layer's type and sizes as short text, such as "conv 16 3x3 /2 pad 1" or "linear 10".

    In these examples, the convolution has 16 output channels, a kernel of 3x3, stride 2 and padding 1, and the linear layer has
    10 outputs. "pooled" is added if values are averaged before or after a convolution.
    """
    if layer.kernel is None:
        return f"linear {layer.shape[0]}"
    parts = [f"conv {layer.shape[0]}", _format_sides(layer.kernel)]
    parts += [f"/{_format_sides(layer.stride, short=True)}"] * (layer.stride != (1, 1))
    parts += [f"pad {_format_sides(layer.padding, short=True)}"] * (layer.padding != (0, 0))
    parts += [f"dilation {_format_sides(layer.dilation, short=True)}"] * (layer.dilation != (1, 1))
    pooled = prod(layer.inputs) != prod(layer.product_inputs) or prod(layer.product_outputs) != prod(layer.outputs)
    return " ".join(parts + ["pooled"] * pooled)


def _format_sides(sides: tuple[int, int], *, short: bool = False) -> str:
    return str(sides[0]) if short and sides[0] == sides[1] else f"{sides[0]}x{sides[1]}"


# --- the conclusions as text ---


def write_headline(report: RankReport) -> str:
    """Return one line on whether the gradient of one example determines this example.

    It says that a closed form computes it, that a search can, or that the gradient determines it only in part.
    """
    if report.full:
        return "yes, exactly: a closed form computes the input"
    if report.locally_unique:
        return "yes, by a search: there is no closed form, but no other input near the true one has the same gradient"
    return "in part: the gradient does not determine the input, and a prior has to fill in the rest"


def write_verdict(report: RankReport) -> list[str]:
    """Return the reasons for the headline as a list of sentences.

    They say which layers lack how many equations, whether all layers together still determine the input, what was assumed, and
    which ranks were only counted or depend on the data.
    """
    if report.full:
        lines = ["Every layer has as many independent equations as unknowns: R-GAP computes the input "
                "layer by layer from the gradient of one example, up to rounding."]  # fmt: skip
    else:
        lines = [] if report.readable else ["Its last layer is a convolution, and closed forms need a linear last layer."]
        lines += [_describe_lack(i, report) for i in reversed(report.deficient_layers)]
        if report.unused:
            inputs = report.layers[0].unknowns
            lines.append(f"{report.unused:,} of the input's {inputs:,} values are not used by the network, and cannot leak.")
        lines.append(_describe_whole(report))
    if report.dead is not None:
        lines.append(f"This assumes that {report.dead:.0%} of each ReLU's outputs are 0, each of which hides a pre-activation.")
    if counted := [i for i, layer in enumerate(report.layers) if layer.counted]:
        lines.append(f"The rank of {_list_layers(counted)} is an upper bound, found by counting, and may be lower.")
    if varying := [i for i, layer in enumerate(report.layers) if not layer.proved and not layer.counted]:
        lines.append(
            f"The rank of {_list_layers(varying)} depends on which pre-activations are negative. It was computed for a random "
            "choice of them, and may be another for other data."
        )
    return lines


def _list_layers(positions: Sequence[int]) -> str:
    """Return layers by number, from 1, such as "layer 2" or "layers 1, 3". positions: from 0."""
    return f"layer{'s' * (len(positions) > 1)} {', '.join(str(position + 1) for position in positions)}"


def _describe_lack(position: int, report: RankReport) -> str:
    layer = report.layers[position]
    ends = " R-GAP, which starts at the last layer, stops there." if position == report.deficient_layers[-1] else ""
    return (
        f"Layer {position + 1} of {len(report.layers)} has {layer.rank:,} independent equations for {layer.used:,} unknowns: "
        f"{layer.missing:,} are missing.{ends}"
    )


def _describe_whole(report: RankReport) -> str:
    size = report.layers[0].unknowns
    if report.locally_unique:
        return (
            f"By count, all layers together still determine the input's {size:,} values (virtual constraints): no other input "
            "near the true one has the same gradient, so a search that starts from a prior can be exact."
        )
    return (
        f"By count, all layers together leave {report.undetermined:,} of the input's {size:,} values undetermined: "
        "many inputs have the same gradient, and only a prior distinguishes them."
    )
