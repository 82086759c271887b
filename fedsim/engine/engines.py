"""Engines: execution of an experiment on Ray, in this process, or on a deployment (processes that communicate over a network)."""

import copy
import logging
import os
import random
import threading
import uuid
from collections.abc import Iterable
from typing import Any, Literal, TypeGuard, get_args

import torch
from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

from fedsim.deployment import runner as running
from fedsim.deployment.commands import Link
from fedsim.deployment.flower_commands import OnWords
from fedsim.deployment.runner import OnRound
from fedsim.engine.apps import make_client_app, make_server_app
from fedsim.engine.run import FederationRun

Engine = Literal["ray", "local", "deployment"]


class EngineError(RuntimeError):
    """Error for a federation that fails; the message states the reason."""


def run(
    experiment: FederationRun,
    *,
    engine: Engine = "ray",
    client_cpus: float = 1,
    client_gpus: float | None = None,
    superlink: Link | None = None,
    on_round: OnRound | None = None,
    on_words: OnWords | None = None,
    verbose: bool = False,
) -> None:
    """Run a federation until it has finished.

    engine:                   "ray" for Flower's simulation, "local" for this process, one client after the other, or "deployment"
                              for processes that communicate over a network.
    client_cpus, client_gpus: resources of one client; for "ray" only. If `client_gpus` is None, all clients that run at once
                              share the GPUs equally.
    superlink:                connection to an existing deployment; for "deployment" only. Without it, processes are started on
                              this machine.
    on_round:                 called with the row of metrics, a dict, of each round. For an existing deployment, only if the run's
                              folder is on this machine.
    on_words:                 called with each line in which a server warns of missing clients, missing replies or failures; for
                              "deployment" only.
    verbose:                  whether to show Flower's log messages.
    Raises ValueError or FileNotFoundError if the engine is unknown or the experiment does not suit its data or network. Raises
    EngineError if the federation fails, for example because the disk becomes full, or requires more CPUs or GPUs than there are.
    A folder that holds another run, or an unfinished one that is not to be resumed, raises ValueError or EngineError. Raises
    OSError if the run cannot be written for another reason than a disk that becomes full.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"unknown engine {engine!r}; write one of {', '.join(get_args(Engine))}")
    set_verbosity(verbose)
    experiment.check()
    if engine == "deployment":
        run_deployment(experiment, superlink, on_round, on_words)
        return
    if engine == "ray":
        resources = _make_resources(client_cpus, client_gpus)
    experiment = experiment.settle()
    server, clients = make_server_app(lambda _: experiment, on_round), make_client_app(lambda _: experiment)
    count = experiment.experiment.clients.count
    if engine == "local":
        run_local(server, clients, count)
    else:
        run_ray(server, clients, count, resources, verbose=verbose)


def set_verbosity(verbose: bool) -> None:
    """Show Flower's log messages from level INFO on, or hide all but critical ones."""
    logging.getLogger("flwr").setLevel(logging.INFO if verbose else logging.CRITICAL)


