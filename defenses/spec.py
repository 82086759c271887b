"""Registry of defenses of the update, and chains of them as text or data, such as `"clip(4) | gaussian(0.1)"`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, Literal, NamedTuple

from defenses import channels, papers
from defenses.base import Defense, chain
from defenses.channel import Channel, compose_channels
from defenses.clipping import clip, clip_each
from defenses.combinators import in_gradient_units
from defenses.dgc import dgc
from defenses.noise import gaussian, laplace
from defenses.quantisation import qsgd, sign, uniform
from defenses.registry import Registry, calls
from defenses.registry.calls import Step
from defenses.selection import masked, withhold
from defenses.sparsification import gradient_dropout, prune, random_k, top_k

CodecName = Literal["dense", "sparse", "bits", "levels"]

MAX_DEPTH = 8
"""Largest nesting depth of a specification."""


class Kind(NamedTuple):
    """Entry of the registry of defenses: a defense with properties that tests check.

    defense, channel: functions with the same arguments that build the client's defense and the attacker's channel.
    codec:    name of the lossless packing that suits the defense's output. None stands for the packing of the inner defense or,
              if there is no inner defense, of the previous step of the chain.
    example:  arguments, as text, with which the defense changes the sample update that the tests use; in the entry of `clip`,
              "0.5" stands for clip(0.5).
    limit:    arguments, as text, with which the defense leaves that sample update unchanged, bit for bit; None if there are no
              such arguments.
    random:   whether the defense with the arguments `example` draws random numbers. unbiased: whether the mean of its result over
              these draws is the update.
    """

    defense: Callable[..., Defense]
    channel: Callable[..., Channel]
    codec: CodecName | None = None
    example: str = ""
    limit: str | None = None
    random: bool = False
    unbiased: bool = False


def make_alias(
    written: Callable[..., str],
    *,
    codec: CodecName | None = None,
    example: str = "",
    limit: str | None = None,
    random: bool = False,
    unbiased: bool = False,
) -> Kind:
    """Return the registry entry of an alias: a name for a whole specification, such as a paper's setting.

    written: returns the specification as text, such as "clip(1) | gaussian(0.1)"; its parameters and docstring become those of
             the alias. The other arguments are fields of `Kind`.
    """

    @wraps(written)
    def make_defense(*args: Any, **kwargs: Any) -> Defense:
        return DefenseSpec.parse(written(*args, **kwargs)).build()

    @wraps(written)
    def make_channel(*args: Any, **kwargs: Any) -> Channel:
        return DefenseSpec.parse(written(*args, **kwargs)).build_channel()

    return Kind(make_defense, make_channel, codec, example, limit, random, unbiased)


DEFENSES: Registry[Kind] = Registry(
    "defenses",
    {
        "clip": Kind(clip, channels.clip, example="0.5", limit="1e6"),
        "clip_each": Kind(clip_each, channels.clip_each, example="0.25", limit="1e6"),
        "gaussian": Kind(gaussian, channels.gaussian, codec="dense", example="0.25", limit="0", random=True, unbiased=True),
        "laplace": Kind(laplace, channels.laplace, codec="dense", example="0.25", limit="0", random=True, unbiased=True),
        "top_k": Kind(top_k, channels.top_k, codec="sparse", example="0.25", limit="1"),
        "random_k": Kind(random_k, channels.random_k, codec="sparse", example="0.25", limit="1", random=True),
        "prune": Kind(prune, channels.prune, codec="sparse", example="0.5", limit="0"),
        "gradient_dropout": Kind(
            gradient_dropout, channels.gradient_dropout, codec="sparse", example="0.5", limit="0", random=True
        ),
        "dgc": Kind(dgc, channels.dgc, codec="sparse", example="0.25", limit="1, momentum=0"),
        "sign": Kind(sign, channels.sign, codec="bits"),
        "qsgd": Kind(qsgd, channels.qsgd, codec="levels", example="3", random=True, unbiased=True),
        "uniform": Kind(uniform, channels.uniform, codec="levels", example="3"),
        "withhold": Kind(withhold, channels.withhold, codec="sparse", example="['*.weight']", limit="[]"),
        "masked": Kind(masked, channels.masked, example="clip(0.5), ['*.weight']", limit="clip(1e6), ['*']"),
        # division and multiplication by a power of two are exact in floating point
        "in_gradient_units": Kind(
            in_gradient_units, channels.in_gradient_units, example="clip(0.5), 0.25", limit="clip(1e6), 0.25"
        ),
        "cpl_noise": make_alias(papers.cpl_noise, codec="dense", example="'G-10e-2', 0.5", random=True, unbiased=True),
        "cpl_prune": make_alias(papers.cpl_prune, codec="sparse", example="50", limit="0"),
        "signsgd": make_alias(papers.signsgd, codec="bits", example="0.1"),
        "ef_signsgd": make_alias(papers.ef_signsgd, codec="bits"),
        "rog_uniform": make_alias(papers.rog_uniform, codec="levels"),
        "rog_qsgd": make_alias(papers.rog_qsgd, codec="levels", random=True, unbiased=True),
        "rog_top_k": make_alias(papers.rog_top_k, codec="sparse", limit="0"),
        "liu_clip": make_alias(papers.liu_clip, example="0.5, 0.25", limit="1e6, 0.25"),
        "liu_noise": make_alias(
            papers.liu_noise, codec="dense", example="0.1, 0.25", limit="0, 0.25", random=True, unbiased=True
        ),
    },
    of=Kind,
    setting="defense",
)


@dataclass(frozen=True)
class DefenseSpec:
    """A chain of defenses as data: the name and the arguments of each step. The empty chain sends updates unchanged."""

    steps: tuple[Step, ...] = ()

    @classmethod
    def parse(cls, text: str, *, learning_rate: float | None = None) -> "DefenseSpec":
        """Parse defenses joined by `|`, which are applied from left to right, such as "clip(4) | gaussian(0.1)".

        An empty text gives the empty chain. Arguments are literals or, for a defense of a defense such as `masked`, defenses.
        learning_rate: the clients' learning rate, for defenses that require an argument `learning_rate` which the text leaves
                       out.
        Raises ValueError for a text of another form, unknown names and arguments, and arguments that a defense does not accept.
        """
        fill = {} if learning_rate is None else {"learning_rate": learning_rate}
        spec = cls(calls.parse(text, lambda name: DEFENSES[name].defense, "defense", fill=fill, nested=_nest))
        for step in spec.steps:
            try:
                cls((step,)).build()
            except TypeError as error:
                parameters = ", ".join(map(str, signature(DEFENSES[step.name].defense).parameters.values()))
                raise ValueError(
                    f"defense {text!r}: an argument of {cls((step,))} has the wrong type ({error}); the parameters of "
                    f"{step.name} are: {parameters}"
                ) from None
        return spec

    def __str__(self) -> str:
        return " | ".join(step.to_text(DEFENSES[step.name].defense) for step in self.steps)

    @property
    def depth(self) -> int:
        """Number of levels of nested defenses: 1 if no defense has another one as an argument; `masked(clip(1), ...)` has 2."""
        inner = [v.depth for step in self.steps for _, v in step.arguments if isinstance(v, DefenseSpec)]
        return 1 + max(inner, default=0)

    def build(self) -> Defense:
        """Return the defense that clients apply to their updates; `build_channel` returns the attacker's model of it."""
        return chain(*(DEFENSES[step.name].defense(**_build_arguments(step, DefenseSpec.build)) for step in self.steps))

    def build_channel(self) -> Channel:
        """Return the channel: the attacker's model of the defense that `build` returns."""
        return compose_channels(
            *(DEFENSES[step.name].channel(**_build_arguments(step, DefenseSpec.build_channel)) for step in self.steps)
        )

    def choose_codec(self, input_codec: CodecName = "dense") -> CodecName:
        """Return the name of the lossless packing that suits the output of this chain.

        input_codec: name of the packing that suits the input of the chain; returned if no step of the chain asks for another one.
        """
        codec = input_codec
        for step in self.steps:
            chosen = DEFENSES[step.name].codec or _choose_inner_codec(step, codec)
            # the codec sparse also packs values from a small set
            codec = "sparse" if (codec, chosen) == ("sparse", "levels") else chosen
        return codec


def _nest(steps: tuple[Step, ...]) -> DefenseSpec:
    """Return a specification that is an argument of another one. Raises ValueError above `MAX_DEPTH` levels."""
    spec = DefenseSpec(steps)
    if spec.depth > MAX_DEPTH:
        raise ValueError(f"defenses can be nested at most {MAX_DEPTH} deep, got depth {spec.depth}")
    return spec


def _choose_inner_codec(step: Step, codec: CodecName) -> CodecName:
    return next((value.choose_codec(codec) for _, value in step.arguments if isinstance(value, DefenseSpec)), codec)


def _build_arguments(step: Step, build: Callable[[DefenseSpec], Any]) -> dict[str, Any]:
    """Return the arguments of a step by name; an argument `d` that is a defense, as in `masked`, is replaced by `build(d)`."""
    return {key: build(value) if isinstance(value, DefenseSpec) else value for key, value in step.arguments}
