"""The command line `trl-ext`, and its errors of one line."""

import difflib
from collections.abc import Iterable

# Their messages suffice; other errors need their type too
_SAYS_ENOUGH = (ValueError, TypeError, OSError, ImportError, RuntimeError)


class CommandError(ValueError):
    """Bad input; the message names it and says what to do."""


class TrainingStoppedError(Exception):
    """An error after the first step: not about an argument, so its traceback is shown."""


def one_line(error: BaseException) -> str:
    """The message of `error` without line breaks, with its type where the message alone says little."""
    message = " ".join(str(error).split())
    if isinstance(error, _SAYS_ENOUGH) and " " in message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` Did you mean ...?` where a known name is close to the one given, else nothing."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f" Did you mean `{close[0]}`?" if close else ""
