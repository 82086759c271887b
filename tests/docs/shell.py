"""One Bash session whose commands `fedsim` and `attacker` run in the process of the tests, so that PyTorch is imported once."""

import os
import select
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

Call = Callable[[list[str], Path], tuple[int, str]]
"""A function that runs a command, given its words and current folder, and returns its exit status and stdout."""

PROLOGUE = """
exec 2>&1
set -o pipefail
__ask() { printf '%s\\0' "$(($# + 1))" "$PWD" "$@" > "$REQUESTS"; { read -r __status; cat; } < "$REPLIES"; return "$__status"; }
trap '__ask failed "$BASH_COMMAND" > /dev/null' ERR
for __name in $PROGRAMS; do eval "$__name() { __ask called $__name \\"\\$@\\"; }"; done
"""
"""Bash code that sends a command (the number of its words, then the words) to a named pipe, and reads the reply from another."""
IN_FUNCTION = 'return "$__status"'
"""What Bash names as the failed command if a function failed."""


class Shell:
    """A Bash session in a folder. Each program name in `programs` becomes a function of the shell that calls `call`."""

    def __init__(self, folder: Path, programs: list[str], call: Call) -> None:
        self.folder, self._call = folder, call
        self._pipes = {name: folder.parent / f"{folder.name}.{name}" for name in ("requests", "replies")}
        for pipe in self._pipes.values():
            os.mkfifo(pipe)
        environment = {**os.environ, "HOME": str(folder), "PROGRAMS": " ".join(programs)}
        environment |= {name.upper(): str(pipe) for name, pipe in self._pipes.items()}
        self._log = (folder.parent / f"{folder.name}.log").open("w+")
        self._bash = subprocess.Popen(
            ["bash", "--norc"], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, cwd=folder, env=environment, text=True
        )
        self._write(PROLOGUE)

    def run(self, code: str) -> list[str]:
        """Run a block, and return a description of each command that failed. A block that ends the shell has failed as well."""
        self._write(f"{code}\n__ask ended\n")
        failed, called = [], ""
        while (words := self._read())[1] != "ended":
            status, shown = 0, ""
            if words[1] == "called":
                called = shlex.join(words[2:])
                status, shown = self._call(words[2:], Path(words[0]))
            elif words[1] == "gone":
                return [*failed, f"the shell ended: {self.read_output()}"]
            else:
                command = called if words[2] == IN_FUNCTION else words[2]
                failed.append(f"{command}: {self.read_output()}")
            self._reply(status, shown)
        self._reply(0, "")
        return failed

    def read_output(self) -> str:
        """Return everything that commands of the session have printed."""
        self._log.seek(0)
        return self._log.read()

    def _write(self, code: str) -> None:
        self._bash.stdin.write(code)
        self._bash.stdin.flush()

    def _read(self) -> list[str]:
        """Return the current folder of the next request, and its words."""
        pipe = os.open(self._pipes["requests"], os.O_RDONLY | os.O_NONBLOCK)
        try:
            content = b""
            while not (content.endswith(b"\0") and content.count(b"\0") == 1 + int(content.split(b"\0")[0])):
                read, _, _ = select.select([pipe], [], [], 0.5)
                content += os.read(pipe, 65536) if read else b""
                if not content and self._bash.poll() is not None:
                    return ["", "gone"]
        finally:
            os.close(pipe)
        return content.decode().split("\0")[1:-1]

    def _reply(self, status: int, shown: str) -> None:
        self._pipes["replies"].write_text(f"{status}\n{shown}")

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bash.kill()
        self._bash.communicate()
        self._log.close()
