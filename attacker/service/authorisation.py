"""Access control of the service: its token, the host names it may be addressed by, and the security headers of responses."""

import os
import secrets
from ipaddress import ip_address
from pathlib import Path

from attacker.service.state_folder import read_private
from fedsim.recording.files import make_private

MIN_TOKEN = 32
"""Smallest number of characters of a token."""
MAX_TOKEN = 1000

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
API_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
REPORT_POLICY = f"{API_POLICY}; style-src 'unsafe-inline'; img-src data:; sandbox"
"""Policy of the report, which is one file: its styles and pictures are inside it, and it runs no scripts."""
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store",
    "Content-Security-Policy": API_POLICY,
}
"""Headers of every response that does not set them itself."""


def read_token(path: Path) -> str:
    """Return the token in the file `path`; if there is no such file, create it with a new random token.

    A new file is accessible to its owner only. Raises ValueError if an existing file is a link or a special file, belongs to
    another user or is open to other users, or if it does not hold a token of 32 to 999 printable ASCII characters.
    """
    make_private(path.parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except FileExistsError:
        return _read_checked(path)
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token


def _read_checked(path: Path) -> str:
    token = read_private(path, MAX_TOKEN).decode("latin-1").strip()
    if not MIN_TOKEN <= len(token) < MAX_TOKEN or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"{path} must hold a token of {MIN_TOKEN} to {MAX_TOKEN - 1} printable ASCII characters; delete it, and the service "
            "writes a new one"
        )
    return token


def is_loopback_name(host: str) -> bool:
    """Return whether a Host header names this machine as itself: `localhost`, or a loopback address such as 127.0.0.1 or [::1].

    host: value of the header, with or without a port. The check prevents DNS rebinding: a foreign web page whose host name
    resolves to 127.0.0.1 sends that host name and is refused.
    """
    name = parse_hostname(host)
    if name is None:
        return False
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def parse_hostname(host: str) -> str | None:
    """Return the host name or address in a Host header, without port and brackets; None if the header is malformed."""
    if host.startswith("["):
        name, closed, port = host[1:].partition("]")
        port = port.removeprefix(":") if port.startswith(":") else port and "?"
        if not closed:
            return None
    else:
        name, colon, port = host.partition(":")
        if colon and not port:
            return None
    if port and not (port.isascii() and port.isdecimal() and len(port) <= 5):
        return None
    good = name and len(name) <= 253 and all(c.isascii() and (c.isalnum() or c in ".-_:") for c in name)
    return name if good else None


def is_own(origin: str, host: str) -> bool:
    """Return whether an Origin header names the host and port in the Host header, so that the request is from the service's page.

    The scheme may be http or https; upper and lower case are not distinguished in names.
    """
    scheme, separator, name = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and name.lower() == host.lower()
