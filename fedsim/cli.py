"""Command line `fedsim`."""

from fedsim.commands.console import make_command_line, run_and_exit
from fedsim.commands.deploy import enrol, keys, part, prepare, split, start
from fedsim.commands.init import init
from fedsim.commands.list import list_
from fedsim.commands.recordings import delete, import_, verify
from fedsim.commands.run import run
from fedsim.commands.show import show

EXAMPLE_EXPERIMENT = "deploy/experiments/photos.toml"
EXAMPLE_TRUST = "--root-certificates federation/trust/ca.crt"

app = make_command_line("Run a federation and record what its honest-but-curious server sees.")
app.command(epilog="Example:  fedsim init imagefolder mine --data ~/pictures")(init)
app.command(epilog=f"Example:  fedsim run {EXAMPLE_EXPERIMENT} --out runs/first --set 'defense=clip(1) | gaussian(0.1)'")(run)
app.command(epilog="Example:  fedsim show runs/first")(show)
app.command(epilog="Example:  fedsim verify runs/first")(verify)
app.command(epilog="Example:  fedsim delete runs/first --yes")(delete)
app.command("import", epilog="Example:  fedsim import sent.npz returned.npz --settings settings.toml --out runs/theirs")(import_)
app.command("list", epilog="Example:  fedsim list defenses")(list_)
app.command(epilog=f"Example:  fedsim prepare {EXAMPLE_EXPERIMENT} --out federation --host superlink.example.org")(prepare)
app.command(epilog=f"Example:  fedsim split {EXAMPLE_EXPERIMENT} --out federation")(split)
app.command(epilog="Example:  fedsim part npz:mine.npz --public public --out client/data")(part)
app.command(epilog="Example:  fedsim keys --out federation --clients 3 --host superlink.example.org")(keys)
app.command(epilog="Example:  fedsim start client-0 federation --superlink superlink.example.org:8000")(start)
app.command(epilog=f"Example:  fedsim enrol federation/keys --superlink 10.0.0.1:8000 {EXAMPLE_TRUST}")(enrol)


def main() -> None:
    """Run the command line `fedsim`."""
    run_and_exit(app)
