"""The data of CPL's tables, and what a server sees of clients that train on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attacked import attacked, row_of, settings_of
from contract import Options
from cpl_paper import Rows
from single_cases import Client, client
from splits import Images, draw, images
from torch import Tensor

from attacker.attacks import ATTACKS, Case, GradientMatching, cpl, exact, presets
from attacker.attacks.closed_form.router import ClosedForm
from fedsim import data as datasets

LEARNING_RATES = (1e-4, 1e-2)
"""Of clients that take several local steps; the paper does not say its own. At the first, one gradient stands for a few."""
TV_OF_COMPRESSED = 1e-3
"""Weight of total variation: the best of a few for `photos`, after first trials on faces had said in which range to look."""


@dataclass(frozen=True)
class Originals:
    """x, y: what each case was trained on, (N, *shape) and (N,)."""

    data: Images
    cases: list[Case]
    x: list[Tensor]
    y: list[Tensor]

    def rows(self, attacks: dict[str, GradientMatching | ClosedForm], asked: Options, **labels: Any) -> list[dict[str, Any]]:
        """One row an attack; labels: further columns, before the numbers."""
        rows = []
        for name, attack in attacks.items():
            found, seconds = attacked(attack, self.cases, asked)
            numbers = row_of(found, self.x, self.y, seconds, self.data.data)
            told = {"settings": settings_of(attack), "part": self.data.part, "source": "measured"}
            rows.append({"data": self.data.name, **labels, "attack": name, **told, **numbers})
        return rows


def alone_and_routed(attack: Callable[..., GradientMatching], **settings: Any) -> dict[str, GradientMatching | ClosedForm]:
    """The optimisation by itself, and the router that tries closed forms before it."""
    search = attack(**settings)
    return {search.name: search, "router": replace(exact(fallback="none"), fallback=search)}


def smoothed(tv: float, steps: int, **settings: Any) -> dict[str, GradientMatching | ClosedForm]:
    """The optimisation with a prior, which the paper does not have."""
    return {"cpl tv": cpl(optimiser="wolfe", tv=tv, steps=steps, **settings)}


def tuned(attack: str, seen: Client, **settings: Any) -> GradientMatching | ClosedForm:
    """An attack with the tuned preset of this network; settings: in place of those of the preset."""
    arguments = presets.arguments_of(attack, "tuned", seen.model, seen.data) | settings
    return ATTACKS[attack](**arguments)


def limit(asked: Options) -> int:
    """Iterations at most; the paper has 300."""
    return 50 if asked.quick else 300


def scale(asked: Options, on_two_cores: int, quick: int = 1) -> int:
    """How many images: a hundred, as in the paper, with a GPU."""
    return quick if asked.quick else on_two_cores if asked.device == "cpu" else 100


def data_sets(asked: Options, names: Sequence[str], count: int) -> list[Images]:
    """Those that are at hand; what stands in for several counts once. `--quick` takes the first only."""
    found: dict[str, Images] = {}
    for name in names[:1] if asked.quick else names:
        one = table(asked, name, count) if name in ("adult", "breast_cancer") else images(asked, name, count)
        if one is not None:
            found.setdefault(one.name, one)
    return list(found.values())


def table(asked: Options, name: str, count: int) -> Images | None:
    """So many rows of the census in --data, or of the table that is embedded."""
    path = asked.data / "adult" / "adult.csv.gz" if asked.data else None
    if name == "adult" and (path is None or not path.exists()):
        print("adult: needs adult/adult.csv.gz in --data; left out")
        return None
    loaded = datasets.load(f"csv:{path}") if name == "adult" else datasets.load(name)
    x, y = loaded.train[draw(loaded.train.values, count, part="report", source=name)]
    return Images(name, x, y, loaded.spec, "report")


def network(data: Images, asked: Options, **arguments: Any) -> Client:
    """CPL's LeNet, also where the paper has a ResNet that it does not publish; a perceptron with one hidden layer for rows."""
    name = "lenet_cpl" if data.data.is_image else "mlp"
    return client(name, data.data, seed=asked.seed, arguments=arguments)


def single(data: Images, seen: Client, defense: str = "") -> Originals:
    """Each example alone."""
    return batches(data, seen, 1, defense)


def batches(data: Images, seen: Client, size: int, defense: str = "") -> Originals:
    """The examples in batches of `size`, one step each."""
    x, y = list(data.x.split(size)), list(data.y.split(size))
    seen = replace(seen, training=replace(seen.training, batch_size=size))
    cases = [seen.case([pair], f"{data.name}-{i}", defense) for i, pair in enumerate(zip(x, y, strict=True))]
    return Originals(data, cases, x, y)


def squeezed(data: Images, seen: Client, steps: int, rate: float) -> Originals:
    """Each example alone, trained on for so many local steps before anything is shared."""
    seen = replace(seen, training=replace(seen.training, learning_rate=rate, steps=None, epochs=steps))
    x, y = list(data.x.split(1)), list(data.y.split(1))
    cases = [seen.case([pair] * steps, f"{data.name}-{i}") for i, pair in enumerate(zip(x, y, strict=True))]
    return Originals(data, cases, x, y)


def beside(rows: list[dict[str, Any]], paper: Rows, *keys: str) -> list[dict[str, Any]]:
    """Our rows, each published one after those of its kind; keys: the columns that say which kind a row is of.

    Data that stand in for what is not at hand have no published row.
    """
    told: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        told.append(row)
        kind = tuple(str(row[key]) for key in keys)
        last = i + 1 == len(rows) or tuple(str(rows[i + 1][key]) for key in keys) != kind
        if last and kind in paper:
            told.append({**dict(zip(keys, kind, strict=True)), "source": "paper", **paper[kind]})
    return told
