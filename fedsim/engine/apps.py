"""Both Flower apps of a `FederationRun`. Only this module imports client, server and data sets."""

from collections.abc import Callable
from math import nan

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import Tensor

from defenses.gradients import GradientSpec
from defenses.inputs import InputsSpec
from fedsim import data as datasets
from fedsim import models
from fedsim.client import app as client_side
from fedsim.data.public_pool import public_images
from fedsim.deployment.runner import OnRound
from fedsim.engine.run import FederationRun
from fedsim.server import app as server_side
from fedsim.training.local import evaluate
from fedsim.training.privacy import accounts


def client_app(run_of: Callable[[Context], FederationRun]) -> ClientApp:
    """Return the Flower ClientApp of the experiment that `run_of` returns."""
    known: list[tuple[FederationRun, client_side.ClientSettings]] = []

    def settings(context: Context) -> client_side.ClientSettings:
        run = run_of(context)
        if not known or known[0][0] is not run:
            known[:] = [(run, made(run))]
        return known[0][1]

    def made(run: FederationRun) -> client_side.ClientSettings:
        run.admit_code()
        data, places, named = run.data(), run.places, run.experiment.data
        inputs = InputsSpec.parse(run.experiment.inputs)
        own = None if places.data is None else np.arange(len(data.train))
        return client_side.ClientSettings(
            model=run.model(),
            data=data.spec,
            training=run.experiment.training,
            defense=run.experiment.update_defense(),
            private=places.private or run.out / "clients",
            truth=places.truth or run.out / "truth",
            described=lambda: datasets.described(data, named.name, named.arguments) if own is None else places.described(data),
            holdings=lambda number: (data.train, run.split()[number] if own is None else own),
            gradient=GradientSpec.parse(run.experiment.gradient),
            inputs=inputs,
            public=lambda: public_images(inputs, data),
            seed=run.client_seed,
            device=run.resolved_device(),
            threads=run.threads,
            secure=run.experiment.agreement(),
        )

    return client_side.make_client_app(settings)


def server_app(run_of: Callable[[Context], FederationRun], on_round: OnRound | None = None) -> ServerApp:
    """Return the Flower ServerApp of the experiment that `run_of` returns. on_round: called with each round's row of metrics."""

    def settings(context: Context) -> server_side.ServerSettings:
        run = run_of(context)
        run.prepare()
        e, data, device = run.experiment, run.data(), run.resolved_device()
        model = models.build(run.model(), data.spec).to(device)
        x, y = (t.to(device) for t in data.test[:])
        sizes = frozenset(run.sizes())

        def held_out(weights: dict[str, Tensor]) -> dict[str, float]:
            if not len(y):
                return {"loss": nan, "accuracy": nan}
            moved = {name: w.to(device) for name, w in weights.items()}
            buffers = {name: moved.pop(name) for name in models.buffer_names(model) if name in moved}
            return evaluate(model, moved, x, y, data.spec, e.training, buffers=buffers)

        return server_side.ServerSettings(
            folder=run.out,
            manifest=run.manifest(data.spec),
            strategy=run.strategy,
            evaluate=held_out,
            seed=e.seed,
            rounds=e.rounds,
            clients=e.clients.count,
            timeout=e.timeout,
            wanted=run.wanted(),
            needs=run.needs,
            privacy=accounts(
                e,
                tensors=len(dict(model.named_parameters())),
                smallest=min(sizes),
                others=sizes,
                buffers=bool(models.buffer_names(model)),
            ).row,
            secure=e.agreement(),
            on_round=on_round,
        )

    return server_side.make_server_app(settings)
