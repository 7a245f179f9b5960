"""Names the rank that made a collective fail, in an error on every other rank.

A failed collective says little: over gloo "Connection closed by peer [127.0.0.1]", and only on the neighbours of the
rank that ended. So a thread on each rank answers through the rendezvous store, even while training waits in a
collective. The first rank that fails collects the answers and writes a diagnosis, which every rank reports. If rank 0
hosts the store, it waits until the others have read the diagnosis; if the store is gone, rank 0 has ended.

Over NCCL, the watchdog thread may be the first to notice a killed or hanging rank. It ends the process without a Python
exception, so this module reports nothing; the launcher names the first rank that ended.
"""

import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

_POLL = 0.5  # seconds between a thread's reads of the store
_PATIENCE = 10.0  # seconds that a rank has to answer
_CALLED, _DIAGNOSIS = "called", "diagnosis"  # keys of the store
_WAITED, _ENDED = "waited in a collective, which failed", "has finished training"
_ADVICE = 'To continue from the last checkpoint, restart all ranks with `train(resume_from_checkpoint="auto")`.'
# Gloo's errors begin with the line that raised them, except after a timeout
_OF_GLOO = re.compile(r"\[(enforce fail at )?\S*gloo/\S+\.(cc|cu|h):\d+\]|^Application timeout caused pair closure")
_calls = 0


class RankError(RuntimeError):
    """Raised when another rank ended training. The message names that rank; the cause is the failed collective."""


@contextmanager
def rank_failures_reported() -> Iterator[None]:
    """Replace the error of a collective that fails in the `with` block by one that names the responsible rank.

    Every rank must enter it equally often. A rank's own error is raised unchanged; the other ranks report it.

    Raises:
        `RankError`: a collective failed because a rank ended, does not answer, or raised an error.
    """
    global _calls
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    _calls += 1
    monitor = RankMonitor(PrefixStore(f"trl_ext/rank_failures_reported/{_calls}", _get_default_store()))
    try:
        yield
    except Exception as error:
        if not _is_of_a_collective(error):
            monitor.report(f"failed: {''.join(traceback.format_exception_only(error)).strip()}")
            raise
        raise RankError(f"{monitor.report(_WAITED) or _without_store()} {_ADVICE}") from error
    finally:
        monitor.answers.put(_ENDED)


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Return whether `error`, or its cause, comes from a collective. Gloo raises plain `RuntimeError`s."""
    while error is not None:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and _OF_GLOO.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


class RankMonitor:
    """A thread that answers for this rank in `store`, and collects all answers if this rank is the first to fail."""

    def __init__(self, store: Store) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.answers: SimpleQueue[str] = SimpleQueue()
        self._diagnoses: SimpleQueue[str | None] = SimpleQueue()
        self._training_thread = threading.get_ident()
        # The default store's client handles one request at a time, and a collective may block it, so the thread needs
        # its own client
        self._store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=3 * _PATIENCE))
        self._name = f"Rank {self.rank} ({socket.gethostname()}, pid {os.getpid()})"
        store.set(f"name/{self.rank}", self._name)
        threading.Thread(target=self._run, name="trl_ext rank monitor", daemon=True).start()

    def report(self, answer: str) -> str | None:
        """Give this rank's `answer` after a failure. Returns the diagnosis, or `None` if the store does not respond."""
        self.answers.put(answer)
        with suppress(Empty):
            return self._diagnoses.get(timeout=3 * _PATIENCE)
        return None

    def _run(self) -> None:
        try:
            self._diagnoses.put(self._answer())
        except dist.DistError:
            self._diagnoses.put(None)

    def _answer(self) -> str | None:
        """Wait until any rank fails or training ends, and answer. Returns the diagnosis after a failure."""
        answer = None
        while answer is None and not self._store.check([_CALLED]):
            with suppress(Empty):
                answer = self.answers.get(timeout=_POLL)
        self._store.set(f"answer/{self.rank}", answer or f"is in {_place(self._training_thread)}")
        diagnosis = None
        if answer != _ENDED:
            if self._store.compare_set(_CALLED, "", str(self.rank)).decode() == str(self.rank):
                failed = answer is not None and answer != _WAITED
                self._store.set(_DIAGNOSIS, f"{self._name} {answer}" if failed else self._collect())
                if self.rank == 0 and not _store_is_the_launchers():
                    self._wait("heard", range(1, self.world))
            diagnosis = self._store.get(_DIAGNOSIS).decode()
        self._store.set(f"heard/{self.rank}", "")
        return diagnosis

    def _collect(self) -> str:
        """Return one diagnosis from the answers of all ranks."""
        silent = self._wait("answer", range(self.world))
        if silent:
            what = "does not answer: it was killed, ran out of memory, crashed or hangs."
            return " ".join(f"{self._name_of(rank)} {what}" for rank in silent)
        answers = {rank: self._store.get(f"answer/{rank}").decode() for rank in range(self.world)}
        failed = {rank: answer for rank, answer in answers.items() if answer.startswith("failed")}
        named = failed or {rank: answer for rank, answer in answers.items() if answer != _WAITED} or answers
        report = " ".join(f"{self._name_of(rank)} {answer}." for rank, answer in named.items())
        return report if failed else f"A collective failed, although every rank still responds. {report}"

    def _wait(self, key: str, ranks: range) -> list[int]:
        """Wait until the `ranks` have set `key`. Returns those that have not after `_PATIENCE` seconds."""
        deadline = time.monotonic() + _PATIENCE
        missing = list(ranks)
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL / 5)
            missing = [rank for rank in missing if not self._store.check([f"{key}/{rank}"])]
        return missing

    def _name_of(self, rank: int) -> str:
        key = f"name/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else f"Rank {rank}"


def _without_store() -> str:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if _store_is_the_launchers():
        return f"A collective failed, and the launcher's rendezvous store at {where} does not answer."
    return (
        f"Rank 0 ({where}), which hosts the rendezvous store, does not answer: it was killed, ran out of memory, "
        "crashed or hangs."
    )


def _store_is_the_launchers() -> bool:
    """Return whether the launcher hosts the rendezvous store, as torchrun and `accelerate launch` do."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _place(thread: int) -> str:
    """Return the innermost call of `thread` outside torch, with file and line."""
    inner: Any = sys._current_frames().get(thread)
    frame = inner
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    frame = frame or inner
    if frame is None:
        return "no Python code"
    return f"`{frame.f_code.co_name}` ({frame.f_code.co_filename}:{frame.f_lineno})"
