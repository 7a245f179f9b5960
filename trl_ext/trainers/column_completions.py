"""Completions of a column of the data set, in place of those that the student samples."""

from typing import Any, Protocol

from trl import is_conversational


class Trainer(Protocol):
    """The trainer members that are read."""

    processing_class: Any
    _tokenizer: Any
    chat_template: Any
    chat_template_kwargs: dict[str, Any]
    max_completion_length: int | None
    eos_token_ids: list[int]

    def _tokenize_prompts(self, prompts: list[Any]) -> Any: ...


class ColumnCompletions:
    """The completions of one trainer's data set."""

    def __init__(self, trainer: Trainer, column: str) -> None:
        self.trainer = trainer
        self.column = column
        self._rows: list[dict[str, Any]] = []  # of the batch that TRL prepares

    def take(self, rows: list[dict[str, Any]]) -> None:
        """Take the rows of a batch, for which TRL then asks for completions."""
        empty_row = next((row for row in rows if not row.get(self.column)), None)
        if empty_row is not None:
            raise ValueError(
                f"A row has no completion in the column `{self.column}` (`completion_column`): {empty_row}. Fill it, "
                "or remove the row."
            )
        self._rows = rows

    def token_ids(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Return the completion of each row of the batch, at most `max_completion_length` tokens."""
        rows, self._rows = self._rows, []
        completions = [self.completion_ids(row, ids) for row, ids in zip(rows, prompt_ids, strict=True)]
        return [ids[: self.trainer.max_completion_length] for ids in completions]

    def completion_ids(self, row: dict[str, Any], prompt_ids: list[int]) -> list[int]:
        """Return the token ids of a row's completion. `prompt_ids`: those of its prompt.

        Raises:
            `ValueError`: the completion is not of the prompt's type, has turns of others than the assistant, or the
                chat template renders it differently from the prompt alone.
        """
        completion = row[self.column]
        tokenizer = self.trainer._tokenizer
        if isinstance(completion, str) != isinstance(row["prompt"], str):
            raise ValueError(
                f"A row has text in one of the columns `prompt` and `{self.column}` (`completion_column`), and "
                f"messages in the other. Use the same in both: {row}."
            )
        if not is_conversational({"prompt": row["prompt"]}):
            # As TRL does for other trainers, a completion ends with the token that ends a text
            ids: list[int] = tokenizer(text=completion, add_special_tokens=False)["input_ids"]
            lacks_end = tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]
            return [*ids, tokenizer.eos_token_id] if lacks_end else ids
        if any(message["role"] != "assistant" for message in completion):
            raise ValueError(
                f"`{self.column}` (`completion_column`) has messages of another role than 'assistant': {completion}. "
                "Only the assistant's are distilled. Move the messages before the last answer to `prompt`."
            )
        rendered_ids = tokenizer.apply_chat_template(
            [*row["prompt"], *completion],
            chat_template=self.trainer.chat_template,
            tokenize=True,
            return_dict=True,
            **self.trainer.chat_template_kwargs,
        )["input_ids"]
        if rendered_ids[: len(prompt_ids)] != prompt_ids:
            raise ValueError(
                "The chat template renders a prompt with its completion differently from the prompt alone, so the "
                f"tokens of `{self.column}` (`completion_column`) are not known. Use text in both columns, or another "
                "template."
            )
        return self._cut_trailing_text(list(rendered_ids[len(prompt_ids) :]))

    def _cut_trailing_text(self, ids: list[int]) -> list[int]:
        """Return a rendered completion without what the template writes after its last end token, such as a newline."""
        last_index = next((i for i in reversed(range(len(ids))) if ids[i] in self.trainer.eos_token_ids), len(ids) - 1)
        return ids[: last_index + 1]
