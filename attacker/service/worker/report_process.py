"""Program that writes the report of one run: python -m attacker.service.worker.report_process RUN OUT [--unscored]."""

import sys
from pathlib import Path

from fedsim.recording.files import write_bytes

UNWRITTEN_STATUS = 74
"""Exit status if the page was made but cannot be written, as in sysexits.h."""


def main(run: str, out: str, unscored: str = "") -> None:
    """Write the report page of one run.

    run: its folder. out: file to write. unscored: "--unscored" leaves out scores and originals.
    Ends the process with `UNWRITTEN_STATUS` if the file cannot be written.
    """
    from attacker.report.gather import gather_run  # imported here because the service imports this module for the status only
    from attacker.report.render import render

    page = render([gather_run(Path(run), scored=unscored != "--unscored")]).encode()
    try:
        write_bytes(Path(out), page)
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        sys.exit(UNWRITTEN_STATUS)


if __name__ == "__main__":
    main(*sys.argv[1:])
