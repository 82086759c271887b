"""Damage to files of recordings, for tests of readers."""

from collections.abc import Callable

from hypothesis import strategies as st

CUT_OFF = """
import os, sqlite3, sys
index = sqlite3.connect(sys.argv[1])
index.execute("PRAGMA cache_size = 1")
row = "INSERT INTO observations SELECT round + ?, client, node, 1, 'late', ?, 1, NULL, NULL, NULL, 0, '{}', 0.0 FROM observations"
for number in range(5):
    index.execute(row + " WHERE round = 1", (1000 * (number + 1), "x" * 3000))
os._exit(9)
"""
"""Program that is killed while it writes to an index, so that a journal is left beside it."""


@st.composite
def harm(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Draw a function that flips a bit, overwrites, removes, inserts or truncates bytes, up to three times."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1), st.binary(min_size=1, max_size=8)), min_size=1, max_size=3)
    )

    def applied(content: bytes) -> bytes:
        for kind, where, drawn in steps:
            at = int(where * max(0, len(content) - 1))
            match kind:
                case 0 if content:
                    content = content[:at] + bytes([content[at] ^ 1 << drawn[0] % 8]) + content[at + 1 :]
                case 1:
                    content = content[:at] + drawn + content[at + len(drawn) :]
                case 2:
                    content = content[:at] + content[at + len(drawn) :]
                case 3:
                    content = content[:at] + drawn + content[at:]
                case _:
                    content = content[:at]
        return content

    return applied
