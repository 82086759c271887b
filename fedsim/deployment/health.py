"""Health check, `python -m fedsim.deployment.health HOST:PORT[/PATH] [CERTIFICATE]`: exit status 0 if the answer is HTTP 200.

PATH is `health` by default. CERTIFICATE is the file with the certificate of the authority that signed the certificate of the
checked process; without CERTIFICATE, the request does not use TLS.
"""

import sys

from fedsim.deployment.processes import is_healthy


def main(address: str, authority: str | None = None) -> int:
    """Return the exit status: 0 if a request to `address`, HOST:PORT[/PATH], is answered with HTTP status 200, else 1.

    The path is /health by default.
    authority: path of the certificate of the authority that must have signed the certificate of the process at `address`; None
    without TLS.
    """
    return 0 if is_healthy(address, authority) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
