"""Tests with networks by other authors: each is imported, attacked and reported on, and its gradients are compared with PyTorch.

The networks (support/foreign/networks.py) are of plain PyTorch and torchvision. For each, a step of SGD on one random example
is imported from two state dicts, three attacks run a few iterations beside their nulls, and after each attack the report is
written. Import, attacks and reports use the commands that users call. `attacked` is the share of (network, attack) pairs for
which import, attack and report ran without an error.

`gradient_error` is the largest relative error, over networks, of the gradient that attacks compare with the observed one. The
reference is `torch.autograd.grad` through a copy of the network in evaluation mode, three examples, float64. The largest error
is taken over the ways in which a search can compute gradients of the network, which the column `route` lists: batched over
reconstructions (`at_once`), one by one with torch.func, or with plain PyTorch.

`literal_quickstart` is about the app of Flower's quickstart with one step on one example, as in the table `quickstart`: the PSNR
of the reconstruction of one client's image minus that of the null, in dB. It is only measured if no table or network is selected.

`seconds` is the CPU time of a network's import, attacks, nulls and reports. The tables are `small` and `torchvision`; without
the name of a table, both run. With `--quick` and no name, only `small` runs, without its largest network, and `torchvision` is
left out; with `--quick` and the name of a table, that table runs, `small` again without its largest network. The name of one
network selects it alone. Each row is also written to standard error when it is done, so that after an interruption the networks
that are left can be run by name. The table `quickstart` has the app alone, with the template's settings and with one step on one
example (support/foreign/quickstart.py).
"""

import copy
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Mapping
from math import hypot
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.contract import Options, measure_cpu, parse_options, print_results
from support.foreign import networks, quickstart
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from typer.testing import CliRunner

from attacker.attacks.gradients.convolutions import to_channels_last
from attacker.attacks.gradients.vectorised import build_per_problem
from attacker.attacks.simulation.gradients import build_gradient, explain_vmap_failure
from attacker.cli import app as attacker
from fedsim.cli import app as fedsim
from fedsim.recording import DataSpec

LEARNING_RATE = 0.1
NUM_EXAMPLES = 3
IMAGE_ATTACKS = {"inverting_gradients": {"steps": 3}, "cpl": {"steps": 2}, "dlg": {"steps": 2}}
TABULAR_ATTACKS = {"idlg": {"steps": 2}, "cpl": {"steps": 2}, "dlg": {"steps": 2}}
NETWORK_TABLES = {"small": networks.SMALL_NETWORKS, "torchvision": networks.TORCHVISION_NETWORKS}
NETWORKS = {name: shape for table in NETWORK_TABLES.values() for name, shape in table.items()}
LARGEST_NETWORK = "MnistNet"


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", tables=(*NETWORK_TABLES, "quickstart", *NETWORKS))
    if options.table == "quickstart":
        print_results("quickstart", *quickstart.measure_quickstart(options), options)
        return
    logging.getLogger("attacker").setLevel(logging.ERROR)  # the table states why plain PyTorch is used
    rows = []
    for name in _list_networks(options):
        rows.append(_measure_network(name, *NETWORKS[name], options))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    pairs = sum(row["attacks"] for row in rows)
    summary = {
        "attacked": sum(row["attacked"] for row in rows) / pairs,
        "gradient_error": max(row["gradient_error"] for row in rows),
        "networks": len(rows),
        "seconds": sum(row["seconds"] for row in rows),
    }
    if options.table is None:
        summary["literal_quickstart"] = _measure_surplus(options)
    print_results("foreign", rows, summary, options)


def _measure_surplus(options: Options) -> float:
    setting = quickstart.make_one_step(attacked=1, iterations=150 if options.quick else 1200)
    (row,) = quickstart.measure_settings([setting], quickstart.draw_images(options), options)
    return float(row["surplus"])


def _list_networks(options: Options) -> list[str]:
    """Return the names of the networks to measure: the one that was named, or those of the table that was named, or all.

    With --quick, `LARGEST_NETWORK` is left out of its table (`small`), and if nothing was named only `small` is measured.
    """
    if options.table in NETWORKS:
        return [options.table]
    table = "small" if options.quick and options.table is None else options.table
    names = list(NETWORK_TABLES[table] if table else NETWORKS)
    return [name for name in names if not (options.quick and name == LARGEST_NETWORK)]


def _measure_network(name: str, shape: tuple[int, ...], classes: int, options: Options) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    model, data = getattr(networks, name)().eval(), DataSpec(shape=shape, num_classes=classes)
    error, route = _measure_gradient_error(model, data, options.seed)
    attacks = IMAGE_ATTACKS if data.is_image else TABULAR_ATTACKS
    with tempfile.TemporaryDirectory() as folder, measure_cpu() as clock:
        done, failure = attack_imported(name, model, data, attacks, Path(folder), options.device)
    return {
        "network": name,
        "input": "x".join(map(str, shape)),
        "weights": sum(p.numel() for p in model.parameters()),
        "attacks": len(attacks),
        "attacked": done,
        "gradient_error": error,
        "route": route,
        "seconds": clock.seconds,
        "failure": failure,
    }


