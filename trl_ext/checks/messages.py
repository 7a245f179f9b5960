"""Checks of messages and what renders them: roles, parts, template options and tools that training would misread."""

import json
import logging
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from trl import is_conversational

from .prompts import is_messages

logger = logging.getLogger("trl_ext")


_ROLES = ("system", "user", "assistant")  # what every chat template knows
# Other names for the two roles of a conversation
_OTHER_ROLES = {
    **dict.fromkeys(("human", "prompter", "instruction", "question", "customer"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "chatbot", "ai", "model", "llm"), "assistant"),
    **dict.fromkeys(("answer", "response"), "assistant"),
}
_MARKER = "text-of-this-message"


def usual_role(role: str) -> str | None:
    """Return "user" or "assistant" for another name of it; `None` if there is none."""
    plain = role.strip().lower()
    usual_name = _OTHER_ROLES.get(plain) or (plain if plain in _ROLES else None)
    return usual_name if usual_name != role else None


def check_template(row: dict[str, Any], name: str, processing_class: Any) -> None:
    """Raise `ValueError` if `processing_class` cannot render the columns with messages of a row."""
    if not is_conversational(row):
        return
    options = row.get("chat_template_kwargs") or {}
    if processing_class.chat_template is None and "chat_template" not in options:
        raise ValueError(
            f"`{name}` holds messages, but `processing_class` has no chat template to render them. Use an "
            "instruct model's tokenizer, set `processing_class.chat_template`, or give the rows as text."
        )
    messages = [one for column, value in row.items() if column != "chat_template_kwargs" for one in value]
    has_parts = any(isinstance(one, dict) and isinstance(one.get("content"), list) for one in messages)
    if has_parts and not _renders_parts(partial(processing_class.apply_chat_template, tokenize=False, **options)):
        raise ValueError(
            f"`{name}` has messages whose `content` is a list of parts, but the chat template of `processing_class` "
            "renders only text. Give the text as `content`, or use a template that renders parts."
        )


def check_options(row: dict[str, Any], place: int, name: str) -> None:
    """Raise `ValueError` for values of `tools` and `chat_template_kwargs` that TRL cannot read."""
    options = row.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        hint = "Give the options of the chat template as a dictionary in each row, or remove the column."
        raise ValueError(f"`chat_template_kwargs` is {reprlib.repr(options)} in row {place} of `{name}`. {hint}")
    tools = row.get("tools")
    try:
        tool_list = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        tool_list = "no JSON"
    if tool_list and not isinstance(tool_list, list):
        hint = 'Replace it with None: `dataset.map(lambda row: {"tools": row["tools"] or None})`.'
        hint = hint if tools == "" else "Give the list of tools itself, the list as JSON, or None for no tools."
        raise ValueError(f"`tools` is {reprlib.repr(tools)} in row {place} of `{name}`. {hint}")


def check_messages(
    rows: Mapping[int, dict[str, Any]], columns: tuple[str, ...], name: str, processing_class: Any
) -> None:
    """Check roles that are not those of every chat template. Conversations with the usual roles are not rendered.

    Raises:
        `ValueError`: a message has no role, or one for which the template does not render the user or the assistant.
    """
    checked_roles: set[str] = set()
    for place, row in rows.items():
        options = row.get("chat_template_kwargs") or {}
        render = partial(_rendered, partial(processing_class.apply_chat_template, tokenize=False, **options))
        for column, conversation in _conversations(row, columns):
            roles = [x["role"] for x in conversation if x.get("role") is not None]
            if len(roles) < len(conversation):
                raise ValueError(
                    f"`{column}` of `{name}` has a message without a role in row {place}. Add `role`, such as 'user'."
                )
            for role in dict.fromkeys(roles):
                if role not in (*_ROLES, *checked_roles):
                    of_prompt = any(x.get("role") == role for x in row.get("prompt") or () if "prompt" in columns)
                    where = f"`{'prompt' if of_prompt else column}` of `{name}` has the role {role!r} in row {place}"
                    conversion = _renaming(row, "prompt" if of_prompt else column)
                    template = options.get("chat_template") or processing_class.chat_template
                    _check_role(role, conversation, where, conversion, render, str(template))
                    checked_roles |= {x for x in roles if x == role or usual_role(x)}


