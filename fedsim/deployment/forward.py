"""`python -m fedsim.deployment.forward PORT HOST:PORT`: hands connections on to one address, and nothing else.

In containers it stands between the attacker's page and this machine: the attacker itself is in a network without a way out, which
no port of Docker's can be published from.
"""

import asyncio
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

CHUNK = 1 << 16
CONNECT_SECONDS = 10.0


async def listen(port: int, target: tuple[str, int], *, host: str = "0.0.0.0") -> asyncio.Server:
    """Accept connections on `port`, 0 for a free one, and join each with one of its own to `target`."""

    async def accept(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                there = await asyncio.open_connection(*target)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))

    return await asyncio.start_server(accept, host, port)


async def _pump(reader: StreamReader, writer: StreamWriter) -> None:
    """Hand on what comes until it ends, and close: neither side waits for one that is gone."""
    with suppress(OSError):
        while part := await reader.read(CHUNK):
            writer.write(part)
            await writer.drain()
    writer.close()


def main(port: str, target: str) -> None:
    """Hand on until a signal ends it."""
    host, _, there = target.rpartition(":")

    async def run() -> None:
        server = await listen(int(port), (host, int(there)))
        await server.serve_forever()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
