"""Speed of gradient matching compared with breaching 0.1.2 and a plain loop, on the same gradients, in float32 on one thread.

Speed is the number of iterations of all reconstructions per CPU-second, without the first iteration and the cost before it. On
DLG's LeNet, 1, 8 and 64 images are reconstructed with the squared distance and Adam; on ResNet20-4, 1 and 8 images by Inverting
Gradients (cosine distance, total variation, signed Adam in a box). The plain loop is eager PyTorch with a double backward pass.
The plain loop and breaching reconstruct one image after the other. Our search, breaching and the plain loop run alternately, and
ratios are medians over the repetitions.

breaching is not a dependency of this project, and needs older packages. Install it in a separate folder:
    pip install --target FOLDER --no-deps breaching==0.1.2 hydra-core omegaconf antlr4-python3-runtime==4.9.3 pyyaml datasets
    PYTHONPATH=FOLDER python benchmarks/engine.py
Without breaching, the columns, rows and keys of the summary that need it are left out.

By default the tables `lenet` and `resnet` run. `--full` adds the table `quality`, which takes long: ours and breaching
reconstruct the same eight images (of --data those of the report part, on which no setting was chosen) with equal settings. Both
programs have the same objective (cosine), weight of total variation (1e-4), optimiser (signed Adam in a box, learning rate 0.1,
divided by 10 at 3/8, 5/8 and 7/8), number of iterations (100), given labels and start (normal noise). Both run all iterations and
return the iterate with the smallest loss; neither sees the original images. They differ in two ways: breaching's total variation
includes the differences to zeros beyond two edges, and ours reconstructs all images in one batch. `resnet_equal_time` is the
ratio of our CPU time to breaching's, and `resnet_equal_quality_db` the mean difference in PSNR (ours minus breaching's) with its
95 % interval over images. A separate row adds AGIC's layer weights, which breaching does not have; `layer_weights_db` is the
mean gain in PSNR by these weights.

On LeNet our search is compiled by PyTorch, and `eager` is the same search without compilation. On ResNet20-4, `bfloat16` is the
search with large convolutions in bfloat16, if the processor supports it. Rows state the cost of compilation, and the number
of iterations after which it pays. `--quick` measures a few iterations once, and compilation only for one reconstruction at a
time.

The tables `positions`, `queue` and `pool` compare our codec, job queue and worker pool with libraries
(support/compared_libraries.py).
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import StringIO
from statistics import median
from types import SimpleNamespace

import torch
from scipy.stats import t as student
from support.attacked import run_attack
from support.compared_libraries import LIBRARY_TABLES
from support.contract import Options, ResultRow, measure_cpu, parse_options, print_results
from support.single_cases import make_image_cases
from torch import Generator, Tensor, nn
from torch.nn import functional

from attacker.attacks import Case
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.initialisation import normal_after_normalisation
from attacker.attacks.matching.layer_weights import weigh_by_depth
from attacker.attacks.matching.objectives import Objective, cosine, euclidean
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.priors import Prior, total_variation
from attacker.attacks.matching.settings import Search
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.optimisers.stopping import Stop
from attacker.attacks.simulation.client import build_network
from attacker.scoring.metrics import psnr
from fedsim.recording import DataSpec, Observation

TABLES = ("lenet", "resnet", "quality")
TV_WEIGHT = 1e-4
QUALITY_IMAGES, QUALITY_STEPS = 8, 100
"""For the table `quality` without --quick: number of images, and of iterations, equal for all programs."""


@dataclass(frozen=True)
class EngineSetting:
    """The settings of one table. network: name of the model.

    key:      name of the table, and beginning of the names of its values in the summary.
    cosine:   whether the search minimises the cosine distance, with signed gradients and total variation; else the squared one.
    counts:   dict from a number of images to reconstruct to two numbers of iterations: with --quick, and otherwise.
    compiles: whether our search is compiled; the uncompiled one is then measured separately as "eager".
    """

    network: str
    key: str
    cosine: bool
    counts: dict[int, tuple[int, int]]
    compiles: bool = False


ENGINE_SETTINGS = (
    EngineSetting("lenet_dlg", "lenet", False, {1: (40, 200), 8: (10, 60), 64: (12, 30)}, compiles=True),
    EngineSetting("resnet20_4", "resnet", True, {1: (3, 20), 8: (1, 6)}),
)


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", tables=(*TABLES, *LIBRARY_TABLES), flags=("full",))
    if options.table in LIBRARY_TABLES:
        print_results("engine", LIBRARY_TABLES[options.table](options), {}, options)
        return
    wanted = (options.table,) if options.table else TABLES if "full" in options.flags else TABLES[:2]
    has_breaching = find_spec("breaching") is not None
    if not has_breaching:
        print("breaching is not installed, and left out; benchmarks/engine.py says how to install it")
    rows: list[ResultRow] = []
    summary: ResultRow = {}
    for setting in ENGINE_SETTINGS:
        if setting.key in wanted:
            rows += _measure_side_by_side(setting, has_breaching, summary, options)
    if "quality" in wanted:
        found, compared = _measure_equal_settings(has_breaching, options)
        rows, summary = rows + found, summary | compared
    print_results("engine", rows, summary, options)


def _measure_side_by_side(setting: EngineSetting, has_breaching: bool, summary: ResultRow, options: Options) -> list[ResultRow]:
    """Return one row of times for each number of images, and add the ratios of other programs' times to ours to `summary`.

    If our search is compiled, the ratios to the time of our uncompiled search are added as well. The other programs are the plain
    loop and, with `has_breaching`, breaching.
    """
    (_, cases, _), rows = make_image_cases(options, setting.network, max(setting.counts)), []
    for count, (quick, whole) in setting.counts.items():
        own = replace(setting, compiles=setting.compiles and (not options.quick or count == min(setting.counts)))
        row = _measure(own, cases[:count], quick if options.quick else whole, 1 if options.quick else 3, has_breaching, options)
        rows.append(row)
        for other in ("breaching", "loop") if has_breaching else ("loop",):
            key = f"{setting.key}{count}_{'speedup' if other == 'breaching' else 'over_loop'}"
            summary[key] = row[f"over_{other}"]
            if own.compiles:
                summary[f"{key}_eager"] = row[f"eager_over_{other}"]
    return rows


def _measure(
    setting: EngineSetting, cases: Sequence[Case], iterations: int, turns: int, has_breaching: bool, options: Options
) -> ResultRow:
    sides: dict[str, Callable[[int], None]] = {
        "ours": lambda steps: _run_ours(setting, cases, steps, options, compiled=setting.compiles),
        "loop": lambda steps: _run_loop(setting, cases, steps),
    }
    if setting.compiles:
        sides["eager"] = lambda steps: _run_ours(setting, cases, steps, options)
    elif setting.cosine:
        sides["bfloat16"] = lambda steps: _run_ours(setting, cases, steps, options, coarse=0.999)
    if has_breaching:
        sides["breaching"] = lambda steps: _run_breaching(setting, cases, steps)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    first = {name: _measure_time(run, 1) for name, run in sides.items()}  # loads code, and compiles
    for _ in range(turns):
        for name, run in sides.items():
            seconds[name].append((_measure_time(run, iterations + 1) - _measure_time(run, 1)) / (iterations * len(cases)))
    row = {"network": setting.network, "reconstructions": len(cases), "iterations": iterations}
    row |= {f"{name}_ms": 1e3 * median(each) for name, each in seconds.items()}
    for name in sides:
        if name != "ours":
            row[f"over_{name}"] = median(other / own for other, own in zip(seconds[name], seconds["ours"], strict=True))
        if setting.compiles and name not in ("ours", "eager"):
            row[f"eager_over_{name}"] = median(other / own for other, own in zip(seconds[name], seconds["eager"], strict=True))
    if setting.compiles:
        cost, gain = first["ours"] - _measure_time(sides["ours"], 1), row["eager_ms"] - row["ours_ms"]
        row |= {"compiling_cpu_seconds": cost, "pays_after": round(1e3 * cost / gain / len(cases)) if gain > 0 else "never"}
    return row


def _measure_time(run: Callable[[int], object], iterations: int) -> float:
    with measure_cpu() as clock:
        run(iterations)
    return clock.seconds


def _run_ours(
    setting: EngineSetting, cases: Sequence[Case], steps: int, options: Options, *, compiled: bool = False, coarse: float = 0.0
) -> None:
    attack = GradientMatching(
        name="engine",
        objective=Objective(distance=cosine if setting.cosine else euclidean),
        parametrisation=Parametrisation(init=normal_after_normalisation, boxed=setting.cosine),
        prior=Prior(tv=TV_WEIGHT if setting.cosine else 0.0),
        search=Search(
            optimiser=Adam(learning_rate=0.1, signed=setting.cosine, decay_at=(3 / 8, 5 / 8, 7 / 8) if setting.cosine else ()),
            steps=steps,
            stop=Stop(patience=steps + 1, decrease=0.0),
            compiled=compiled,
            coarse=coarse,
        ),
    )
    run_attack(attack, cases, options)


def _run_loop(setting: EngineSetting, cases: Sequence[Case], steps: int) -> None:
    """Reconstruct the cases by a plain loop in eager PyTorch, one after the other. Nothing is returned: only its time counts."""
    for case in cases:
        observation, label = case.observations[0], _read_label(case)
        model, target = _load_model(observation), _compute_gradient(observation)
        x = torch.rand(1, *observation.data.shape, generator=Generator().manual_seed(0)).requires_grad_()
        optimiser = torch.optim.Adam([x], lr=0.1)
        milestones = [int(share * steps) for share in (3 / 8, 5 / 8, 7 / 8)] if setting.cosine else []
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones)
        for _ in range(steps):
            loss = functional.cross_entropy(model(observation.data.normalise(x)), label)
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            if setting.cosine:
                distance = _compute_cosine_distance(gradients, target) + TV_WEIGHT * total_variation(x)
            else:
                distance = torch.stack([(f - t).square().sum() for f, t in zip(gradients, target, strict=True)]).sum()
            (x.grad,) = torch.autograd.grad(distance, x)
            if setting.cosine:
                x.grad.sign_()
            optimiser.step()
            schedule.step()
            if setting.cosine:
                x.data.clamp_(0, 1)


def _compute_cosine_distance(gradients: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    dot = torch.stack([(f * t).sum() for f, t in zip(gradients, target, strict=True)]).sum()
    squares = [torch.stack([g.square().sum() for g in side]).sum() for side in (gradients, target)]
    return 1 - dot / (squares[0] * squares[1]).sqrt()


def _run_breaching(
    setting: EngineSetting, cases: Sequence[Case], steps: int, *, tv: float | None = None, start: Tensor | None = None
) -> list[Tensor]:
    """Return breaching's reconstructions of the cases, in [0, 1]. breaching is given the labels, which saves it work.

    tv: weight of the total variation. None stands for the weight of breaching's configuration if the distance is the cosine
    distance, and for 0 if it is the squared distance.
    start: starting point of all searches (1, *shape), normalised; None for a random one.
    """
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        import breaching

        plain = ["objective.type=euclidean", "restarts.scoring=euclidean", "optim.signed=null", "optim.boxed=False"]
        plain += ["optim.step_size_decay=null", "regularization.total_variation.scale=0"]
        overrides = [f"optim.max_iterations={steps}", *([] if setting.cosine else plain)]
        overrides += [] if tv is None else [f"regularization.total_variation.scale={tv}"]
        settings = breaching.get_attack_config("invertinggradients", overrides)
        answers = []
        for case in cases:
            observation = case.observations[0]
            model, data = _load_model(observation), observation.data
            attacker = breaching.attacks.prepare_attack(model, nn.CrossEntropyLoss(), settings)
            public = SimpleNamespace(shape=data.shape, mean=data.mean, std=data.std, modality="vision")
            sent = {"parameters": list(model.parameters()), "buffers": list(model.buffers()), "metadata": public}
            metadata = {"num_data_points": 1, "labels": _read_label(case), "local_hyperparams": None}
            shared = {"gradients": _compute_gradient(observation), "buffers": None, "metadata": metadata}
            answer, _ = attacker.reconstruct([sent], [shared], {}, initial_data=start)
            answers.append(data.denormalise(answer["data"])[0].detach().clamp(0, 1))
    return answers


def _load_model(observation: Observation) -> nn.Module:
    model = build_network(observation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(observation.weights[name])
    return model


def _compute_gradient(observation: Observation) -> list[Tensor]:
    """Return the gradient in the order of the model's parameters: minus the update, of one step with learning rate 1."""
    return [-observation.update[name] for name, _ in _load_model(observation).named_parameters()]


