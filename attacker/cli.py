"""Command line `attacker`."""

from attacker.commands.audit import audit
from attacker.commands.list import list_
from attacker.commands.replay import replay
from attacker.commands.report import demo, rank, report
from attacker.commands.score import score
from attacker.commands.serve import serve
from attacker.commands.sweep import sweep
from attacker.commands.train_prior import train_prior
from fedsim.commands.console import make_command_line, run_and_exit

app = make_command_line("Attack a recording, score the reconstructions, and show the results.")
app.command(epilog="Example:  attacker audit runs/first --budget 10m --fail-above moderate")(audit)
app.command("list", epilog="Example:  attacker list")(list_)
app.command(epilog="Example:  attacker replay runs/first --attack agic --client 3f2a --rounds 1-4 --workers 2")(replay)
app.command(epilog="Example:  attacker score runs/first")(score)
app.command(epilog="Example:  attacker report runs/first runs/second --out report.html")(report)
app.command(epilog="Example:  attacker rank cnn6_d --input 3x32x32 --out rank.png")(rank)
app.command(epilog="Example:  attacker serve runs --truth own")(serve)
app.command(epilog="Example:  attacker sweep deploy/grids/digits.toml --out runs/grid --workers 2")(sweep)
app.command(epilog="Example:  attacker demo --out runs/demo")(demo)
app.command(epilog="Example:  attacker train-prior photographs --kind enhancer --size 64 --out enhancer.safetensors")(train_prior)


def main() -> None:
    """Run the command line `attacker`, and end the process with its exit status."""
    run_and_exit(app)
