"""A link that can be slowed down, blocked and cut: a TCP proxy in user space between two processes of a job.

    worker 0 ──connects to──► Link ──► the port at which worker 1 really listens

Each worker is told a link in place of each other worker's address, so every direction can be disturbed by itself.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

CHUNK = 1 << 16


class Link:
    """Passes on what connects to `port`; use it as a context manager.

    Args:
        target: the port on loopback at which the other process listens.

    Attributes:
        port: where to connect to instead.
        delay: seconds that every piece of data takes.
    """

    def __init__(self, target: int) -> None:
        self.delay = 0.0
        self._target = target
        self._passes = threading.Event()
        self._passes.set()
        self._is_cut = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self.unblock()
        self._listener.close()

    def block(self) -> None:
        """Pass nothing on, as a network does that loses all packets; connections stay open."""
        self._passes.clear()

    def unblock(self) -> None:
        """Pass on again, what was held back first."""
        self._passes.set()

    def cut(self) -> None:
        """Close all connections, and all new ones at once."""
        with self._lock:
            self._is_cut = True
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def mend(self) -> None:
        """Allow connections again."""
        with self._lock:
            self._is_cut = False

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._passes.wait()
        far = None
        with suppress(OSError):
            far = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        with self._lock:
            if far is None or self._is_cut:
                near.close()
                if far is not None:
                    far.close()
                return
            far.settimeout(None)
            self._open += [near, far]
        for source, sink in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                self._passes.wait()
                if self.delay:
                    time.sleep(self.delay)
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
