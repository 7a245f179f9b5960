"""A folder on a file system that is mounted read-only, also for root, whom the mode of a folder does not stop."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make the system calls that would write below `folder` fail as Linux lets them fail, in the `with` block."""

    def refuse(path: Any, always: bool = True) -> None:
        if always and isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))

    def refused(own: Any) -> Any:
        def call(path: Any, *args: Any, **keywords: Any) -> Any:
            refuse(path)
            return own(path, *args, **keywords)

        return call

    def mkdir(path: Any, *args: Any, **keywords: Any) -> None:
        refuse(path, not os.path.lexists(path))
        own_mkdir(path, *args, **keywords)

    def low_open(path: Any, flags: int, *args: Any, **keywords: Any) -> int:
        refuse(path, bool(flags & _WRITES))
        return own_low_open(path, flags, *args, **keywords)

    def high_open(file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
        refuse(file, not {*mode}.isdisjoint("wax+"))
        return own_high_open(file, mode, *args, **keywords)

    own_mkdir, own_low_open, own_high_open = os.mkdir, os.open, io.open
    with ExitStack() as stack:
        for name in ("unlink", "remove", "rename", "replace", "rmdir", "utime"):
            stack.enter_context(patch.object(os, name, refused(getattr(os, name))))
        stack.enter_context(patch.object(os, "mkdir", mkdir))
        stack.enter_context(patch.object(os, "open", low_open))
        stack.enter_context(patch.object(io, "open", high_open))
        yield
