"""`python -m fedsim.deployment.health ADDRESS [CERTIFICATE]`: exit status 0 if a process answers at HOST:PORT[/PATH]."""

import sys

from fedsim.deployment.processes import is_healthy


def main(address: str, authority: str | None = None) -> int:
    """Return the exit status: 0 if the process at `address`, HOST:PORT[/PATH], is healthy, else 1.

    authority: path of the certificate of the authority that must have signed the process's certificate; None without TLS.
    """
    return 0 if is_healthy(address, authority) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
