"""Tests of the proxy in front of a service without internet access: it forwards bytes both ways, to one address."""

import asyncio

from fedsim.deployment import forward


async def ask(port: int, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    await writer.drain()
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_bytes_are_forwarded_until_the_service_closes() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readexactly(200_000)
        writer.write(asked[::-1] * 3)
        await writer.drain()
        writer.close()

    async def run() -> list[bytes]:
        service = await asyncio.start_server(answer, "127.0.0.1", 0)
        before = await forward.listen(0, service.sockets[0].getsockname()[:2], host="127.0.0.1")
        port = before.sockets[0].getsockname()[1]
        found = await asyncio.gather(*(ask(port, bytes([number]) * 199_999 + b"x") for number in range(5)))
        before.close()
        service.close()
        return found

    for number, found in enumerate(asyncio.run(run())):
        assert found == (b"x" + bytes([number]) * 199_999) * 3


def test_without_a_service_the_connection_is_closed() -> None:
    async def run() -> bytes:
        gone = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        target = gone.sockets[0].getsockname()[:2]
        gone.close()
        await gone.wait_closed()
        before = await forward.listen(0, target, host="127.0.0.1")
        try:
            return await ask(before.sockets[0].getsockname()[1], b"hello")
        finally:
            before.close()

    assert asyncio.run(run()) == b""
