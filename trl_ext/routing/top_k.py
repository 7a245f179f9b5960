"""Calls of `topk` in a router's forward: watched, and one of them answered with other indices.

Dimensions: N tokens, k experts of a token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class TopKCalls(TorchFunctionMode):
    """Watches the calls of `topk` in the `with` block, and may answer the one with a `number`.

    Args:
        number (`int`): of the call to watch, counted from 1; 0: each of them, so that `indices` are those of the last.
        answer_Nk (`Tensor`, *optional*): the indices that the call returns, int64, with the values of its input there.
            A negative index is unknown, and the call's own indices stay.
    """

    def __init__(self, number: int = 0, answer_Nk: Tensor | None = None) -> None:
        self.number = number
        self.answer_Nk = answer_Nk
        self.calls = 0
        self.indices: Tensor | None = None  # what the call has chosen itself
        super().__init__()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = function(*args, **keywords)
        if function not in (torch.topk, Tensor.topk):
            return result
        self.calls += 1
        if self.number not in (0, self.calls):
            return result
        self.indices = result.indices
        if self.answer_Nk is None:
            return result
        answer = self.answer_Nk.view_as(result.indices)
        indices = torch.where(answer < 0, result.indices, answer)
        values = args[0] if args else keywords["input"]
        return torch.return_types.topk((values.gather(-1, indices), indices))