def _measure_gradient_error(model: nn.Module, data: DataSpec, seed: int) -> tuple[float, str]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(NUM_EXAMPLES, *data.shape, generator=rng).double()
    y = torch.randint(data.num_classes, (NUM_EXAMPLES,), generator=rng)
    model = copy.deepcopy(model).double()
    reference = _reference(model, x, y)
    weights = {name: to_channels_last(p.detach()) for name, p in model.named_parameters()}
    buffers = {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    route = "plain PyTorch" if explain_vmap_failure(model, data, "cross_entropy") else "torch.func"
    errors = [_compute_relative_error(build_gradient(model, data)(weights, x, y, buffers), reference)]
    batched = build_per_problem(model, data, "cross_entropy")
    if batched is not None:
        computed = batched(weights, torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)]), buffers)
        errors += [_compute_relative_error({name: g[i] for name, g in computed.items()}, reference) for i in range(2)]
    return max(errors), f"at_once, {route}" if batched is not None else route


def _reference(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    with sdpa_kernel([SDPBackend.MATH]):
        gradient = torch.autograd.grad(functional.cross_entropy(own(x), y), list(own.parameters()))
    return dict(zip((name for name, _ in own.named_parameters()), gradient, strict=True))


def _compute_relative_error(computed: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    off = hypot(*(float(torch.linalg.vector_norm(computed[name].detach() - g)) for name, g in expected.items()))
    return off / hypot(*(float(torch.linalg.vector_norm(g)) for g in expected.values()))


def attack_imported(
    name: str, model: nn.Module, data: DataSpec, attacks: Mapping[str, Mapping[str, int]], folder: Path, device: str
) -> tuple[int, str]:
    """Import one training step of a network, attack it and write the report, by the commands that users call.

    name: of the function in `support.foreign.networks` that builds `model`. attacks: dict from the name of an attack to its
    arguments. folder: empty folder for files.
    Returns the number of attacks that ran without an error, and text on the first error, "" if there was none: the first line of
    its message, after the name of the attack if the import succeeded.
    """
    reference = f"support.foreign.networks:{name}"
    try:
        _save_step(model, data, folder)
        (folder / "settings.toml").write_text(
            f'num_examples = 1\n[model]\nname = "{reference}"\n[training]\nlearning_rate = {LEARNING_RATE}\nbatch_size = 1\n'
            f'steps = 1\nmode = "eval"\n[data]\nshape = {list(data.shape)}\nnum_classes = {data.num_classes}\n'
        )
        paths = [str(folder / part) for part in ("before.safetensors", "after.safetensors")]
        settings = str(folder / "settings.toml")
        _call_command(fedsim, "import", *paths, "--settings", settings, "--out", str(folder / "run"), "--model", reference)
    except Exception as error:  # a failure is a row of the table
        return 0, _read_first_line(error)
    done, failure = 0, ""
    for attack, arguments in attacks.items():
        given = [part for key, value in arguments.items() for part in ("--set", f"{key}={value}")]
        try:
            run = ("replay", str(folder / "run"), "--attack", attack, *given, "--model", reference, "--device", device)
            _call_command(attacker, *run, "--workers", "1")
            _call_command(attacker, "report", str(folder / "run"))
            done += 1
        except Exception as error:
            failure = failure or f"{attack}: {_read_first_line(error)}"
    return done, failure


def _save_step(model: nn.Module, data: DataSpec, folder: Path) -> None:
    """Save the state dicts before and after one step of SGD on one example, computed by plain PyTorch, to `folder`."""
    before = {name: t.clone().contiguous() for name, t in model.state_dict().items()}
    own = copy.deepcopy(model)
    optimiser = torch.optim.SGD(own.parameters(), lr=LEARNING_RATE)
    x = torch.rand(1, *data.shape, generator=torch.Generator().manual_seed(7))
    functional.cross_entropy(own(x), torch.tensor([1])).backward()
    optimiser.step()
    save_file(before, folder / "before.safetensors")
    save_file({name: t.detach().clone().contiguous() for name, t in own.state_dict().items()}, folder / "after.safetensors")


def _call_command(command: Any, *arguments: str) -> None:
    result = CliRunner().invoke(command, list(arguments))
    if result.exit_code:
        output = " ".join(result.output.split()) or "".join(traceback.format_exception(result.exception))
        raise RuntimeError(f"{arguments[0]}: {output[-300:]}")


def _read_first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))  # of worker processes, too
    main()
