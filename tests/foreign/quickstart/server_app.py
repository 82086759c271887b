"""The server of the quickstart app, which does not import fedleak."""

import task
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg


def make_app(strategy=None, *, net=task.Net, rounds=2, lr=0.05, seed=1, done=None):
    """Return the server app. strategy: one of Flower's, by default FedAvg over all clients. done: is called with the result."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(seed)
        arrays = ArrayRecord(net().state_dict())
        chosen = strategy or FedAvg()
        result = chosen.start(grid=grid, initial_arrays=arrays, train_config=ConfigRecord({"lr": lr}), num_rounds=rounds)
        if done is not None:
            done(result)

    return app


app = make_app()