def _conversations(row: dict[str, Any], columns: tuple[str, ...]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (column, conversation): each completion after its prompt, as TRL renders them."""
    if "conversations" in columns:
        return [("conversations", [{"role": x.get("from"), "content": x.get("value")} for x in row["conversations"]])]
    chats = {x: row[x] for x in columns if is_messages(row[x])}
    prompt = chats.get("prompt", [])
    completions = [x for x in chats if x != "prompt"]
    return [(x, prompt + chats[x]) for x in completions] or [("prompt", prompt)]


def _check_role(
    role: str,
    conversation: list[dict[str, Any]],
    where: str,
    conversion: str,
    render: Callable[[list[Any]], str],
    template: str,
) -> None:
    marked_messages = [{**x, "content": _MARKER} if x["role"] == role else x for x in conversation]
    usual = usual_role(role)
    as_given = render(marked_messages)
    as_usual = render(
        [{**x, "role": (usual or "user") if x["role"] == role else _known(x["role"])} for x in marked_messages]
    )
    is_named = re.search(rf"""["']{re.escape(role)}["']""", template) is not None
    if _MARKER not in as_given:
        if usual and _MARKER in as_usual:
            raise ValueError(
                f"{where}, but the chat template of `processing_class` does not render messages with this role. "
                f"{conversion}"
            )
        # Else the template drops it on purpose, renders no plain text, or fails, as it then does in TRL
        if as_given and not usual and not is_named and _MARKER in as_usual:
            logger.warning(
                f"{where}, but the chat template of `processing_class` does not render messages with this role. Give "
                "such messages a role that the template renders, or remove them."
            )
    elif usual and _MARKER in as_usual and as_usual != as_given and not is_named:
        logger.warning(
            f"{where}, and the chat template of `processing_class` renders this name as it is, although models know "
            f"{usual!r}. {conversion}"
        )


def _known(role: str) -> str:
    return usual_role(role) or role


def _rendered(render: Callable[..., str], conversation: list[Any]) -> str:
    try:
        return render(conversation)
    except Exception:  # a template may raise any error
        return ""


def _renaming(row: dict[str, Any], column: str) -> str:
    """Return how to give messages the usual roles."""
    if column == "conversations":
        return sharegpt_hint(row[column], column, ', remove_columns="conversations"')
    names = _role_names(x["role"] for x in row[column])
    return (
        f'Rename the roles: `dataset.map(lambda row: {{"{column}": [{{**x, "role": {names}.get(x["role"], x["role"])}} '
        f'for x in row["{column}"]]}})`.'
    )


def sharegpt_hint(messages: list[dict[str, Any]], column: str, options: str = "") -> str:
    """Return how to convert messages with `from` and `value`. TRL's conversion keeps the roles."""
    names = _role_names(str(x.get("from")) for x in messages)
    role = 'x["from"]' if names == "{}" else f'{names}.get(x["from"], x["from"])'
    new_column = "messages" if column == "conversations" else column
    return (
        f'Convert messages with `from` and `value`: `dataset.map(lambda row: {{"{new_column}": [{{"role": {role}, '
        f'"content": x["value"]}} for x in row["{column}"]]}}{options})`.'
    )


def _role_names(roles: Iterable[str]) -> str:
    usual = {role: usual_role(role) for role in sorted(set(roles)) if usual_role(role)}
    return "{" + ", ".join(f'"{role}": "{new_role}"' for role, new_role in usual.items()) + "}"


def _renders_parts(render: Callable[..., str]) -> bool:
    """Return whether a chat template renders the parts of a list as text, and does not print the list."""
    as_parts = _rendered(render, [{"role": "user", "content": [{"type": "text", "text": "some-text"}]}])
    as_text = _rendered(render, [{"role": "user", "content": "some-text"}])
    return not as_text or ("some-text" in as_parts and "'text'" not in as_parts)
