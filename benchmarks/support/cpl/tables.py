"""Tables 1 to 9 of CPL (Wei et al. 2020), measured anew: one function each, which returns rows and a summary.

The rows of the paper are inserted among ours.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, variance
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from support.attacked import count_iterations, match_examples, run_attack
from support.contract import Options, TableAndSummary
from support.cpl import paper
from support.cpl.cases import (
    LEARNING_RATES,
    TV_OF_COMPRESSED,
    Originals,
    choose_count,
    choose_max_iterations,
    insert_paper_rows,
    load_data_sets,
    make_batch_cases,
    make_paper_client,
    make_search_and_router,
    make_single_cases,
    make_squeezed_cases,
    make_tuned,
)
from support.single_cases import LocalClient
from support.splits import Images

from attacker.attacks import GradientMatching, cpl, dlg, exact, inverting_gradients, presets
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.scoring.metrics import is_recovered
from defenses.papers import cpl_noise, cpl_prune

DATA_SETS = ("lfw", "cifar10", "cifar100", "mnist")
BATCH_SIZES, NUM_BATCHES = (2, 4, 8, 16), 10
"""For table 6: batch sizes, and number of batches of each size."""
POOL_SIZE = 400
"""Number of images from which attacked images, and those that an insider owns, are chosen."""


def measure_termination(options: Options) -> TableAndSummary:
    """Measure table 1 of CPL: the success rate as a function of the maximum number of iterations."""
    rows = []
    limits = [most for most in paper.ITERATION_LIMITS if most <= choose_max_iterations(options)]
    for data in load_data_sets(options, _choose_data_sets(options, *DATA_SETS[:3]), choose_count(options, 5)):
        for start in ("patterned", "random"):
            for source, taken in _count_iterations(
                make_single_cases(data, make_paper_client(data, options)), start, options
            ).items():
                shares = {f"at {most}": sum(count <= most for count in taken) / len(data) for most in limits}
                rows.append({"data": data.name, "start": start, "attack": source, "source": "measured", **shares})
    published = {kind: {f"at {most}": row[f"at {most}"] for most in limits} for kind, row in paper.TABLE_1.items()}
    rows = insert_paper_rows(rows, published, "data", "start")
    ours, most = [row for row in rows if row.get("attack") == "cpl"], min(100, limits[-1])
    starts = ("patterned", "random")
    return rows, {f"{start}_at_{most}": mean(r[f"at {most}"] for r in ours if r["start"] == start) for start in starts}


def _choose_data_sets(options: Options, *names: str, on_two_cores: int = 2) -> tuple[str, ...]:
    """Return the names of the first `on_two_cores` data sets on a CPU, so that a table takes minutes there; on a GPU, all."""
    return names[:on_two_cores] if options.device == "cpu" else names


def _count_iterations(originals: Originals, start: str, options: Options) -> dict[str, list[int]]:
    """Return a dict from an attack's name to the numbers of iterations, one for each case whose image it recovered.

    The attacks are CPL alone, and closed forms followed by CPL. start: name of CPL's starting point.
    """
    found = {}
    for name, attack in make_search_and_router(cpl, init=start, steps=choose_max_iterations(options)).items():
        answers, _ = run_attack(attack, originals.cases, options)
        found[name] = [
            count_iterations(answer)
            for answer, x in zip(answers, originals.x, strict=True)
            if bool(is_recovered(match_examples(answer, x)[0], x).all())
        ]
    return found


def measure_base(options: Options) -> TableAndSummary:
    """Measure table 2 of CPL: CPL, DLG and Inverting Gradients on single images, with the ratio of CPL's iterations to DLG's."""
    names = ("cifar10", "lfw") if options.device == "cpu" else DATA_SETS
    rows: list[dict[str, Any]] = []
    for data in load_data_sets(options, names, choose_count(options, 6)):
        seen = make_paper_client(data, options)
        rows += make_single_cases(data, seen).measure_attacks(of_one_image(seen, options), options)
    return insert_paper_attacks(rows), _compute_ratios(rows)


def of_one_image(seen: LocalClient, options: Options) -> dict[str, GradientMatching | ClosedForm]:
    """Return the attacks of table 2, as a dict from name to attack.

    CPL and DLG have at most 300 iterations and three starts; "cpl tuned" has the numbers of its preset for the network of the
    client `seen`. Inverting Gradients has 4,800 iterations, so that it gets only one start on a CPU, and three on a GPU. With
    --quick, all have fewer iterations and, except "cpl tuned", one start.
    """
    ours, quick = _choose_effort(options), {"steps": 20} if options.quick else {}
    others = {"restarts": 1 if options.device == "cpu" else ours["restarts"]} | quick
    published = others | dict(presets.get_settings("inverting_gradients")["published"]) | quick
    attacks = make_search_and_router(cpl, **ours) | {"cpl wolfe": cpl(optimiser="wolfe", **ours)}
    attacks |= {"cpl tuned": make_tuned(seen, options), "dlg": dlg(**ours)}
    attacks |= {"inverting_gradients": inverting_gradients(**others)}
    return attacks | {"inverting_gradients published": inverting_gradients(**published)}


def _choose_effort(options: Options) -> dict[str, int]:
    """Return the number of starts and the maximum number of iterations that compared searches share, as arguments of attacks."""
    return {"restarts": 1 if options.quick else 3, "steps": choose_max_iterations(options)}


def _compute_ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for data in dict.fromkeys(row["data"] for row in rows):
        own = {row["attack"]: row for row in rows if row["data"] == data}
        mine, theirs = own["cpl"]["iterations"], own["dlg"]["iterations"]
        summary[f"{data}_success"] = own["cpl"]["asr_c"]
        summary[f"{data}_iterations_ratio"] = mine / theirs if mine and theirs else None
        summary[f"{data}_cpu_seconds"] = own["cpl"]["cpu_seconds"]
    return summary


def insert_paper_attacks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return our rows with the rows of the paper's tables 2 and 3 inserted, as by `insert_paper_rows`."""
    return insert_paper_rows(rows, paper.TABLE_2 | paper.TABLE_3, "data", "attack")


