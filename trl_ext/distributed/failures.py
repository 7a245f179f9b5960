"""Who ended: when a rank leaves training with an error, or a collective fails, the ranks call their roll and name it.

A collective that fails says little: over gloo "Connection closed by peer [127.0.0.1]", and only to the neighbours of
the rank that ended. So each rank keeps an attendant, a thread that answers for it through the rendezvous store, also
while its training waits in a collective. The first rank that fails conducts the roll call: it asks, waits, and
writes the verdict that every rank reports. The store may lie in rank 0, which then stays until the others have heard;
where it is gone, rank 0 has ended.

Over NCCL a rank that was killed or hangs may be noticed first by NCCL's watchdog thread, which ends the process without
an exception in Python: no roll is called then, and it is the launcher that names the first rank to end.
"""

import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

_POLL = 0.5  # seconds between two looks of an attendant at the store
_PATIENCE = 10.0  # seconds that a rank has for its answer
_CALLED, _VERDICT = "called", "verdict"
_WAITED = "waited in a collective, which failed"
_ADVICE = (
    'Training can go on from the last checkpoint: start all ranks again with `train(resume_from_checkpoint="auto")`.'
)
# What gloo's errors begin with: the line that raised them, but for what comes after a timeout
_OF_GLOO = re.compile(r"\[(enforce fail at )?\S*gloo/\S+\.(cc|cu|h):\d+\]|^Application timeout caused pair closure")
_calls = 0


class RankError(RuntimeError):
    """Training ended because of another rank, which the message names. Its cause is the collective that failed here."""


@contextmanager
def rank_failures_reported() -> Iterator[None]:
    """Within, a collective that fails on this rank is raised as an error that names the rank that made it fail.

    Every rank enters it as often as the others. An error of this rank's own is raised as it is, and the others name it.

    Raises:
        `RankError`: a collective failed: a rank ended, does not answer, or failed with an error of its own.
    """
    global _calls
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    _calls += 1
    attendant = RankMonitor(PrefixStore(f"trl_ext/rank_failures_reported/{_calls}", _get_default_store()))
    try:
        yield
    except Exception as error:
        if not _is_of_a_collective(error):
            attendant.tell(error)
            raise
        raise RankError(f"{attendant.diagnosis()} {_ADVICE}") from error
    finally:
        attendant.ended.set()


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Whether `error`, or what it came from, is a collective's: gloo's are of no type but `RuntimeError`."""
    while error is not None:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and _OF_GLOO.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


class RankMonitor:
    """Answers for this rank, and conducts the roll call if it is the first to fail.

    Args:
        store (`Store`): for this roll call alone.
    """

    def __init__(self, store: Store) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ended = threading.Event()
        self._heard: str | None = None
        self._trains = threading.get_ident()
        # One client takes one request at a time, and the collectives' own may wait in one. New clients would try for
        # long to reach a store that is gone.
        self._of_thread, self._store = (store.clone() for _ in range(2))  # type: ignore[attr-defined]
        for client in (self._of_thread, self._store):
            client.set_timeout(timedelta(seconds=3 * _PATIENCE))
        self._name = f"Rank {self.rank} ({socket.gethostname()}, pid {os.getpid()})"
        store.set(f"name/{self.rank}", self._name)
        threading.Thread(target=self._attend, name="trl_ext roll call", daemon=True).start()

    # The thread

    def _attend(self) -> None:
        store = self._of_thread
        try:
            while not self.ended.wait(_POLL):
                if store.check([_CALLED]):
                    store.compare_set(f"answer/{self.rank}", "", f"is in {_place(self._trains)}")
                    self._heard = store.get(_VERDICT).decode()
                    store.set(f"heard/{self.rank}", "")
                    return
            store.compare_set(f"answer/{self.rank}", "", "has ended its training")
            store.set(f"heard/{self.rank}", "")
        except dist.DistError:
            pass  # the store is gone, which the training thread will meet too

    # The training thread, after a failure

    def tell(self, error: Exception) -> None:
        """Name an error of this rank's own to the others."""
        words = "".join(traceback.format_exception_only(error)).strip()
        self._in_time(lambda store: self._failed(store, f"failed: {words}"))

    def diagnosis(self) -> str:
        """Which rank made a collective fail here, and how, as all ranks report it."""
        found = self._in_time(lambda store: self._failed(store, _WAITED))
        # Who conducted may have taken the store with it
        return found or self._heard or self._without_store()

    def _failed(self, store: Store, answer: str) -> str:
        store.set(f"answer/{self.rank}", answer)
        if store.compare_set(_CALLED, "", str(self.rank)).decode() == str(self.rank):
            own = answer.startswith("failed")
            diagnosis = f"{self._name} {answer}" if own else self._call(store)
            store.set(_VERDICT, diagnosis)
            if self.rank == 0 and not _store_is_the_launchers():
                self._wait(store, "heard", but=0)
        return store.get(_VERDICT).decode()

    def _call(self, store: Store) -> str:
        silent = self._wait(store, "answer")
        if silent:
            what = "does not answer: it was killed, ran out of memory, crashed or hangs."
            return " ".join(f"{self._name_of(store, rank)} {what}" for rank in silent)
        answers = {rank: store.get(f"answer/{rank}").decode() for rank in range(self.world)}
        failed = {rank: words for rank, words in answers.items() if words.startswith("failed")}
        if not failed:
            answers = {rank: words for rank, words in answers.items() if words != _WAITED} or answers
        said = " ".join(f"{self._name_of(store, rank)} {words}." for rank, words in (failed or answers).items())
        return said if failed else f"A collective failed, and every rank answers. {said}"

    def _wait(self, store: Store, what: str, but: int | None = None) -> list[int]:
        """Until every rank has set its key `what`; those that have not in time."""
        deadline = time.monotonic() + _PATIENCE
        missing = [rank for rank in range(self.world) if rank != but]
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL / 5)
            missing = [rank for rank in missing if not store.check([f"{what}/{rank}"])]
        return missing

    def _name_of(self, store: Store, rank: int) -> str:
        key = f"name/{rank}"
        return store.get(key).decode() if store.check([key]) else f"Rank {rank}"

    def _in_time(self, ask: Callable[[Store], str]) -> str | None:
        """`ask` of the store; None where the store is gone, or does not answer."""
        answers: SimpleQueue[str | None] = SimpleQueue()

        def asked() -> None:
            try:
                answers.put(ask(self._store))
            except dist.DistError:
                answers.put(None)

        threading.Thread(target=asked, daemon=True).start()
        try:
            return answers.get(timeout=3 * _PATIENCE)
        except Empty:
            return None

    def _without_store(self) -> str:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if _store_is_the_launchers():
            return f"A collective failed, and the launcher's store at {where} gave no answer."
        return (
            f"Rank 0 ({where}) does not answer, nor does the rendezvous store, which lies in it: it was killed, ran "
            "out of memory, crashed or hangs."
        )


def _store_is_the_launchers() -> bool:
    """Whether the rendezvous store outlives rank 0, as under torchrun and `accelerate launch`."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _place(thread: int | None) -> str:
    """The innermost call of `thread` that is not torch's."""
    frame: Any = sys._current_frames().get(thread or 0)
    inner = frame
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    frame = frame or inner
    if frame is None:
        return "no Python code"
    return f"`{frame.f_code.co_name}` ({frame.f_code.co_filename}:{frame.f_lineno})"
