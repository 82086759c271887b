"""The table `scale` of rounds.py: time and memory of linking and of the attack `spans` on up to 10,000 observations.

Each of the clients trains an MLP on one batch a round, in shuffled epochs over images of uniform noise, since only sizes matter
here. The rounds are recorded as files. Linking and the command `attacker replay` then run in processes of their own.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from support.contract import Options, ResultRow, measure_cpu, read_peak_memory
from support.matches import count_exact
from support.rounds.federation import average, make_mlp_client
from support.single_cases import LocalClient
from support.splits import Images
from torch import Generator, Tensor

from attacker.attacks import Case, accumulate
from attacker.attacks.linking import link
from attacker.attacks.multi_round.descriptions import Describer
from attacker.reconstruction import Reconstruction
from defenses import DefenseSpec
from fedsim.recording import DataSpec, Manifest, Recorder, Recording, Reply, Training
from fedsim.recording.codec import encode

SIZES = ((10, 30), (10, 100), (30, 100), (100, 100))
"""Clients and rounds of each row."""
EXAMPLES, BATCH, HIDDEN, SIDE, CLASSES = 64, 4, 64, 14, 10
"""Examples of each client and of each batch, neurons of the first layer, side of the images, and classes."""
DATA = DataSpec(shape=(1, SIDE, SIDE), num_classes=CLASSES)


def make_scale_rows(options: Options) -> Iterator[ResultRow]:
    """Yield a row for each size of a federation: CPU-seconds, milliseconds of CPU per pair of rounds, and peak memory in MB.

    pairs: pairs of rounds of one client, over all clients. pairs_by_labels: number of these pairs whose batches have a true label
    in common.
    spans_*: of the command `attacker replay --attack spans`. linking_*: of describing rounds by features and linking them.
    exact: share of the first client's images that `spans` recovers above 60 dB.
    """
    for clients, rounds in ((2, 10), (2, 20)) if options.quick else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder)
            first, pairs, by_labels = record_clients(run, clients, rounds, options.seed)
            spans = _replay(run, options.seed)
            found = _count_first(run, first)
            linking = _run_apart(_link_clients, run, options.seed)
        row = {
            "clients": clients,
            "rounds": rounds,
            "observations": clients * rounds,
            "pairs": pairs,
            "pairs_by_labels": by_labels,
        }
        for name, (seconds, peak) in (("spans", spans), ("linking", linking)):
            row |= {f"{name}_seconds": seconds, f"{name}_ms_per_pair": 1e3 * seconds / pairs, f"{name}_peak_mb": peak}
        row["exact"] = found
        print(row, file=sys.stderr, flush=True)
        yield row


def record_clients(folder: Path, clients: int, rounds: int, seed: int) -> tuple[Images, int, int]:
    """Record a federation; return client 0's images, the number of pairs of rounds, and the number of pairs that share a label.

    A pair is two rounds of one client; it shares a label if some label occurs in the batches of both rounds.
    The mean of all updates of a round is added to the global weights. The recording is written to `recording` in `folder`.
    """
    rng = Generator().manual_seed(seed)
    images = [
        Images(
            "noise", torch.rand(EXAMPLES, *DATA.shape, generator=rng), torch.randint(CLASSES, (EXAMPLES,), generator=rng), DATA
        )
        for _ in range(clients)
    ]
    orders = [torch.cat([torch.randperm(EXAMPLES, generator=rng) for _ in range(rounds * BATCH // EXAMPLES + 1)]) for _ in images]
    batches = [list(islice(order.split(BATCH), rounds)) for order in orders]
    client = make_mlp_client(DATA, Training(learning_rate=0.02, batch_size=BATCH, steps=1), hidden=HIDDEN, seed=seed)
    _record(folder / "recording", client, images, batches)
    used = torch.zeros(clients, rounds, CLASSES)
    for i, own in enumerate(batches):
        for t, rows in enumerate(own):
            used[i, t, images[i].y[rows]] = 1
    common = (used @ used.transpose(1, 2) > 0).sum() - clients * rounds
    return images[0], clients * rounds * (rounds - 1) // 2, int(common) // 2


def _record(folder: Path, client: LocalClient, images: list[Images], batches: list[list[Tensor]]) -> None:
    manifest = Manifest(
        name="scale", model=client.model, data=client.data, training=client.training, defense=DefenseSpec(), software={}
    )
    recorder = Recorder(folder, manifest)
    names = [f"c{i:03d}" for i in range(len(images))]
    for number, rows in enumerate(zip(*batches, strict=True), start=1):
        recorder.record_sent(number, client.weights)
        updates = [client.compute_update([(own.x[chosen], own.y[chosen])]) for own, chosen in zip(images, rows, strict=True)]
        for name, update in zip(names, updates, strict=True):
            recorder.record_reply(number, Reply(client=name, node="", payload=encode(update), num_examples=BATCH))
        recorder.commit(number, names)
        client = client.add(average(updates))


def _replay(run: Path, seed: int) -> tuple[float, float]:
    """Run `attacker replay --attack spans` on a run with one worker, and return its CPU-seconds and its peak memory in MB.

    The new process writes its own peak at its end, since the peak that the system reports includes memory of this process.
    """
    status_file = run / "status"
    save_status = f"lambda: Path({str(status_file)!r}).write_text(Path('/proc/self/status').read_text())"
    command = [
        sys.executable,
        "-c",
        f"import atexit; from pathlib import Path; atexit.register({save_status}); from attacker.cli import main; main()",
        "replay",
        str(run),
        "--attack",
        "spans",
        "--no-null",
        "--workers",
        "1",
    ]
    started = subprocess.Popen([*command, "--threads", "1", "--seed", str(seed)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    if started.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {started.returncode}")
    return used.ru_utime + used.ru_stime, read_peak_memory(status_file.read_text())


def _count_first(run: Path, first: Images) -> float:
    """Return the share of the first client's images that `spans` recovered above 60 dB."""
    (path,) = (run / "reconstructions").glob("*/*c000*.safetensors")
    return count_exact(Reconstruction.read(path), first.x) / len(first)


def _run_apart(work: Any, *arguments: Any) -> tuple[float, float]:
    """Call a function in a new process, and return its CPU-seconds and the process's peak memory in MB."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_report_use, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    seconds, peak = ours.recv()
    process.join()
    return seconds, peak


def _report_use(pipe: Any, work: Any, arguments: tuple[Any, ...]) -> None:
    with measure_cpu() as clock:
        work(*arguments)
    pipe.send((clock.seconds, read_peak_memory()))


def _link_clients(run: Path, seed: int) -> None:
    """Describe the rounds of each client by labels and features, and link them, as `accumulate(compare="features")` does."""
    recording = Recording(run / "recording")
    describer = Describer(accumulate(compare="features").matching, "features", 50, "cpu")
    for client in sorted({row.client for row in recording.read_rows()}):
        case = Case(tuple(recording.read_observations(clients={client})))
        described = describer(case, Generator().manual_seed(seed), None, None)
        link(described, batch_size=BATCH)
