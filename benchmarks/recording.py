"""The cost of recording for a federation, and how it depends on the number of clients and rounds.

python benchmarks/recording.py            ResNet-18, 10 clients, 2 steps of 16 images: recording compared with plain Flower FedAvg
python benchmarks/recording.py --scale    1,000 clients, 200 rounds in one process; 100 clients on Ray; queries of the index
python benchmarks/recording.py --accuracy 20 clients, Dirichlet(0.5): accuracy of ResNet-18 with and without recording
python benchmarks/recording.py --codecs   ResNet-18's update after defenses: bytes relative to the dense codec's, CPU time
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from support import splits
from support.codecs import measure_codecs
from support.contract import Options, parse_options, print_results, read_peak_memory
from support.recording_scale import measure_scale

from fedsim import data as datasets
from fedsim import models
from fedsim.client.identity import load_or_draw
from fedsim.config.experiment import Experiment, validate
from fedsim.data.partition import split
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import ModelSpec
from fedsim.server import record

NUM_CLIENTS, LOCAL_STEPS, BATCH_SIZE = 10, 2, 16


def write_images(options: Options, folder: Path, needed: int, held_out: int) -> str:
    """Write `needed` images for training and `held_out` images for tests to files in `folder`.

    All are different CIFAR-10 images or, without CIFAR-10 in --data, embedded photographs. Photographs repeat if there are too
    few, so that a photograph may be both in the training images and in the held-out images.
    Returns the name of these data for an experiment, "npz:TRAIN,TEST".
    """
    drawn = splits.load_images(options, "cifar10", needed + held_out)
    drawn.take_first(needed).write(folder / "train.npz")
    drawn.of(range(needed, len(drawn))).write(folder / "test.npz")
    return f"npz:{folder}/train.npz,{folder}/test.npz"


def make_experiment(data: str, rounds: int, seed: int) -> Experiment:
    training = {"learning_rate": 0.05, "batch_size": BATCH_SIZE, "steps": LOCAL_STEPS, "mode": "train", "buffers": "shared"}
    raw = {
        "seed": seed,
        "rounds": rounds,
        "model": "resnet18",
        "data": data,
        "clients": {"count": NUM_CLIENTS},
        "training": training,
    }
    return validate(raw, source="benchmark")


def run_recorded(data: str, rounds: int, seed: int, out: Path, done: Callable[[], None]) -> None:
    """Run our federation with recording. done: called after the evaluation of the initial weights, and after each round."""
    run = FederationRun(experiment=make_experiment(data, rounds, seed), out=out, device="cpu", client_seed=seed)
    engine.set_verbosity(False)
    engine.run(run, engine="local", on_round=lambda row: done())


def run_plain(data: str, rounds: int, seed: int, out: Path, done: Callable[[], None]) -> None:
    """Run the same federation as `run_recorded` in plain Flower, without recording, for comparison.

    The numbers of clients, rounds, steps and examples are equal. The strategy is FedAvg, with clients that use a torch optimiser
    and send a state dict.
    done: called after the evaluation of the initial weights, and after each round.
    """
    e = make_experiment(data, rounds, seed)
    loaded = datasets.load(e.data.name)
    parts = split(loaded.train, NUM_CLIENTS, seed=seed, name="iid")
    network = models.build(FederationRun(experiment=e, out=out).make_model_spec(), loaded.spec, seed=seed)
    app, server = ClientApp(), ServerApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        network.train()
        optimiser = torch.optim.SGD(network.parameters(), lr=e.training.learning_rate)
        mine = parts[int(context.node_config["partition-id"])]
        for step in range(LOCAL_STEPS):
            x, y = loaded.train[mine[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]]
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimiser.step()
        metrics = MetricRecord({"num-examples": LOCAL_STEPS * BATCH_SIZE})
        return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=NUM_CLIENTS, min_train_nodes=NUM_CLIENTS)
        x, y = loaded.test[:]

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
            network.load_state_dict(arrays.to_torch_state_dict())
            network.eval()
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(network(x), y).item()
            done()
            return MetricRecord({"loss": loss})

        strategy.start(
            grid, ArrayRecord(network.state_dict()), num_rounds=rounds, train_config=ConfigRecord(), evaluate_fn=evaluate
        )

    engine.set_verbosity(False)
    engine.run_local(server, app, NUM_CLIENTS)


RUN_FUNCTIONS = {"plain": run_plain, "recorded": run_recorded}


def _run_stepwise(way: str, data: str, rounds: int, seed: int, out: str, turn: Any) -> None:
    """Run a federation in a child process, pausing after the evaluation of the initial weights and after each round.

    way: key of `RUN_FUNCTIONS`. turn: connection to the parent process. Before each pause, three numbers are sent through `turn`:
    the wall time and the CPU time in seconds since the end of the previous pause (before the first pause: since this function was
    called), and the process's peak memory so far in MB.
    The run goes on when the parent answers.
    """
    torch.set_num_threads(1)
    clock = [time.perf_counter(), time.process_time()]

    def send_turn() -> None:
        seconds = time.perf_counter() - clock[0], time.process_time() - clock[1]
        turn.send((*seconds, read_peak_memory()))
        turn.recv()
        clock[:] = time.perf_counter(), time.process_time()

    RUN_FUNCTIONS[way](data, rounds, seed, Path(out), send_turn)


def measure_cost(options: Options) -> None:
    """Measure plain Flower and our recording federation in processes that run a round each in turn, and print a table."""
    rounds = 2 if options.quick else 8
    with tempfile.TemporaryDirectory() as scratch:
        data = write_images(options, Path(scratch), NUM_CLIENTS * LOCAL_STEPS * BATCH_SIZE, BATCH_SIZE)
        context = multiprocessing.get_context("spawn")
        turns, processes = {}, []
        for way in RUN_FUNCTIONS:
            turns[way], theirs = context.Pipe()
            arguments = (way, data, rounds, options.seed, f"{scratch}/{way}", theirs)
            processes.append(context.Process(target=_run_stepwise, args=arguments))
            processes[-1].start()
            theirs.close()  # so that a process that dies is noticed
            turns[way].recv()  # round 0: all is loaded, the initial weights are evaluated
        rows = []
        for number in range(1, rounds + 1):
            row: dict[str, Any] = {"round": number}
            for way, turn in turns.items():
                turn.send("go")
                row[f"{way}_seconds"], row[f"{way}_cpu"], row[f"{way}_peak_mb"] = turn.recv()
            rows.append(row)
        for turn in turns.values():
            with suppress(BrokenPipeError):
                turn.send("end")
        for process in processes:
            process.join()
    steady = rows[1:] or rows
    pairs = [(row["plain_seconds"], row["recorded_seconds"]) for row in steady]
    summary = {
        "overhead": median(b for _, b in pairs) / median(a for a, _ in pairs),
        "overhead_cpu": median(row["recorded_cpu"] for row in steady) / median(row["plain_cpu"] for row in steady),
        "added_seconds": median(b - a for a, b in pairs),
        "extra_peak_mb": rows[-1]["recorded_peak_mb"] - rows[-1]["plain_peak_mb"],
        "update_mb": 4 * 11.17,
    }
    print_results("recording", rows, summary, options)


# --- the same training with and without ---

NUM_TRAINED, NUM_HELD_OUT = 2000, 500


def make_learning_experiment(data: str, rounds: int, seed: int) -> Experiment:
    training = {"learning_rate": 0.05, "batch_size": 10, "epochs": 1, "mode": "train", "buffers": "shared"}
    named = {"partition": {"name": "dirichlet", "alpha": 0.5}, "clients": {"count": 20}, "model": "resnet18", "data": data}
    return validate({"seed": seed, "rounds": rounds, "training": training, **named}, source="benchmark")


def _learn_recorded(e: Experiment, out: Path, seed: int) -> list[float]:
    accuracies: list[float] = []
    torch.set_num_threads(1)
    engine.set_verbosity(False)
    run = FederationRun(experiment=e, out=out / "run", device="cpu", client_seed=seed)
    engine.run(run, engine="local", on_round=lambda row: accuracies.append(row["accuracy"]))
    return accuracies


def _learn_plain(e: Experiment, out: Path, seed: int, *, recorded: bool) -> list[float]:
    """Train in plain Flower, with the same batches in the same order as ours and torch.optim.SGD; return accuracies.

    The first accuracy is that of the initial weights, and one follows for each round.
    recorded: whether to wrap the strategy by `record`, the one line that records an app.
    """
    torch.set_num_threads(1)
    loaded = datasets.load(e.data.name)
    count = e.clients.count
    parts = split(loaded.train, count, seed=e.seed, name=e.partition.name, **e.partition.arguments)
    network = models.build(FederationRun(experiment=e, out=out).make_model_spec(), loaded.spec, seed=e.seed)
    app, server, accuracies = ClientApp(), ServerApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number, round = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
        identity = load_or_draw(out / "clients" / str(number), number, seed=seed)
        mine = parts[number]
        order = identity.draw_order(round - 1, len(mine), shuffle=True)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        network.train()
        optimiser = torch.optim.SGD(network.parameters(), lr=e.training.learning_rate)
        for start in range(0, len(mine), e.training.batch_size):
            x, y = loaded.train[mine[order[start : start + e.training.batch_size]]]
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimiser.step()
        metrics = MetricRecord({"num-examples": len(mine)})
        return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        network.load_state_dict(arrays.to_torch_state_dict())
        network.eval()
        x, y = loaded.test[:]
        with torch.no_grad():
            accuracies.append((network(x).argmax(1) == y).float().mean().item())
        return MetricRecord({"accuracy": accuracies[-1]})

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy: Strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=count, min_train_nodes=count)
        if recorded:
            spec = ModelSpec(name=e.model.name)
            strategy = record(strategy, out / "recorded", model=spec, training=e.training, data=loaded.spec)
        strategy.start(grid, ArrayRecord(network.state_dict()), num_rounds=e.rounds, evaluate_fn=evaluate)

    engine.set_verbosity(False)
    engine.run_local(server, app, count)
    return accuracies


def measure_accuracy(options: Options) -> None:
    torch.set_num_threads(1)
    rounds, share = (2, 10) if options.quick else (12, 1)
    with tempfile.TemporaryDirectory() as scratch:
        data = write_images(options, Path(scratch), NUM_TRAINED // share, NUM_HELD_OUT // share)
        e = make_learning_experiment(data, rounds, options.seed)
        ways = {"plain": _learn_plain, "recorded": partial(_learn_plain, recorded=True), "ours": _learn_recorded}
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            running = {name: pool.submit(way, e, Path(scratch) / name, options.seed) for name, way in ways.items()}
            results = {name: future.result() for name, future in running.items()}
    rows = [{"round": number, **{name: own[number] for name, own in results.items()}} for number in range(rounds + 1)]
    last = rows[-1]
    summary = {name: 100 * abs(last[name] - last["plain"]) for name in ("recorded", "ours")}
    print_results("recording --accuracy", rows, summary, options)


TABLES = {"scale": measure_scale, "accuracy": measure_accuracy, "codecs": measure_codecs}


if __name__ == "__main__":
    options = parse_options(__doc__ or "", flags=tuple(TABLES))
    next((measure for flag, measure in TABLES.items() if flag in options.flags), measure_cost)(options)
