"""The specification of a defense is data: `"clip(4) | gaussian(0.1)"`, parsed, printed, and built from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from defenses import calls
from defenses import channel as channels
from defenses.base import Defense, chain
from defenses.calls import Step
from defenses.channel import Channel
from defenses.clipping import clip
from defenses.noise import gaussian
from defenses.registry import Registry

Codec = Literal["dense", "sparse", "bits", "levels"]


class Kind(NamedTuple):
    """A defense by name: how a client builds it, what an attacker who knows it does about it, and what is claimed of it.

    defense, channel: take the same arguments.
    codec:    the lossless packing that suits what comes out; None where it leaves that to what came before.
    example:  a setting that changes any update, without the name: "0.5" stands for clip(0.5).
    limit:    arguments in whose limit an update stays as it is, bit for bit; None where there is none.
    random:   whether the example draws anything. unbiased: whether the mean over what it draws is the update.
    """

    defense: Callable[..., Defense]
    channel: Callable[..., Channel]
    codec: Codec | None = None
    example: str = ""
    limit: str | None = None
    random: bool = False
    unbiased: bool = False


DEFENSES: Registry[Kind] = Registry(
    "defenses",
    {
        "clip": Kind(clip, channels.clip, example="0.5", limit="1e6"),
        "gaussian": Kind(gaussian, channels.gaussian, codec="dense", example="0.25", limit="0", random=True, unbiased=True),
    },
)


@dataclass(frozen=True)
class DefenseSpec:
    """A chain of defenses as public data. The empty chain sends the update as it is."""

    steps: tuple[Step, ...] = ()

    @classmethod
    def parse(cls, text: str, *, learning_rate: float | None = None) -> "DefenseSpec":
        """Read `text`: calls with literal arguments, joined by `|`, applied from left to right.

        learning_rate: of the clients' training, for defenses that work in units of the gradient and do not say it themselves.
        Raises ValueError for anything else, and for unknown names and arguments, listing what exists.
        """
        fill = {} if learning_rate is None else {"learning_rate": learning_rate}
        spec = cls(calls.parse(text, lambda name: DEFENSES[name].defense, "defense", fill=fill, nested=cls))
        try:
            spec.build()
        except TypeError as error:
            raise ValueError(f"defense {text!r}: an argument has the wrong type: {error}") from None
        return spec

    def __str__(self) -> str:
        return " | ".join(step.printed(DEFENSES[step.name].defense) for step in self.steps)

    def build(self) -> Defense:
        """The defense itself, for the client."""
        return chain(*(DEFENSES[step.name].defense(**_built(step, DefenseSpec.build)) for step in self.steps))

    def channel(self) -> Channel:
        """Its public part, for the attacker."""
        return channels.compose(*(DEFENSES[step.name].channel(**_built(step, DefenseSpec.channel)) for step in self.steps))

    def codec(self) -> Codec:
        """The lossless packing that suits what this chain sends."""
        codec: Codec = "dense"
        for step in self.steps:
            chosen = DEFENSES[step.name].codec or _inner_codec(step) or codec
            codec = "sparse" if (codec, chosen) == ("sparse", "levels") else chosen  # which packs few values just as well
        return codec


def _inner_codec(step: Step) -> Codec | None:
    return next((value.codec() for _, value in step.arguments if isinstance(value, DefenseSpec)), None)


def _built(step: Step, build: Callable[[DefenseSpec], Any]) -> dict[str, Any]:
    """The arguments of a step, with `build` of those that are specifications themselves."""
    return {key: build(value) if isinstance(value, DefenseSpec) else value for key, value in step.arguments}
