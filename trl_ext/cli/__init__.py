"""The command line `trl-ext`, its errors, and text that fits 80 columns."""

import textwrap

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


def wrapped(text: str, begin: str = "") -> str:
    """Return `text` in lines of at most 80 columns: the first starts with `begin`, the others are indented as far."""
    indent = " " * len(begin)
    return textwrap.fill(
        text, 80, initial_indent=begin, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
