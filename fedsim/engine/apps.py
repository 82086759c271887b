"""Construction of Flower's ClientApp and ServerApp for a `FederationRun`, an experiment with folders and devices."""

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
from fedsim.data.public_pool import load_public_images
from fedsim.deployment.runner import OnRound
from fedsim.engine.run import FederationRun
from fedsim.server import app as server_side
from fedsim.training.local import evaluate
from fedsim.training.privacy import make_accounts


def make_client_app(run_of: Callable[[Context], FederationRun]) -> ClientApp:
    """Return a Flower ClientApp that trains and answers for all clients.

    run_of: function from Flower's context of a message to the run whose experiment the client takes part in.
    """
    known: list[tuple[FederationRun, client_side.ClientSettings]] = []

    def find_settings(context: Context) -> client_side.ClientSettings:
        run = run_of(context)
        if not known or known[0][0] is not run:
            known[:] = [(run, make_settings(run))]
        return known[0][1]

    def make_settings(run: FederationRun) -> client_side.ClientSettings:
        run.admit_code()
        data, locations, named = run.load_data(), run.locations, run.experiment.data
        inputs = InputsSpec.parse(run.experiment.inputs)
        own = None if locations.data is None else np.arange(len(data.train))
        return client_side.ClientSettings(
            model=run.make_model_spec(),
            data=data.spec,
            training=run.experiment.training,
            defense=run.experiment.parse_defense(),
            private=locations.private or run.out / "clients",
            truth=locations.truth or run.out / "truth",
            described=lambda: (
                datasets.describe(data, named.name, named.arguments) if own is None else locations.describe_dataset(data)
            ),
            holdings=lambda number: (data.train, run.split()[number] if own is None else own),
            gradient=GradientSpec.parse(run.experiment.gradient),
            inputs=inputs,
            public=lambda: load_public_images(inputs, data),
            seed=run.client_seed,
            device=run.resolve_device(),
            threads=run.threads,
            secure=run.experiment.settle_agreement(),
            canaries=run.experiment.clients.canaries,
        )

    return client_side.make_client_app(find_settings)


def make_server_app(run_of: Callable[[Context], FederationRun], on_round: OnRound | None = None) -> ServerApp:
    """Return a Flower ServerApp that runs a federation and records it.

    run_of:   function from Flower's context to the run that is executed.
    on_round: called with the row of metrics, a dict, of each round.
    """

    def make_settings(context: Context) -> server_side.ServerSettings:
        run = run_of(context)
        run.prepare()
        e, data, device = run.experiment, run.load_data(), run.resolve_device()
        model = models.build(run.make_model_spec(), data.spec).to(device)
        x, y = (t.to(device) for t in data.test[:])
        sizes = frozenset(run.count_examples())

        def evaluate_held_out(weights: dict[str, Tensor]) -> dict[str, float]:
            if not len(y):
                return {"loss": nan, "accuracy": nan}
            moved = {name: w.to(device) for name, w in weights.items()}
            buffers = {name: moved.pop(name) for name in models.list_buffers(model) if name in moved}
            return evaluate(model, moved, x, y, data.spec, e.training, buffers=buffers)

        return server_side.ServerSettings(
            folder=run.out,
            manifest=run.make_manifest(data.spec),
            strategy=run.build_strategy,
            evaluate=evaluate_held_out,
            seed=e.seed,
            rounds=e.rounds,
            clients=e.clients.count,
            timeout=e.timeout,
            wanted=run.parse_wanted(),
            needs=run.count_bytes,
            privacy=make_accounts(
                e,
                tensors=len(dict(model.named_parameters())),
                smallest=min(sizes),
                others=sizes,
                buffers=bool(models.list_buffers(model)),
            ).make_row,
            secure=e.settle_agreement(),
            on_round=on_round,
        )

    return server_side.make_server_app(make_settings)
