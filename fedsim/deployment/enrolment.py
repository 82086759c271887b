"""Registration of public keys at a SuperLink: `python -m fedsim.deployment.enrolment SUPERLINK KEY.pub...`.

Flower's command takes one key per call, and each call takes seconds to load.
"""

import sys

import click
from flwr.cli.app import app

KNOWN_KEY_MESSAGE = "already in use"


def main(superlink: str, *keys: str) -> None:
    """Register the keys that are not known yet. Exits with status 1 if the SuperLink refuses one."""
    for key in keys:
        try:
            app(["supernode", "register", key, superlink], standalone_mode=False)
        except click.ClickException as error:
            if KNOWN_KEY_MESSAGE not in error.message:
                sys.exit(f"{key}: {error.message}")


if __name__ == "__main__":
    main(*sys.argv[1:])
