"""A slow link: a TCP proxy that lets so many bits per second through in each direction, and adds nothing else.

worker 0 ──► 127.0.0.1:PROXY ──12.5 MB/s──► 127.0.0.1:REAL worker 1
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

CHUNK = 1 << 14


class Link:
    """Forwards connections to a port of this host.

    Args:
        target: the port.
        bits_per_second: in each direction of each connection.

    Attributes:
        port: where to connect to instead.
        meter: a port that answers with the number of bytes that have passed so far, in both directions.
    """

    def __init__(self, target: int, bits_per_second: float) -> None:
        self._target = target
        self._rate = bits_per_second / 8
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.port, self.meter = (listener.getsockname()[1] for listener in self._listeners)
        self._passed = 0
        for listener, serve in zip(self._listeners, (self._serve, self._tell), strict=True):
            threading.Thread(target=_accept, args=(listener, serve), daemon=True).start()

    def close(self) -> None:
        """Stop taking connections."""
        for listener in self._listeners:
            listener.close()

    def _tell(self, asker: socket.socket) -> None:
        with asker:
            asker.sendall(str(self._passed).encode())

    def _serve(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()  # as if nobody listened
            return
        for source, sink in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        free_at = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                free_at = max(free_at, time.monotonic()) + len(data) / self._rate
                time.sleep(max(0.0, free_at - time.monotonic()))
                sink.sendall(data)
                self._passed += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def passed(meter: int) -> int:
    """Return how many bytes have passed a link, given its meter."""
    with socket.create_connection(("127.0.0.1", meter)) as connection:
        return int(connection.makefile().read())


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()
