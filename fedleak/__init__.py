"""Measure what a gradient, or a recorded federation, reveals about the data behind it.

Reconstruct an image from the gradient of a PyTorch model; nothing is written to disk:

>>> import torch, fedleak
>>> from sklearn.datasets import load_digits
>>> x, y = torch.tensor(load_digits().images[:1, None] / 16, dtype=torch.float32), torch.tensor([0])
>>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Sigmoid(), torch.nn.Linear(32, 10))
>>> loss = torch.nn.CrossEntropyLoss()
>>> gradient = torch.autograd.grad(loss(model(x), y), model.parameters())
>>> observation = fedleak.observe(model, loss, gradient, shape=(1, 8, 8))
>>> result = fedleak.attack(observation, "cpl", steps=50)
>>> scores = fedleak.score(result, x, y)
>>> figure = scores.plot()

Run and record a federation, attack it with the gradients and without them (the null, a baseline), and score both attacks:

    recording = fedleak.run("experiment.toml", out="runs/first")
    fedleak.attack(recording, "cpl")
    fedleak.attack(recording, "cpl", null=True)
    scores = fedleak.score(recording)
    fedleak.report(recording)

Each name is imported at its first use, so that `import fedleak` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attacker.scoring import write_truth
    from fedleak.attacking import attack
    from fedleak.federations import audit, load, report, run
    from fedleak.observing import observe
    from fedleak.results import AttackResult
    from fedleak.scores import ScoreTable, score
    from fedsim.models.tampering import inspect_model
    from fedsim.server import record

__all__ = [
    "AttackResult",
    "ScoreTable",
    "attack",
    "audit",
    "inspect_model",
    "load",
    "observe",
    "record",
    "report",
    "run",
    "score",
    "write_truth",
]

_HOME = {
    "AttackResult": "fedleak.results",
    "ScoreTable": "fedleak.scores",
    "attack": "fedleak.attacking",
    "audit": "fedleak.federations",
    "inspect_model": "fedsim.models.tampering",
    "load": "fedleak.federations",
    "observe": "fedleak.observing",
    "record": "fedsim.server",
    "report": "fedleak.federations",
    "run": "fedleak.federations",
    "score": "fedleak.scores",
    "write_truth": "attacker.scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedleak' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = getattr(import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
