"""Checks of where prompts are: one that TRL would train twice, drop, or make from the start of the answers."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

logger = logging.getLogger("trl_ext")

Rows = Mapping[int, dict[str, Any]]  # row number -> row

# Other names that data sets give to the column of prompts
PROMPT_NAMES = (
    "prompts",
    "question",
    "query",
    "instruction",
    "problem",
    "questions",
    "queries",
    "instructions",
    "problems",
    "prompt",
    "prompt_text",
    "user_input",
    "user_prompt",
    "user_message",
    "user_query",
    "conversation",
    "instruct",
    "user",
    "conversations",
    "input",
    "context",
    "inputs",
    "post",
    "history",
    "trajectory",
    "dialogue",
    "request",
)
_ASKS = ("user", "human", "prompter")
# Of the rows that are read: in fewer, a completion may begin with its prompt, or a prompt be missing, by chance
_FEW = 0.1
_MANY = 0.25  # of the prompts are questions, where they are instructions and no headlines
_PROMPTS = 4  # different prompts that single completions must repeat to be an error
# A completion without two such marks may restate a question, an article may begin with its headline, and code with the
# function that was asked for
_DIALOGUE = re.compile(
    r"\b(human|user|assistant|question|answer|instruction|response|prompt|bot)\s*:|\[/?INST\]|<\||###", re.IGNORECASE
)
_COMPARED = 60  # characters of a prompt that are looked for; it may be cut, or go on elsewhere
_ANSWER_WORDS = 5  # answers with the same first words have up to so many in common
_THINKS = re.compile(r"\s*<(think|thinking|thought|reasoning|answer)>", re.IGNORECASE)  # begins an answer
_FENCE = "```"  # of code
_QUESTION_MARKS = ("?", "\u061f", "\uff1f")  # also Arabic and Chinese ones
_MARKS = ("\n", "<", "[", "|", *_QUESTION_MARKS)  # of a prompt
_COLONS = re.compile("[:\uff1a]")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
)  # no spaces between words


def check_repeated_prompts(rows: Rows, columns: tuple[str, ...], name: str) -> None:
    """Raise `ValueError` if prompts are also at the start of the completions, so that rows have them twice.

    `columns` are those that TRL reads. Messages are compared, so one row is enough. Text may have to start with its
    prompt, so in text all rows must, and be dialogues, or pairs that both repeat a question: else, only warn.
    """
    with_prompt = {place: row for place, row in rows.items() if row.get("prompt")}
    _check_repeated_messages(with_prompt, columns, name)
    texts = {place: row for place, row in with_prompt.items() if isinstance(row["prompt"], str)}
    if not texts:
        return
    completions = [x for x in columns if x != "prompt"]
    repeats = {place: [_begins_with(row.get(x), row["prompt"]) for x in completions] for place, row in texts.items()}
    whole = [place for place, is_repeated in repeats.items() if all(is_repeated)]
    # A bad completion may be one that repeats the prompt, so `rejected` alone is no sign
    in_first = [place for place, is_repeated in repeats.items() if is_repeated[0]]
    prompts = {texts[place]["prompt"] for place in whole}
    pairs = len(completions) > 1
    is_prefix = all(_is_prefix(texts[x]["prompt"], [texts[x][column] for column in completions]) for x in whole)
    are_dialogues = all(_is_dialogue(texts[x][column], texts[x]["prompt"]) for x in whole for column in completions)
    questions = sum(prompt.rstrip().endswith(_QUESTION_MARKS) for prompt in prompts)
    are_questions = questions > 0 and questions >= _MANY * len(prompts)
    is_certain = are_dialogues or are_questions if pairs else are_dialogues and len(prompts) >= _PROMPTS
    if is_certain and len(whole) == len(texts) and any(map(_is_long, prompts)):
        raise ValueError(
            f"`prompt` of `{name}` is also at the start of {_listed(completions)}, in row {whole[0]} and every other "
            f"row that was read, so each row would have its prompt twice. {_removal(completions, is_prefix)}"
        )
    doubtful = whole if len(whole) >= _FEW * len(texts) else []
    if pairs and not whole and len(in_first) == len(texts):
        doubtful = in_first
        completions = completions[:1]
    if pairs and len(whole) < len(texts):  # without the column, the other rows would have no prompt
        is_prefix = False
    if doubtful and any(_is_long(texts[place]["prompt"]) for place in doubtful):
        logger.warning(
            f"`prompt` of `{name}` is also at the start of `{completions[0]}`, in row {doubtful[0]} and in "
            f"{len(doubtful)} of the {len(texts)} rows that were read. Such a row has its prompt twice, which is right "
            f"only if the answer should repeat it. {_removal(completions, is_prefix)}"
        )


def _check_repeated_messages(rows: Rows, columns: tuple[str, ...], name: str) -> None:
    repeating: dict[int, list[str]] = {}  # row number -> the columns that repeat the prompt
    for place, row in rows.items():
        if is_messages(row["prompt"]):
            completions = [x for x in columns if x != "prompt" and is_messages(row[x])]
            repeating[place] = [x for x in completions if _repeats(row[x], row["prompt"])]
    if not any(repeating.values()):
        return
    place = next(place for place, repeating_columns in repeating.items() if repeating_columns)
    where = _listed(repeating[place])
    can_be_removed = all(
        repeating_columns == ["chosen", "rejected"]
        and all(
            _same_messages(rows[x][column], rows[x]["prompt"])
            or _same_messages(_without_system(rows[x][column]), rows[x]["prompt"])
            for column in repeating_columns
        )
        for x, repeating_columns in repeating.items()
    )
    hint = f"Leave only the answer in {where}."
    if can_be_removed:
        hint = _removal(repeating[place])
    elif all(x == ["completion"] for x in repeating.values()) and all(
        _same_messages(rows[x]["completion"], rows[x]["prompt"]) for x in repeating
    ):
        hint = (
            "Remove it from `completion`: "
            '`dataset.map(lambda row: {"completion": row["completion"][len(row["prompt"]) :]})`.'
        )
    raise ValueError(
        f"`prompt` of `{name}` is also at the start of {where}, in row {place}, which would have its prompt twice. "
        f"{hint}"
    )


def mixed_hint(row: dict[str, Any], kinds: Mapping[str, str]) -> str:
    """Return what to do about a row with text and messages."""
    prompt = row.get("prompt")
    chats = [x for x, kind in kinds.items() if kind == "messages" and x != "prompt" and row[x]]
    if isinstance(prompt, str) and chats:
        holds_prompt = [any(_is_asking(one) and _text(one) == _spaced(prompt) for one in row[x]) for x in chats]
        if all(holds_prompt) and chats == ["chosen", "rejected"]:
            return (
                '`chosen` and `rejected` hold the prompt, too. Remove the column: `dataset.remove_columns("prompt")`.'
            )
        if all(holds_prompt) and chats == ["completion"] and len(row["completion"]) > 1:
            return (
                "The completion holds the prompt, too. Split the completion: `dataset.map(lambda row: "
                '{"prompt": row["completion"][:-1], "completion": row["completion"][-1:]})`.'
            )
        if all(not _is_asking(row[x][0]) for x in chats):
            return (
                'Make the prompt a message: `dataset.map(lambda row: {"prompt": [{"role": "user", "content": '
                'row["prompt"]}]})`.'
            )
    return "Give text in all columns, or lists of messages in all columns. Only `prompt` may hold the prompt."


def check_missing_prompts(rows: Rows, name: str) -> None:
    """Check pairs without a `prompt`, which TRL takes from the start that `chosen` and `rejected` share.

    Raises:
        `ValueError`: TRL would drop the prompts, which are in another column, or could not make one.
    """
    pairs = {place: row for place, row in rows.items() if "prompt" not in row}
    starts_of_rows = {place: _Start.of(row) for place, row in pairs.items() if _is_pair(row)}
    if not starts_of_rows:
        return
    for place, start in starts_of_rows.items():
        if start.wrong_cut:
            raise ValueError(
                f"`chosen` and `rejected` of `{name}` have no common start in row {place}, and `chosen` ends with a "
                "space: TRL would take all that precedes that space as the prompt. Remove the space: "
                '`dataset.map(lambda row: {"chosen": row["chosen"].rstrip()})`.'
            )
    with_other_prompt = {place: start for place, start in starts_of_rows.items() if start.other_prompt}
    starts = {str(start.common_start) for start in with_other_prompt.values()}
    # Prompts that differ do not begin with the same text, but answers may. In a chat, a user may always say the same
    all_same = len(starts) == 1 < len({start.other_prompt for start in with_other_prompt.values()})
    # Answers to many prompts hardly begin with the same two words in every pair, and with others in each
    are_prompts = len(starts) == len(with_other_prompt) >= _PROMPTS and all(
        start.is_chat or len(start.common_start.split()) > 1 for start in with_other_prompt.values()
    )
    dropped = [
        place
        for place, start in with_other_prompt.items()
        if not start.holds_other_prompt
        and (start.begins_answer or ((start.is_short or (all_same and not start.is_chat)) and not are_prompts))
    ]
    unrendered = [place for place, start in starts_of_rows.items() if start.is_chat and not start.common_start]
    if dropped and (len(dropped) > len(with_other_prompt) / 2 or unrendered):
        start = starts_of_rows[dropped[0]]
        raise ValueError(
            f"`{name}` has the columns {sorted(next(iter(rows.values())))} but no `prompt`, and `chosen` and "
            f"`rejected` of row {dropped[0]} do not start with the same prompt: their common start is "
            f"{start.description}. {start.renaming}"
        )
    if unrendered:
        raise ValueError(
            f"`{name}` has no `prompt`, and `chosen` and `rejected` do not start with the same message in row "
            f"{unrendered[0]}. Add the messages of the prompt as a column `prompt`, or remove the row."
        )
    if dropped and len(dropped) >= _FEW * len(with_other_prompt):
        start = starts_of_rows[dropped[0]]
        logger.warning(
            f"`{name}` has no `prompt`, and in {len(dropped)} of the {len(starts_of_rows)} rows that were read, such "
            f"as row {dropped[0]}, the common start of `chosen` and `rejected` is not the prompt but "
            f"{start.description}. {start.renaming}"
        )
        return
    empty = [place for place, start in starts_of_rows.items() if not start.common_start]
    if len(empty) > _FEW * len(starts_of_rows):
        logger.warning(
            f"`{name}` has no `prompt`, and `chosen` and `rejected` of row {empty[0]} do not start with the same text: "
            "such rows have an empty prompt in training."
        )


@dataclass
class _Start:
    """What `chosen` and `rejected` share at their start, and the column that may hold the prompt instead."""

    common_start: Any  # text or messages
    is_chat: bool
    wrong_cut: bool  # TRL makes a prompt of `chosen` without its last character
    other_prompt: str  # the text of that column; empty if there is none
    holds_other_prompt: bool  # whether chosen holds the text of such a column
    renaming: str  # how to make it the prompt

    @classmethod
    def of(cls, row: dict[str, Any]) -> "_Start":
        chosen, rejected = row["chosen"], row["rejected"]
        is_chat = not isinstance(chosen, str)
        common_start = _common_start(chosen, rejected)
        names = sorted((x for x in row if _is_prompt_name(x, _last_text(row[x]), bool(common_start))), key=_rank)
        whole = " ".join(map(_text, chosen)) if is_chat else _spaced(chosen)
        return cls(
            common_start=common_start if is_chat else "".join(common_start),
            is_chat=is_chat,
            wrong_cut=not is_chat and not common_start and chosen.endswith(" ") and len(chosen) > 1,
            other_prompt=_last_text(row[names[0]]) if names else "",
            holds_other_prompt=any(_last_text(row[x])[:_COMPARED] in whole for x in names),
            renaming=_renaming(row, names, is_chat),
        )

    @property
    def begins_answer(self) -> bool:
        """Whether the common start has no message of a user, or is that of two answers with thoughts or open code."""
        if self.is_chat:
            return not _without_system(self.common_start)
        opens_code = self.common_start.lstrip().startswith(_FENCE) and self.common_start.count(_FENCE) == 1
        return opens_code or _THINKS.match(self.common_start) is not None

    @property
    def is_short(self) -> bool:
        """Whether the common start has few words and no mark of a prompt, so that two answers may share it."""
        if self.is_chat:
            return False
        # Such as "Human: ... Assistant:"
        has_mark = any(mark in self.common_start for mark in _MARKS) or len(_COLONS.findall(self.common_start)) > 1
        words = len(self.common_start.split()) + len(_UNSPACED.findall(self.common_start)) // 2
        return not has_mark and words <= _ANSWER_WORDS

    @property
    def description(self) -> str:
        if not self.common_start:
            return "empty"
        return "a system message alone" if self.is_chat else repr(self.common_start)


def _is_prompt_name(name: str, text: str, is_shared: bool) -> bool:
    """Return whether a column may hold the prompt `text`. One word beside a shared start may be a category."""
    is_category = is_shared and len(text.split()) < 2
    return name.lower() in PROMPT_NAMES and bool(text) and not is_category


def _rank(name: str) -> int:
    return PROMPT_NAMES.index(name.lower())


def _renaming(row: dict[str, Any], names: list[str], is_chat: bool) -> str:
    if not names:
        return ""
    texts = [x for x in names if isinstance(row[x], str)]
    columns = [x for x in ("instruction", "input", "context") if x in texts]
    if len(columns) > 1:  # such as Alpaca's
        value = " + ".join([f'row["{columns[0]}"]', f'row["{columns[1]}"]']).replace(" + ", ' + "\\n\\n" + ')
    else:
        value = f'row["{names[0]}"]'
    if is_chat and texts:
        value = f'[{{"role": "user", "content": {value}}}]'
    elif len(columns) < 2:
        return f'Rename the column: `dataset.rename_column("{names[0]}", "prompt")`.'
    return f'Build it from your columns: `dataset.map(lambda row: {{"prompt": {value}}})`.'


def _common_start(chosen: Any, rejected: Any) -> list[Any]:
    """Return the characters, or messages, that both begin with."""
    return [one for one, _ in takewhile(lambda x: x[0] == x[1], zip(chosen, rejected, strict=False))]


def _is_pair(row: dict[str, Any]) -> bool:
    values = [row.get("chosen"), row.get("rejected")]
    return all(isinstance(x, str) for x in values) or all(isinstance(x, list) for x in values)


def is_messages(value: Any, role: str = "role") -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and role in value[0]


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _text(message: Any) -> str:
    """Return the text of a message, with single spaces."""
    if not isinstance(message, dict):
        return ""
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        content = " ".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return _spaced(content) if isinstance(content, str) else ""


def _last_text(value: Any) -> str:
    """Return a text, or the last of a list of messages."""
    if isinstance(value, str):
        return _spaced(value)
    return _text(value[-1]) if isinstance(value, list) and value else ""


def _is_asking(message: Any) -> bool:
    return isinstance(message, dict) and str(message.get("role", message.get("from"))).lower() in _ASKS


def _without_system(messages: list[Any]) -> list[Any]:
    return [one for one in messages if not (isinstance(one, dict) and one.get("role") in ("system", "developer"))]


def _same_messages(messages: list[Any], prompt: list[Any]) -> bool:
    """Return whether messages begin with those of the prompt."""
    return [(x.get("role"), _text(x)) for x in messages[: len(prompt)]] == [(x.get("role"), _text(x)) for x in prompt]


def _repeats(completion: list[Any], prompt: list[Any]) -> bool:
    """Return whether a completion begins with a user's message that the prompt has, or goes on to its last one.

    After an answer, the user may say again what he said before, such as "Go on". Then all of the prompt must be there.
    """
    turns = _without_system(completion)
    prompt_turns = _without_system(prompt)
    questions = {_text(one) for one in prompt_turns if _is_asking(one)} - {""}
    if not turns or not _is_asking(turns[0]) or not questions:
        return False
    if not _is_asking(prompt_turns[-1]):
        last = turns[len(prompt_turns) - 1 : len(prompt_turns)]
        goes_on = bool(last) and _text(last[0]).startswith(_text(prompt_turns[-1]))
        return goes_on and _same_messages(turns, prompt_turns[:-1])
    later = {_text(one) for one in turns if _is_asking(one)}
    return _text(turns[0]) in questions or _text(prompt_turns[-1]) in later


def _begins_with(text: Any, prompt: str) -> bool:
    """Return whether a text begins with the prompt, perhaps after a mark such as "Human:", and goes on."""
    if not isinstance(text, str):
        return False
    spaced_prompt = _spaced(prompt)
    spaced_text = _spaced(text)
    if not spaced_prompt or len(spaced_text) <= len(spaced_prompt):
        return False
    if spaced_text.startswith(spaced_prompt):
        last = spaced_prompt[-1]
        following = spaced_text[len(spaced_prompt)]
        ends_within_word = last.isalnum() and following.isalnum() and last.isascii()
        return not ends_within_word
    words = prompt.strip()
    start = text.lstrip().find(words)
    before = text.lstrip()[: max(start, 0)].rstrip(" ")
    return 0 < len(before) <= 300 and before[-1] in ":]>\n" and _is_long(prompt)


def _is_dialogue(completion: str, prompt: str) -> bool:
    """Return whether a completion that repeats its prompt has marks of two turns, the first before the prompt's end."""
    marks = [mark.start() for mark in _DIALOGUE.finditer(completion)]
    start = completion.find(prompt.strip())
    return len(marks) > 1 and marks[0] < start + len(prompt.strip())


def _is_long(text: str) -> bool:
    """Return whether a completion would hardly begin with the text by chance."""
    return len(text.strip()) >= 12 or len(text.split()) > 1


def _listed(columns: list[str]) -> str:
    return " and ".join(f"`{x}`" for x in columns)


def _is_prefix(prompt: str, texts: list[str]) -> bool:
    """Return whether the prompt is in the start that two texts share, or one text begins with it."""
    if len(texts) > 1:
        return _spaced(prompt) in _spaced("".join(_common_start(*texts)))
    return texts[0].strip().startswith(prompt.strip())


def _removal(columns: list[str], can_be_removed: bool = True) -> str:
    """Return how to remove the prompt from one of two places."""
    if not can_be_removed:
        return f"Leave only the answer in {_listed(columns)}."
    if len(columns) > 1:
        return (
            'Remove the column: `dataset.remove_columns("prompt")`. TRL then takes the common start of '
            f"{_listed(columns)} as the prompt."
        )
    return (
        f'Remove it from `{columns[0]}`: `dataset.map(lambda row: {{"{columns[0]}": '
        f'row["{columns[0]}"].strip().removeprefix(row["prompt"].strip())}})`.'
    )
