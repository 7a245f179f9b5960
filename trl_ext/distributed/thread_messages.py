"""Messages from a thread of the first process to threads of the others. Collectives stay on the main thread."""

import os
import secrets
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from .ranks import Ranks


class ThreadMessages:
    """A connection from the first process to each other one. All ranks construct it together."""

    def __init__(self, ranks: Ranks) -> None:
        world = ranks.world
        self._to_ranks: list[Connection] = []
        self._from_first: Connection | None = None
        if world.num_processes == 1:
            return
        key = secrets.token_bytes(32)
        listener = Listener(("", 0), backlog=world.num_processes, authkey=key) if world.is_main_process else None
        port, key = ranks.of_main(lambda: (listener.address[1], key))  # type: ignore[union-attr]  # only there
        if listener is None:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            self._from_first = Client((host, port), authkey=key)
            self._from_first.send(world.process_index)
            return
        connections = [listener.accept() for _ in range(world.num_processes - 1)]
        self._to_ranks = [x for _, x in sorted(((x.recv(), x) for x in connections), key=lambda pair: pair[0])]
        listener.close()

    def send(self, values: list[Any]) -> None:
        """Send to each rank its value. The first process has its own already."""
        for connection, value in zip(self._to_ranks, values[1:], strict=True):
            connection.send((value, None))

    def send_error(self, error: str) -> None:
        for connection in self._to_ranks:
            with suppress(OSError):  # of a rank that has ended
                connection.send((None, error))

    def receive(self) -> Any:
        """Wait for this rank's message, and return its value.

        Raises:
            `RuntimeError`: the first process sends an error, or has ended.
        """
        assert self._from_first is not None
        try:
            value, error = self._from_first.recv()
        except (EOFError, OSError) as gone:
            raise RuntimeError("The first process has ended, which sends the completions of vLLM's server.") from gone
        if error is not None:
            raise RuntimeError(error)
        return value

    def close(self) -> None:
        for connection in filter(None, [*self._to_ranks, self._from_first]):
            connection.close()
