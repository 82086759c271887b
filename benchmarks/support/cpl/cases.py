"""The data of the tables of CPL (Wei et al. 2020), updates of clients that train on them, and the attacks on the updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from support.attacked import describe_settings, make_row, run_attack
from support.contract import Options
from support.cpl.paper import PaperTable
from support.single_cases import LocalClient, make_client
from support.splits import Images, draw, load_images
from torch import Tensor

from attacker.attacks import Case, GradientMatching, cpl, exact, presets
from attacker.attacks.closed_form.attack import ClosedForm
from fedsim import data as datasets

LEARNING_RATES = (1e-4, 1e-2)
"""Learning rates of clients with several local steps, which the paper does not state. At the first one, an update of a few steps
is nearly a single gradient."""
TV_OF_COMPRESSED = 1e-3
"""Weight of the total variation for compressed gradients: the best of a few values on `photos`, in a range found on faces."""


@dataclass(frozen=True)
class Originals:
    """Cases of one data set, each one update to attack, and the true examples x (N, *shape) and labels y (N,) of each."""

    data: Images
    cases: list[Case]
    x: list[Tensor]
    y: list[Tensor]

    def measure_attacks(
        self, attacks: dict[str, GradientMatching | ClosedForm], options: Options, **labels: Any
    ) -> list[dict[str, Any]]:
        """Run attacks on all cases and return one row for each.

        attacks: dict from the name of an attack in its row to the attack. labels: further columns of all rows, by name.
        """
        rows = []
        for name, attack in attacks.items():
            answers, seconds = run_attack(attack, self.cases, options)
            numbers = make_row(answers, self.x, self.y, seconds, self.data.data)
            columns = {"settings": describe_settings(attack), "part": self.data.part, "source": "measured"}
            rows.append({"data": self.data.name, **labels, "attack": name, **columns, **numbers})
        return rows


def make_search_and_router(attack: Callable[..., GradientMatching], **settings: Any) -> dict[str, GradientMatching | ClosedForm]:
    """Return two attacks by name: a search under its own name, and under "router" one that tries closed forms before this search.

    settings: arguments of the search.
    """
    search = attack(**settings)
    return {search.name: search, "router": replace(exact(fallback="none"), fallback=search)}


def make_tuned(seen: LocalClient, options: Options) -> GradientMatching:
    """Return `cpl` with the preset "tuned" for networks like the client's, and with 5 iterations with --quick."""
    settings = {"steps": 5} if options.quick else {}
    return cpl(**(presets.get_arguments("cpl", "tuned", seen.model, seen.data) | settings))


def choose_max_iterations(options: Options) -> int:
    """Return the maximum number of iterations: 300, as in the paper, or 10 with --quick."""
    return 10 if options.quick else 300


def choose_count(options: Options, on_two_cores: int, quick: int = 1) -> int:
    """Return the number of images: `quick` with --quick, `on_two_cores` on a CPU, and 100 on a GPU, as in the paper."""
    return quick if options.quick else on_two_cores if options.device == "cpu" else 100


def load_data_sets(options: Options, names: Sequence[str], count: int) -> list[Images]:
    """Load `count` examples of the report part of each data set; with `--quick` of the first only.

    Data shipped with this project replace a missing image data set, and are returned once, even if they replace several. A
    missing table is left out.
    """
    images: dict[str, Images] = {}
    for name in names[:1] if options.quick else names:
        one = load_table(options, name, count) if name in ("adult", "breast_cancer") else load_images(options, name, count)
        if one is not None:
            images.setdefault(one.name, one)
    return list(images.values())


def load_table(options: Options, name: str, count: int) -> Images | None:
    """Load `count` rows, of the report part, of the table "adult" (census data in --data) or "breast_cancer" (scikit-learn's).

    Returns None for "adult" without --data, or without its file there.
    """
    path = options.data / "adult" / "adult.csv.gz" if options.data else None
    if name == "adult" and (path is None or not path.exists()):
        print("adult: needs adult/adult.csv.gz in --data; left out")
        return None
    loaded = datasets.load(f"csv:{path}") if name == "adult" else datasets.load(name)
    x, y = loaded.train[draw(loaded.train.values, count, part="report", source=name)]
    return Images(name, x, y, loaded.spec, "report")


def make_paper_client(data: Images, options: Options) -> LocalClient:
    """Return a client with random weights: of CPL's LeNet for images, of an MLP for rows of tables.

    LeNet is also used where the paper has a ResNet, which was not published.
    """
    name = "lenet_cpl" if data.data.is_image else "mlp"
    return make_client(name, data.data, seed=options.seed)


def make_single_cases(data: Images, seen: LocalClient, defense: str = "") -> Originals:
    """Return one case for each example: the update of the client `seen` after one step on it, changed by the `defense`.

    defense: specification as in an experiment; "" for none.
    """
    return make_batch_cases(data, seen, 1, defense)


def make_batch_cases(data: Images, seen: LocalClient, size: int, defense: str = "") -> Originals:
    """Return one case for each batch of `size` examples: the update of the client `seen` after one step on it.

    The update is changed by `defense`, a specification as in an experiment; "" for none.
    """
    x, y = list(data.x.split(size)), list(data.y.split(size))
    seen = replace(seen, training=replace(seen.training, batch_size=size))
    cases = [seen.make_case([pair], f"{data.name}-{i}", defense) for i, pair in enumerate(zip(x, y, strict=True))]
    return Originals(data, cases, x, y)


def make_squeezed_cases(data: Images, seen: LocalClient, steps: int, rate: float) -> Originals:
    """Return one case per example: the update of the client `seen` after `steps` local steps on it, with learning rate `rate`."""
    seen = replace(seen, training=replace(seen.training, learning_rate=rate, steps=None, epochs=steps))
    x, y = list(data.x.split(1)), list(data.y.split(1))
    cases = [seen.make_case([pair] * steps, f"{data.name}-{i}") for i, pair in enumerate(zip(x, y, strict=True))]
    return Originals(data, cases, x, y)


def insert_paper_rows(rows: list[dict[str, Any]], paper: PaperTable, *keys: str) -> list[dict[str, Any]]:
    """Return our rows, with rows of the paper inserted.

    After consecutive rows with the same values in the columns `keys` comes the paper's row for these values, if it has one.
    paper: dict from these values, as text, to the columns of the paper's row.
    """
    merged: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        merged.append(row)
        kind = tuple(str(row[key]) for key in keys)
        last = i + 1 == len(rows) or tuple(str(rows[i + 1][key]) for key in keys) != kind
        if last and kind in paper:
            merged.append({**dict(zip(keys, kind, strict=True)), "source": "paper", **paper[kind]})
    return merged
