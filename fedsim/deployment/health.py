"""`python -m fedsim.deployment.health ADDRESS [CERTIFICATE]`: exit status 0 if a process answers at HOST:PORT[/PATH]."""

import sys

from fedsim.deployment.processes import is_healthy


def main(address: str, authority: str | None = None) -> int:
    """Return 0 if the process at `address` is healthy. authority: certificate that must have signed its own; None for no TLS."""
    return 0 if is_healthy(address, authority) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
