"""Calls of the command `fedsim` in the process of a test, on a small experiment."""

from typer.testing import CliRunner, Result

from fedsim.cli import app

SMALL = """
rounds = 2
model = { name = "mlp", hidden = [4] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.5, batch_size = 4, steps = 1 }
"""


def fedsim(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def run(*arguments: object) -> Result:
    return fedsim("run", "small.toml", "--out", "out", "--engine", "local", *arguments)


def words(text: str) -> str:
    return " ".join(text.split())
