"""Health check, `python -m fedsim.deployment.health HOST:PORT[/PATH] [CERTIFICATE]`: exit status 0 if the answer is HTTP 200.

PATH is `health` by default. CERTIFICATE is the file with the certificate of the authority that signed the certificate of the
checked process; without CERTIFICATE, the request does not use TLS.
"""

import ssl
import sys
import urllib.request
from http.client import HTTPException

TIMEOUT_SECONDS = 5


def is_healthy(address: str, authority: str | None) -> bool:
    """Return whether an HTTP request to `address` is answered with status 200.

    address:   HOST:PORT[/PATH]; the default path is /health.
    authority: file with the certificate of the authority that must have signed the server's certificate; None for HTTP without
               TLS.
    """
    address = address if "/" in address else f"{address}/health"
    context = None if authority is None else ssl.create_default_context(cafile=authority)
    scheme = "http" if authority is None else "https"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{scheme}://{address}", timeout=TIMEOUT_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # HTTPException: whatever answers does not use HTTP
        return False


def main(address: str, authority: str | None = None) -> int:
    """Return the exit status: 0 if a request to `address`, HOST:PORT[/PATH], is answered with HTTP status 200, else 1.

    The path is /health by default.
    authority: path of the certificate of the authority that must have signed the certificate of the process at `address`; None
    without TLS.
    """
    return 0 if is_healthy(address, authority) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