def measure_attributes(options: Options) -> TableAndSummary:
    """Measure table 3 of CPL: attacks on rows of tables behind an MLP with one hidden layer."""
    ours, rows = _choose_effort(options), []
    for data in load_data_sets(options, ("breast_cancer", "adult"), choose_count(options, 10, quick=2)):
        originals = make_single_cases(data, make_paper_client(data, options))
        others = {"steps": 20 if options.quick else 4800, "restarts": ours["restarts"]}
        attacks = make_search_and_router(cpl, **ours) | {"cpl wolfe": cpl(optimiser="wolfe", **ours)}
        attacks |= {"dlg": dlg(**ours), "inverting_gradients": inverting_gradients(tv=0.0, **others)}
        rows += originals.measure_attacks(attacks, options)
    return insert_paper_attacks(rows), {f"{r['data']}_success": r["asr_c"] for r in rows if r["attack"] == "cpl"}


def measure_starts(options: Options) -> TableAndSummary:
    """Measure table 4 of CPL: iterations and success rate by starting point."""
    rows = []
    count = choose_count(options, 2)
    for data in load_data_sets(options, _choose_data_sets(options, "lfw", "cifar10", "cifar100"), POOL_SIZE):
        own, others = _split_pool(data, count)
        originals = make_single_cases(own, make_paper_client(own, options))
        with TemporaryDirectory() as folder:
            auxiliary = f"{folder}/own.npz"
            others.write(Path(auxiliary))
            for start in ("patterned", "insider") if options.quick else paper.START_NAMES:
                settings = {"auxiliary": auxiliary} if start == "insider" else {}
                attacks = make_search_and_router(cpl, init=start, steps=choose_max_iterations(options), **settings)
                both = attacks if start == "patterned" else {"cpl": attacks["cpl"]}
                rows += originals.measure_attacks(both, options, start=start)
    best = min((row for row in rows if row["iterations"]), key=lambda row: row["iterations"], default=None)
    return insert_paper_rows(rows, paper.TABLE_4, "data", "start"), {"fastest_start": best["start"] if best else None}


