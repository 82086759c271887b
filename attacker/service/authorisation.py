"""Who may ask what: the token, the names that the service goes by, and the headers of every answer. Knows of no recording."""

import hmac
import os
import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from fedsim.recording.files import make_private

LEAST_TOKEN = 32
"""Characters of the shortest token that is taken."""
WEEKS = 4
SESSION_SECONDS = WEEKS * 7 * 24 * 3600

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
API_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
REPORT_POLICY = f"{API_POLICY}; style-src 'unsafe-inline'; img-src data:; sandbox"
"""Of the report, which is one file: its style lies within, its pictures are data, and it runs nothing."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store",
    "Content-Security-Policy": API_POLICY,
}
"""Of every answer, where the answer itself does not say otherwise."""


def read_token(path: Path) -> str:
    """The token in the file `path`, which is made at the first start, readable by its owner only.

    Raises ValueError where others may read it, or it is too short to be one.
    """
    make_private(path.parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except FileExistsError:
        return _checked(path)
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token


def _checked(path: Path) -> str:
    status = path.stat()
    if os.name == "posix" and status.st_mode & 0o077:
        raise ValueError(f"{path} can be read by others: chmod 600 {path}, or delete it for a new token")
    token = path.read_text().strip()
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise ValueError(f"{path} holds no token of at least {LEAST_TOKEN} printable characters: delete it for a new one")
    return token


@dataclass(frozen=True)
class Keys:
    """Compares what a request shows with the token, in constant time. The token itself never goes into a cookie."""

    token: str

    def opens(self, given: str) -> bool:
        """Whether `given` is the token."""
        return secrets.compare_digest(given.encode("utf-8", "surrogatepass"), self.token.encode())

    def session(self, now: float | None = None) -> str:
        """A value for the cookie: until when it is good, and the proof that it was made here."""
        until = f"{int(time.time() if now is None else now) + SESSION_SECONDS}.{secrets.token_urlsafe(9)}"
        return f"{until}.{self._proof(until)}"

    def admits(self, cookie: str, now: float | None = None) -> bool:
        """Whether `cookie` is one of ours that is still good."""
        until, _, proof = cookie.rpartition(".")
        ours = secrets.compare_digest(proof.encode("utf-8", "surrogatepass"), self._proof(until).encode())
        number = until.partition(".")[0]
        return ours and number.isdecimal() and int(number) > (time.time() if now is None else now)

    def _proof(self, until: str) -> str:
        return hmac.new(self.token.encode(), f"session {until}".encode("utf-8", "surrogatepass"), sha256).hexdigest()


def is_loopback_name(host: str) -> bool:
    """Whether a Host header names this machine to itself: a page of elsewhere that was made to resolve here does not."""
    name = hostname(host)
    if name is None:
        return False
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def hostname(host: str) -> str | None:
    """The name in a Host header, without its port; None where it is none."""
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
    """Whether an Origin header is that of the service as the client names it."""
    scheme, separator, name = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and name.lower() == host.lower()
