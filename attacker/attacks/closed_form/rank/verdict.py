"""The conclusions of a rank analysis as text."""

from collections.abc import Sequence

from attacker.attacks.closed_form.rank.analysis import RankReport


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
        said = ["Every layer has as many independent equations as unknowns: R-GAP computes the input "
                "layer by layer from the gradient of one example, up to rounding."]  # fmt: skip
    else:
        said = [] if report.readable else ["Its last layer is a convolution, and closed forms need a linear last layer."]
        said += [_describe_lack(i, report) for i in reversed(report.deficient_layers)]
        said += [_describe_unused(report)] * bool(report.unused)
        said.append(_describe_whole(report))
    if report.dead is not None:
        said.append(f"This assumes that {report.dead:.0%} of each ReLU's outputs are 0, each of which hides a pre-activation.")
    if counted := [i for i, layer in enumerate(report.layers) if layer.counted]:
        said.append(f"The rank of {_list_layers(counted)} is an upper bound, found by counting, and may be lower.")
    if varying := [i for i, layer in enumerate(report.layers) if not layer.proved and not layer.counted]:
        said.append(
            f"The rank of {_list_layers(varying)} depends on which pre-activations are negative. It was computed for a random "
            "choice of them, and may be another for other data."
        )
    return said


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


def _describe_unused(report: RankReport) -> str:
    return f"{report.unused:,} of the input's {report.layers[0].unknowns:,} values are not used by the network, and cannot leak."


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
