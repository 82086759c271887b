"""TCP proxy that forwards connections to one address: `python -m fedsim.deployment.forward PORT HOST:PORT`.

In containers it connects this machine with the attacker's page: the attacker is in a network without access to other networks,
and Docker cannot publish a port of such a network.
"""

import asyncio
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

CHUNK_BYTES = 1 << 16
CONNECT_SECONDS = 10.0


async def listen(port: int, target: tuple[str, int], *, host: str = "0.0.0.0") -> asyncio.Server:
    """Return a running server that accepts connections on `port` and forwards each through a new connection to `target`.

    port: 0 for a free one. target: host and port. host: address to listen on, by default all IPv4 interfaces.
    """

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
    """Copy data from `reader` to `writer` until one of them is closed, then close the writer."""
    with suppress(OSError):
        while part := await reader.read(CHUNK_BYTES):
            writer.write(part)
            await writer.drain()
    writer.close()


def main(port: str, target: str) -> None:
    """Forward connections to `port` of any network interface to `target`, HOST:PORT, until a signal stops the process."""
    host, _, there = target.rpartition(":")

    async def run() -> None:
        server = await listen(int(port), (host, int(there)))
        await server.serve_forever()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