def _split_pool(pool: Images, count: int) -> tuple[Images, Images]:
    """Return the images to attack, one of each of `count` classes, and all other images of the pool.

    These other images belong to the insider: an attacker who takes part in the federation and knows other images of the same
    classes. Copies of attacked images are in neither part.
    """
    several = [int(label) for label in pool.y.unique() if (pool.y == label).sum() > 1]
    classes = [several[i] for i in np.linspace(0, len(several) - 1, count).round().astype(int)]
    mine = pool.of([int((pool.y == label).nonzero()[0]) for label in classes])
    other = [i for i, x in enumerate(pool.x) if not (mine.x == x).flatten(1).all(dim=1).any()]
    return mine, pool.of(other)


def measure_spread(options: Options) -> TableAndSummary:
    """Measure table 5 of CPL: mean, minimum, maximum and variance of the number of iterations over successful searches."""
    rows = []
    for data in load_data_sets(options, _choose_data_sets(options, *DATA_SETS), choose_count(options, 8, quick=2)):
        for start in ("patterned", "random"):
            for name, taken in _count_iterations(
                make_single_cases(data, make_paper_client(data, options)), start, options
            ).items():
                numbers = {"successes": len(taken), "images": len(data), "iterations": mean(taken) if taken else None}
                numbers |= {"least": min(taken, default=None), "most": max(taken, default=None)}
                numbers["variance"] = variance(taken) if len(taken) > 1 else None
                rows.append({"data": data.name, "start": start, "attack": name, "source": "measured", **numbers})
    return insert_paper_rows(rows, paper.TABLE_5, "data", "start"), {
        "successes": sum(r["successes"] for r in rows if r["attack"] == "cpl")
    }


def measure_local_training(options: Options) -> TableAndSummary:
    """Measure table 6 of CPL: success by batch size, and by the number of local steps on single faces."""
    rows, most = [], choose_max_iterations(options)
    for size in (2,) if options.quick else BATCH_SIZES:
        for name in ("lfw",) if options.quick else DATA_SETS[:3]:
            rows += of_batch(options, name, size)
    data = load_data_sets(options, ("lfw",), choose_count(options, 2))[0]
    for steps in (3,) if options.quick else (1, 3, 5, 7, 9):
        rows += _measure_steps(data, steps, most, options, what="local iterations", of=steps)
    table = insert_paper_rows(rows, paper.TABLE_6, "data", "what", "of")
    return table, _summarise_best(rows, "what", "of")


def of_batch(options: Options, name: str, size: int) -> list[dict[str, Any]]:
    """Return the rows for one data set and batch size of table 6, one per attack.

    Attacks: the closed form `features`, which first solves for the inputs of the last layer; CPL's search with the tuned preset;
    and, not on a CPU, CPL's search with its default settings.
    """
    data = load_data_sets(options, (name,), size * (1 if options.quick else NUM_BATCHES))[0]
    seen = make_paper_client(data, options)
    attacks = {"features": exact(route="features", fallback="none"), "cpl tuned": make_tuned(seen, options)}
    if options.device != "cpu":
        attacks |= {"cpl": cpl(steps=choose_max_iterations(options))}
    return make_batch_cases(data, seen, size).measure_attacks(attacks, options, what="batch", of=size)


def _measure_steps(data: Images, count: int, most: int, options: Options, **labels: Any) -> list[dict[str, Any]]:
    """Attack updates of `count` local steps, and return one row per learning rate and attack.

    Learning rates are those in `LEARNING_RATES`; for a single step the only one is 1.
    The attack "cpl" treats the update as one step, as the paper does. "router" tries closed forms first; with several steps it is
    run at the smaller learning rate only. "cpl simulated", which simulates every step in at most 50 iterations, is run with
    several steps only, at the larger learning rate. most: maximum number of iterations.
    labels: further columns of the rows.
    """
    rows: list[dict[str, Any]] = []
    for rate in LEARNING_RATES if count > 1 else (1.0,):
        originals = make_squeezed_cases(data, make_paper_client(data, options), count, rate)
        attacks = make_search_and_router(cpl, steps=most)
        if rate == LEARNING_RATES[-1]:
            simulated = cpl(optimiser="wolfe", local_steps="simulated", steps=min(50, most))
            attacks = {"cpl": attacks["cpl"], "cpl simulated": simulated}
        rows += originals.measure_attacks(attacks, options, rate=rate, **labels)
    return rows


