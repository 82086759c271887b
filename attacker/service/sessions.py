"""Sessions of the web page: a user who enters the token gets a cookie, which is accepted instead of the token for some weeks."""

import hmac
import json
import logging
import secrets
import threading
import time
from hashlib import sha256
from pathlib import Path

from attacker.service.state_folder import read_private
from fedsim.recording.files import write_json

SESSION_WEEKS = 4
SESSION_SECONDS = SESSION_WEEKS * 7 * 24 * 3600
MAX_SESSIONS = 1000
"""Largest number of open sessions; if one more is opened, the oldest session is closed."""
MAX_FILE_BYTES = 1_000_000

log = logging.getLogger(__name__)


class Keys:
    """The service's token, and the open sessions of users who have entered it. No cookie contains the token.

    path: file with hashes of the ids of open sessions, so that they outlast a restart of the service; None keeps them in memory
    only.
    """

    def __init__(self, token: str, path: Path | None = None) -> None:
        self.token, self._path = token, path
        self._lock = threading.Lock()
        self._open = {} if path is None else _read(path)

    @property
    def name(self) -> str:
        """Part of the cookie's name that differs between services with different tokens.

        Browsers send the cookies of a host to all its ports, so that several services on one host need different names.
        """
        return self._sign("name")[:12]

    def is_token(self, token: str) -> bool:
        """Return whether `token` is the token, in a time that does not depend on the content of `token`."""
        return secrets.compare_digest(token.encode("utf-8", "surrogatepass"), self.token.encode())

    def open_session(self, now: float | None = None) -> str:
        """Open a session of `SESSION_SECONDS`, and return its cookie: time of expiry, random id and signature, joined by dots.

        If `MAX_SESSIONS` sessions are open already, the oldest is closed.
        now: the present Unix time in seconds; None takes it from the system's clock.
        """
        now = time.time() if now is None else now
        until = int(now) + SESSION_SECONDS
        id = f"{until}.{secrets.token_urlsafe(16)}"
        with self._lock:
            kept = [(key, end) for key, end in self._open.items() if end > now][1 - MAX_SESSIONS :]
            self._open = {**dict(kept), _hash(id): until}
            self._write()
        return f"{id}.{self._sign(f'session {id}')}"

    def is_open(self, cookie: str, now: float | None = None) -> bool:
        """Return whether `cookie` was signed with the service's token, and its session is neither expired nor closed.

        now: as in `open_session`.
        """
        id, _, proof = cookie.rpartition(".")
        ours = secrets.compare_digest(proof.encode("utf-8", "surrogatepass"), self._sign(f"session {id}").encode())
        return ours and self._open.get(_hash(id), 0) > (time.time() if now is None else now)

    def close(self, cookie: str) -> None:
        """Close the session of `cookie`, so that the cookie is no longer accepted. Nothing happens if it is not open."""
        if self.is_open(cookie):
            with self._lock:
                self._open = {key: end for key, end in self._open.items() if key != _hash(cookie.rpartition(".")[0])}
                self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_json(self._path, self._open)
        except OSError as error:  # such as a full disk; sessions then last until the service ends
            log.warning("%s cannot be written, so users must log in again after the next start: %s", self._path, error)

    def _sign(self, text: str) -> str:
        return hmac.new(self.token.encode(), text.encode("utf-8", "surrogatepass"), sha256).hexdigest()


def _hash(id: str) -> str:
    return sha256(id.encode("utf-8", "surrogatepass")).hexdigest()


def _read(path: Path) -> dict[str, int]:
    """Return the stored sessions as a dict from the hash of a session's id to the Unix time at which it expires.

    It is empty if the file is missing, damaged, or not private to this user; users must then enter the token again.
    """
    try:
        content = json.loads(read_private(path, MAX_FILE_BYTES))
        return {str(key): int(end) for key, end in content.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}
