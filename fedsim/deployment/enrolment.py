"""Command that registers clients' public keys at a SuperLink: `python -m fedsim.deployment.enrolment SUPERLINK KEY.pub...`.

SUPERLINK is the SuperLink's name in Flower's configuration. Flower's own command takes one key, and seconds to load.
"""

import sys

import click
from flwr.cli.app import app

KNOWN_KEY_MESSAGE = "already in use"


def main(superlink: str, *keys: str) -> None:
    """Register public keys at a SuperLink. Keys that are registered already are skipped.

    superlink: the SuperLink's name in Flower's configuration.
    keys:      paths of the key files.
    Exits with status 1 at the first key that cannot be registered; keys after it are not tried.
    """
    for key in keys:
        try:
            app(["supernode", "register", key, superlink], standalone_mode=False)
        except click.ClickException as error:
            if KNOWN_KEY_MESSAGE not in error.message:
                sys.exit(f"{key}: {error.message}")


if __name__ == "__main__":
    main(*sys.argv[1:])