def _summarise_best(rows: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """Return the shares of examples whose content was recovered, by kind of measured row.

    The kind is the text of the row's values in the columns `keys`. Key "KIND" of the result holds the share in the kind's first
    row, key "KIND best" the largest share in the kind's rows.
    """
    summary: dict[str, Any] = {}
    for row in rows:
        kind = " ".join(str(row[key]) for key in keys)
        if row["source"] == "measured":
            summary.setdefault(kind, row["asr_c"])
            summary[f"{kind} best"] = max(summary.get(f"{kind} best", 0.0), row["asr_c"])
    return summary


def measure_compression(options: Options) -> TableAndSummary:
    """Measure table 7 of CPL: only the entries of largest magnitude are sent; CPL ignores this, as in the paper, or models it."""
    rows = []
    shares = (0, 50) if options.quick else paper.PRUNED_PERCENT if options.device != "cpu" else (0, 40, 90)
    for data in load_data_sets(options, _choose_data_sets(options, *DATA_SETS), choose_count(options, 2)):
        for share in shares:
            originals = make_single_cases(data, make_paper_client(data, options), cpl_prune(share) if share else "")
            rows += _make_attacks(originals, options, bool(share), tv=TV_OF_COMPRESSED, theta=f"{share} %")
    table = insert_paper_rows(rows, paper.TABLE_7, "data", "theta")
    return table, _summarise_best(rows, "data", "theta")


def _make_attacks(originals: Originals, options: Options, defended: bool, tv: float = 0.0, **labels: Any) -> list[dict[str, Any]]:
    """Attack the cases of `originals` with variants of CPL, and return one row for each.

    CPL that ignores the defense is run alone, and after closed forms. If the cases are `defended`, CPL that knows the defense is
    run as well and, for `tv` above 0, CPL that ignores the defense but has total variation of weight `tv`. labels: further
    columns.
    """
    attacks = make_search_and_router(cpl, knows_defense=False, steps=choose_max_iterations(options))
    if defended and tv:
        attacks["cpl tv"] = cpl(optimiser="wolfe", tv=tv, steps=choose_max_iterations(options), knows_defense=False)
    if defended:
        attacks |= {"cpl, defense known": cpl(steps=choose_max_iterations(options))}
    return originals.measure_attacks(attacks, options, **labels)


def measure_noise(options: Options) -> TableAndSummary:
    """Measure table 8 of CPL: noise on every entry of the gradient.

    The column `noise` has the paper's names, in which 10e-K stands for 10 ** -K: G-10e-2 is Gaussian noise of standard deviation
    0.01, and L-10e-2 Laplace noise of scale 0.01.
    """
    names = ("none", *(f"{kind}-10e-{power}" for kind in "GL" for power in (4, 3, 2)))
    rows = []
    for data in load_data_sets(options, _choose_data_sets(options, "lfw", "cifar100", on_two_cores=1), choose_count(options, 2)):
        for name in ("none", "G-10e-3") if options.quick else names:
            originals = make_single_cases(data, make_paper_client(data, options), "" if name == "none" else cpl_noise(name, 1.0))
            rows += _make_attacks(originals, options, name != "none", noise=name)
    table = insert_paper_rows(rows, paper.TABLE_8, "data", "noise")
    return table, _summarise_best(rows, "data", "noise")


def measure_squeezing(options: Options) -> TableAndSummary:
    """Measure table 9 of CPL: up to ten local steps on the same image before the update is sent."""
    rows = []
    every = (1, 5) if options.quick else range(1, 11) if options.device != "cpu" else (1, 4, 10)
    for data in load_data_sets(options, _choose_data_sets(options, *DATA_SETS), choose_count(options, 2)):
        for steps in every:
            rows += _measure_steps(data, steps, choose_max_iterations(options), options, steps=steps)
    table = insert_paper_rows(rows, paper.TABLE_9, "data", "steps")
    return table, _summarise_best(rows, "data", "steps")


TABLES: dict[str, Callable[[Options], TableAndSummary]] = {
    "1": measure_termination,
    "2": measure_base,
    "3": measure_attributes,
    "4": measure_starts,
    "5": measure_spread,
    "6": measure_local_training,
    "7": measure_compression,
    "8": measure_noise,
    "9": measure_squeezing,
}
