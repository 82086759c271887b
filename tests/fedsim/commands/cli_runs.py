"""Calls of the command `fedsim` in the process of a test, on a small experiment."""

from command_line import run_fedsim
from typer.testing import Result

SMALL = """
rounds = 2
model = { name = "mlp", hidden = [4] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.5, batch_size = 4, steps = 1 }
"""


def run(*arguments: object) -> Result:
    return run_fedsim("run", "small.toml", "--out", "out", "--engine", "local", *arguments)
