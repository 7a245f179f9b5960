"""TRL's methods with other source: what a later release of TRL may look like."""

import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_numbers = itertools.count()

MEAN_OF_RANK = "batch_loss = -chosen_per_token_logps[chosen_mask.bool()].mean()"
MEAN_OF_ALL_RANKS = (
    "batch_loss = -chosen_per_token_logps[chosen_mask.bool()].sum() * self.accelerator.num_processes"
    " / self.accelerator.gather(chosen_mask.sum()).sum()"
)


@contextmanager
def source_changed(owner: Any, method: str, old: str, new: str) -> Iterator[None]:
    """Replace the text `old` in the source of a method of TRL's by `new` in the `with` block."""
    original = vars(owner)[method]
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, (method, old)
    # The source must be found again, as that of an installed file is
    file = f"<changed {next(_numbers)}: {method}>"
    changed = source.replace(old, new)
    linecache.cache[file] = len(changed), None, changed.splitlines(keepends=True), file
    members: dict[str, Any] = {}
    exec(compile(changed, file, "exec"), vars(sys.modules[owner.__module__]), members)
    members[method].__qualname__ = original.__qualname__
    setattr(owner, method, members[method])
    try:
        yield
    finally:
        setattr(owner, method, original)
