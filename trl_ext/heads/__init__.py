"""Hidden states to per-token log-probs and statistics of the logits. Knows torch only."""

from .dense import dense_logits, log_probs_of
from .exchange import Exchange, OneProcess, OwnTokens, Part, SameTokens, all_gather, tokens_of_ranks
from .linear_log_probs import HEADS, linear_log_probs, operand_dtype, run_head
from .logits import LogitTransform
from .outputs import OUTPUTS, LinearLogProbs
from .rows import Block, RowsHere, RowsInTurn
from .tiled import Head, tiled_log_probs
from .vocabulary import VocabularyShard

__all__ = [
    "HEADS",
    "OUTPUTS",
    "Block",
    "Exchange",
    "Head",
    "LinearLogProbs",
    "LogitTransform",
    "OneProcess",
    "OwnTokens",
    "Part",
    "RowsHere",
    "RowsInTurn",
    "SameTokens",
    "VocabularyShard",
    "all_gather",
    "dense_logits",
    "linear_log_probs",
    "log_probs_of",
    "operand_dtype",
    "run_head",
    "tiled_log_probs",
    "tokens_of_ranks",
]