def _read_label(case: Case) -> Tensor:
    """Return the label (1,) of a case of one example: the index of the smallest entry in the gradient of the last bias."""
    return _compute_gradient(case.observations[0])[-1].argmin()[None]


def _measure_equal_settings(has_breaching: bool, options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Reconstruct the same images by breaching and by our search with equal settings, and by our search also with layer weights.

    Returns one row each, with PSNR and CPU-seconds, and a summary. The summary holds the ratio of our CPU time to breaching's
    and, with intervals, two mean differences of PSNR: ours minus breaching's, and ours with layer weights minus ours without.
    If breaching is not installed, its row and the comparisons with it are left out.
    """
    count, steps = (2, 2) if options.quick else (QUALITY_IMAGES, QUALITY_STEPS)
    client, cases, truth = make_image_cases(options, "resnet20_4", count)
    start = _draw_start(client.data, options.seed)
    cases = [replace(case, known_labels=_read_label(case)) for case in cases]  # breaching is given the labels, too
    sides: dict[str, Callable[[], Tensor]] = {
        "breaching": lambda: torch.stack(_run_breaching(ENGINE_SETTINGS[1], cases, steps, tv=TV_WEIGHT, start=start)),
        "ours": lambda: _reconstruct(_make_equal_attack(steps, options.seed), cases, options),
        "ours, layer weights": lambda: _reconstruct(
            _make_equal_attack(steps, options.seed).copy_with(layers=weigh_by_depth(50)), cases, options
        ),
    }
    if not has_breaching:
        del sides["breaching"]
    rows, quality, seconds = [], {}, {}
    for name, run in sides.items():
        with measure_cpu() as clock:
            quality[name] = psnr(run().clamp(0, 1), truth)
        seconds[name] = clock.seconds
        each = " ".join(f"{value:.1f}" for value in quality[name].tolist())
        row = {"network": "resnet20_4", "attack": name, "images": count, "iterations": steps, "psnr": float(quality[name].mean())}
        rows.append(row | {"each": each, "seconds": clock.seconds})
        print(rows[-1], flush=True)
    compared = _average_differences("layer_weights_db", quality["ours, layer weights"] - quality["ours"])
    if has_breaching:
        compared |= {"resnet_equal_time": seconds["ours"] / seconds["breaching"]}
        compared |= _average_differences("resnet_equal_quality_db", quality["ours"] - quality["breaching"])
    return rows, compared


def _average_differences(name: str, differences: Tensor) -> ResultRow:
    """Return a dict with the mean of differences (N,), one per image, under `name`, and its 95 % interval by Student's t.

    The ends of the interval are under NAME_low and NAME_high.
    """
    half = float(student.ppf(0.975, len(differences) - 1) * differences.std() / len(differences) ** 0.5)
    mean = float(differences.mean())
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


def _draw_start(data: DataSpec, seed: int) -> Tensor:
    """Return standard normal noise (1, *shape) in normalised units, the starting point for every image and program."""
    return torch.randn(1, *data.shape, generator=Generator().manual_seed(seed))


def _make_equal_attack(steps: int, seed: int) -> GradientMatching:
    """Return our Inverting Gradients with the settings and the start that breaching gets."""
    return GradientMatching(
        name="engine",
        objective=Objective(distance=cosine),
        parametrisation=Parametrisation(init=lambda data, labels, rng: data.denormalise(_draw_start(data, seed)), boxed=True),
        prior=Prior(tv=TV_WEIGHT),
        search=Search(optimiser=Adam(learning_rate=0.1, signed=True), steps=steps, stop=Stop(patience=steps + 1, decrease=0.0)),
    )


def _reconstruct(attack: GradientMatching, cases: Sequence[Case], options: Options) -> Tensor:
    return torch.cat([answer.x for answer in run_attack(attack, cases, options)[0]])


if __name__ == "__main__":
    main()
