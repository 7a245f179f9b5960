"""Messages from a thread of the first process to threads of the others. Collectives stay on the main thread."""

import json
import os
import time
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but defined in C++

from .ranks import Ranks

_POLL = 0.02  # seconds


class ThreadMessages:
    """A message to each rank at a time, in the same order on all. All ranks construct it together."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks.world.num_processes
        self._rank = ranks.world.process_index
        self._number = 0  # of the next message
        if self._ranks == 1:
            return
        # The default process group's store stays free for torch: a wait blocks the other calls of a store
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False) if self._rank == 0 else None
        port = ranks.of_main(lambda: own.port)  # type: ignore[union-attr]  # only the first process calls it
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False) if own is None else own

    def send(self, values: list[Any]) -> None:
        """Send to each rank its JSON value of `values`. The first process has its own already."""
        for rank in range(1, self._ranks):
            self._store.set(self._key(rank), json.dumps({"value": values[rank]}))
        self._number += 1

    def send_error(self, error: str) -> None:
        for rank in range(1, self._ranks):
            self._store.set(self._key(rank), json.dumps({"error": error}))
        self._number += 1

    def receive(self) -> Any:
        """Wait for this rank's message, and return its value.

        Raises:
            `RuntimeError`: the first process sends an error, or has ended.
        """
        key = self._key(self._rank)
        while not self._store.check([key]):
            time.sleep(_POLL)
        message = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._number += 1
        if "error" in message:
            raise RuntimeError(message["error"])
        return message["value"]

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"
