"""Makes the report of one run, as a process of its own: python -m attacker.service.reporting RUN OUT [--unscored]."""

import sys
from pathlib import Path

from attacker.report.gather import gather
from attacker.report.render import render
from fedsim.wire.files import write_bytes


def main(run: str, out: str, unscored: str = "") -> None:
    """Write the page. unscored: as if there were neither truth nor scores."""
    write_bytes(Path(out), render([gather(Path(run), scored=unscored != "--unscored")]).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
