"""A TCP proxy that delays bytes and limits their rate, or passes nothing on.

with SlowLink(port, delay_secs=0.015, bytes_per_sec=25e6) as link:      # each way
connect(link.port)
link.is_open = False            # ends all connections, and refuses new ones

python -m benchmarks.slow_link --to=9000 --link_delay_ms=15 --mbit=200       # prints its port
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Sequence
from typing import Self

from absl import app, flags

from data.system.flags import parse_flags

_CHUNK_BYTES = 64 << 10
_QUEUED_CHUNKS = 64


class SlowLink:
    """Passes bytes between clients of `port` and a server of this machine, in a thread.

    `delay_secs` and `bytes_per_sec` hold for each direction; all connections share the rate. They
    may be changed at any time. `num_sent` counts the bytes that clients have sent.
    """

    def __init__(
        self, to_port: int, *, delay_secs: float = 0.0, bytes_per_sec: float = math.inf
    ) -> None:
        self.delay_secs, self.bytes_per_sec, self.num_sent = delay_secs, bytes_per_sec, 0
        self.to_port = to_port
        self._free_at = [0.0, 0.0]
        self._is_open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._pass, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_open = False
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def is_open(self) -> bool:
        """False while nothing is passed on."""
        return self._is_open

    @is_open.setter
    def is_open(self, value: bool) -> None:
        self._is_open = value
        if not value:
            for writer in list(self._writers):
                self._loop.call_soon_threadsafe(writer.transport.abort)

    async def _close(self) -> None:
        self._server.close()
        await self._server.wait_closed()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.1)  # The event loop closes the sockets afterwards.

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        self._writers.add(writer)
        try:
            if self._is_open:
                server = await asyncio.open_connection("127.0.0.1", self.to_port)
                writers.append(server[1])
                self._writers.add(server[1])
                await asyncio.gather(
                    self._copy(reader, server[1], 0), self._copy(server[0], writer, 1)
                )
            else:
                writer.transport.abort()
        except OSError:  # Either side has ended the connection.
            pass
        finally:
            for each in writers:
                each.close()
                self._writers.discard(each)
            with contextlib.suppress(OSError):
                await asyncio.gather(*(each.wait_closed() for each in writers))

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)

        async def deliver() -> None:
            while (item := await queue.get())[1]:
                await asyncio.sleep(item[0] - self._loop.time())
                writer.write(item[1])
                await writer.drain()
            await asyncio.sleep(item[0] - self._loop.time())
            if writer.can_write_eof():
                writer.write_eof()

        delivery = asyncio.ensure_future(deliver())
        chunk = b"first"
        while chunk:
            try:
                chunk = await reader.read(_CHUNK_BYTES)
            except OSError:
                chunk = b""
            now = self._loop.time()
            sent = max(now, self._free_at[way]) + len(chunk) / self.bytes_per_sec
            self._free_at[way] = sent
            await queue.put((sent + self.delay_secs, chunk))
            # Read no faster than the link sends, so that the sender notices.
            await asyncio.sleep(sent - now)
            self.num_sent += len(chunk) * (way == 0)
        with contextlib.suppress(OSError):
            await delivery


def _main(argv: Sequence[str]) -> None:
    values = flags.FLAGS
    rate = values.mbit * 1e6 / 8
    with SlowLink(values.to, delay_secs=values.link_delay_ms / 1e3, bytes_per_sec=rate) as link:
        print(link.port, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    flags.DEFINE_integer("to", None, "The server's port.", required=True)
    flags.DEFINE_float("link_delay_ms", 15.0, "Delay of each direction.")
    flags.DEFINE_float("mbit", 200.0, "Mbit/s of each direction.")
    app.run(_main, flags_parser=parse_flags("benchmarks.slow_link"))
