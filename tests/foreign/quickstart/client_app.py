"""The clients of the quickstart app, which does not import fedleak."""

import task
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def make_app(net=task.Net, *, mods=(), train_mods=(), batch_size=1, limit=1, momentum=0.0, mode=True, steps=None):
    """Return the client app. net: makes the network. limit: most training examples of a client. mode: of the network in training.

    steps: number of steps of each epoch, by default all.
    """
    app = ClientApp(mods=list(mods))

    def loaders(context: Context):
        partition, count = context.node_config["partition-id"], context.node_config["num-partitions"]
        return task.load_data(partition, count, batch_size, limit)

    @app.train(mods=list(train_mods))
    def train(msg: Message, context: Context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        loader, _ = loaders(context)
        loss = task.train(model, loader, 1, msg.content["config"]["lr"], momentum=momentum, mode=mode, steps=steps)
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        _, loader = loaders(context)
        loss, accuracy = task.test(model, loader)
        metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
        return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)

    return app


app = make_app()