def _make_resources(cpus: float, gpus: float | None) -> dict[str, float]:
    """Return Ray's resources of one client, {"num_cpus": cpus, "num_gpus": gpus}.

    gpus: None shares the GPUs, if there are any, equally among as many clients as the CPUs can run at once.
    Raises EngineError if this machine has fewer CPUs or GPUs than one client requires, or if a number is negative or `cpus` is 0.
    """
    have_cpus, have_gpus = os.cpu_count() or 1, torch.cuda.device_count()
    if cpus <= 0 or cpus > have_cpus:
        raise EngineError(f"--client-cpus must be above 0 and at most {have_cpus}, the CPUs of this machine, got {cpus:g}")
    if gpus is None:
        gpus = have_gpus / max(1, int(have_cpus // cpus)) if have_gpus else 0.0
    if gpus < 0 or gpus > have_gpus:
        raise EngineError(f"--client-gpus must be from 0 to {have_gpus}, the GPUs of this machine, got {gpus:g}")
    return {"num_cpus": cpus, "num_gpus": gpus}


def run_ray(server: ServerApp, clients: ClientApp, count: int, resources: dict[str, float], *, verbose: bool) -> None:
    """Run the apps with `count` clients on Flower's Ray simulation.

    resources: of one client, {"num_cpus": ..., "num_gpus": ...}. verbose: whether to show the log messages of Ray's processes.
    Raises OSError if the operating system reports an error to the server, such as missing permission, and EngineError if the
    federation fails for another reason. A disk that becomes full during the rounds also raises EngineError, since the server of
    `make_server_app` replaces the system's error by DiskFull.
    """
    from flwr.simulation import run_simulation

    level = logging.INFO if verbose else logging.ERROR
    # a new cluster: otherwise Ray joins one that runs on this machine, or waits for one that has ended
    initialise: dict[str, Any] = {
        "address": "local",
        "log_to_driver": verbose,
        "logging_level": level,
        "include_dashboard": False,
    }
    try:
        run_simulation(
            server_app=server,
            client_app=clients,
            num_supernodes=count,
            backend_config={"init_args": initialise, "client_resources": resources},  # type: ignore[dict-item]
        )
    except RuntimeError as error:
        if _is_system_error(error.__cause__):
            raise error.__cause__ from error
        raise EngineError(str(error.__cause__ or error)) from error


def run_local(server: ServerApp, clients: ClientApp, count: int) -> None:
    """Run the apps with `count` clients in this process, one client after the other.

    Raises OSError if the operating system reports an error to the server, such as missing permission, and EngineError if the
    federation fails for another reason. A disk that becomes full during the rounds also raises EngineError, since the server of
    `make_server_app` replaces the system's error by DiskFull.
    """
    grid = LocalGrid(clients, count)
    context = Context(run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config={})
    try:
        server(grid, context)
    except Exception as error:
        if _is_system_error(error):
            raise
        raise EngineError(str(error)) from error


def _is_system_error(error: BaseException | None) -> TypeGuard[OSError]:
    """Return whether the operating system reported the error; the server's TimeoutError for missing clients has no errno."""
    return isinstance(error, OSError) and error.errno is not None


def run_deployment(experiment: FederationRun, superlink: Link | None, on_round: OnRound | None, on_words: OnWords | None) -> None:
    """Run an experiment on an existing SuperLink, or on processes that are started on this machine if `superlink` is None.

    on_round: called with the row of metrics of each round if the run's folder is on this machine.
    on_words: called with each line in which the server warns of missing clients, missing replies or failures.
    Raises EngineError if the federation fails, and ValueError if processes are to be started and the run's folder does not suit.
    """
    public, resume = experiment.locations.public, superlink is None or experiment.resume
    if superlink is None:
        experiment = experiment.settle()
        experiment.prepare()
    settings = experiment.experiment.to_toml()
    config = running.make_run_config(
        settings, experiment.out, device=experiment.device, threads=experiment.threads, public=public, resume=resume
    )
    try:
        if superlink is not None:
            running.run_on(superlink, config, on_round=on_round, on_words=on_words)
        else:
            count, seed = experiment.experiment.clients.count, experiment.client_seed
            running.run_natively(config, experiment.out, count, seed=seed, on_round=on_round, on_words=on_words)
    except running.DeploymentFailed as error:
        raise EngineError(str(error)) from error


class LocalGrid(Grid):
    """A Flower grid, the server's connection to clients, that calls the clients in this process with copies of the messages.

    config: the run config that clients see; by default empty.
    Node ids are the same in every run. One client runs at a time: Flower's older interface sends messages from several threads,
    in which clients would draw from the same random numbers, and CPython 3.11 at times fails to read arrays (SystemError).
    """

    def __init__(self, clients: ClientApp, count: int, config: UserConfig | None = None) -> None:
        ids = random.Random(0)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = ids.getrandbits(62), 1, 1
        self._run = FlowerRun.create_empty(run_id=TaskIdentity.run_id)
        self._clients = clients
        self._contexts = {
            (node := ids.getrandbits(62)): Context(
                run_id=self._run.run_id,
                node_id=node,
                node_config={"partition-id": partition, "num-partitions": count},
                state=RecordDict(),
                run_config=dict(config or {}),
            )
            for partition in range(count)
        }
        self._answers: dict[str, Message] = {}
        self._one_client = threading.Lock()

    def set_run(self, run: FlowerRun) -> None:
        self._run = run

    @property
    def run(self) -> FlowerRun:
        return self._run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("create messages with flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            identity = _identify(message)
            received = Message(copy.deepcopy(message.content), metadata=message.metadata)  # type: ignore[call-overload]
            with self._one_client:
                self._answers[identity] = self._answer(received)
            pushed.append(identity)
        return pushed

    def _answer(self, message: Message) -> Message:
        """Return a client's answer to `message`.

        As on Ray, a client that fails answers with an error, and its state stays unchanged.
        """
        node = message.metadata.dst_node_id
        context = copy.deepcopy(self._contexts[node])
        try:
            answer = self._clients(message, context)
        except Exception as error:  # any exception of a client becomes an error reply
            answer = Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)
        else:
            self._contexts[node] = context
        _identify(answer)
        return answer

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answers.pop(identity) for identity in message_ids if identity in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def _identify(message: Message) -> str:
    identity = str(uuid.uuid4())
    message.metadata.__dict__["_message_id"] = identity
    return identity
