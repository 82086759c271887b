"""Conclusions of a rank analysis as text."""

from attacker.attacks.closed_form.rank.analysis import RankReport


def headline(report: RankReport) -> str:
    """Return one line that says whether the network can leak."""
    if report.full:
        return "yes, exactly: a closed form gives the input"
    if report.locally_unique:
        return "yes, by a search: no closed form, but near the input no other one has its gradient"
    return "in part: the gradient leaves the input open, and a prior has to fill in the rest"


def verdict(report: RankReport) -> list[str]:
    """Return the reasons as sentences: which layers lack how many equations, and which layers compensate."""
    if report.full:
        said = ["Every layer has as many independent equations as unknowns: from the gradient of one example, the walk back "
                "through the network finds the input layer by layer, up to rounding."]  # fmt: skip
    else:
        said = [] if report.readable else ["Its last layer is a convolution, whose input no closed form reads."]
        said += [_lack(i, report) for i in reversed(report.deficient_layers)]
        said += [_unused(report)] * bool(report.unused)
        said.append(_together(report))
    if report.dead is not None:
        said.append(f"This assumes that {report.dead:.0%} of each ReLU's outputs are 0, each of which hides a pre-activation.")
    if unproved := [str(i + 1) for i, layer in enumerate(report.layers) if not layer.proved]:
        what = "layer" if len(unproved) == 1 else "layers"
        said.append(f"The rank of {what} {', '.join(unproved)} is counted, not proved, and may be lower.")
    return said


def _lack(position: int, report: RankReport) -> str:
    layer = report.layers[position]
    ends = " The walk from the last layer ends there." if position == report.deficient_layers[-1] else ""
    return (
        f"Layer {position + 1} of {len(report.layers)} has {layer.rank:,} independent equations for {layer.used:,} unknowns: "
        f"{layer.missing:,} are missing.{ends}"
    )


def _unused(report: RankReport) -> str:
    return f"{report.unused:,} of the input's {report.layers[0].unknowns:,} values are never looked at, and cannot leak at all."


def _together(report: RankReport) -> str:
    size = report.layers[0].unknowns
    if report.locally_unique:
        return (
            f"By count, the layers together still determine the input's {size:,} values among those near it "
            "(virtual constraints): a search that starts from a prior can be exact."
        )
    return (
        f"By count, all layers together leave {report.undetermined:,} of the input's {size:,} values undetermined: "
        "an image among many has the same gradient, and only a prior tells them apart."
    )
