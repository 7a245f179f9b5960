"""The command line `trl-ext`, its errors, and text that fits 80 columns."""

import textwrap
from collections.abc import Iterable

# Their messages say enough; other errors need the type too
_SAYS_ENOUGH = (ValueError, TypeError, OSError, ImportError, RuntimeError)


class CommandError(ValueError):
    """Bad input; the message names it and says what to do."""


class ReportedError(Exception):
    """An error of Python's, whose message is what the user of the command line reads."""


class TrainingStoppedError(Exception):
    """An error after the first step. It is not about an argument, so its traceback is shown."""


def one_line(error: BaseException) -> str:
    """Return the message of `error` without line breaks, with its type if the message alone says little."""
    message = " ".join(str(error).split())
    if isinstance(error, _SAYS_ENOUGH) and " " in message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def did_you_mean(given: str, known: Iterable[str], mark: str = "") -> str:
    """Return ` Did you mean ...?` if `given` can mean exactly one known name, else "".

    This is the only name that begins with `given`, or else the only one that differs from it by one typo: a letter
    more, less or changed, or two letters swapped, after the first letter. Names that are merely similar do not
    count, such as `lora_rank` and `local_rank`.
    """
    names = set(known)
    meant = [x for x in names if len(given) >= 4 and x.startswith(given)]
    meant = meant if len(meant) == 1 else [x for x in names if _one_slip(given, x)]
    return f" Did you mean `{mark}{meant[0]}`?" if len(meant) == 1 else ""


def _one_slip(given: str, known: str) -> bool:
    pairs = enumerate(zip(given, known, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(given), len(known)))
    a, b = given[same:], known[same:]
    swapped = a[:2] == b[1::-1] and a[2:] == b[2:]
    return same > 0 and (a[1:] == b or a == b[1:] or a[1:] == b[1:] or swapped)


def wrapped(text: str, begin: str = "") -> str:
    """Return `text` in lines of at most 80 columns: the first starts with `begin`, the others are indented as far."""
    indent = " " * len(begin)
    return textwrap.fill(
        text, 80, initial_indent=begin, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
