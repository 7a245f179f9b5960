"""Hidden states to per-token log-probs and statistics of the logits. Knows torch only."""

from .adapted import Factors, LowRank, Operands, ReplacedRows, low_rank_term
from .dense import dense_logits, log_probs_of
from .exchange import Exchange, OneProcess, OwnTokens, Part, SameTokens, all_gather, tokens_of_ranks
from .given_product import log_probs_of_product
from .kernels import KERNELS, check_kernels, why_not_triton
from .linear_log_probs import HEADS, linear_log_probs, operand_dtype, run_head
from .logits import LogitTransform
from .outputs import OUTPUTS, LinearLogProbs
from .products import statistics_dtype
from .rows import Block, RowsHere, RowsInTurn
from .scan import Head
from .tiled import tiled_log_probs
from .vocabulary import VocabularyShard

__all__ = [
    "HEADS",
    "KERNELS",
    "OUTPUTS",
    "Block",
    "Exchange",
    "Factors",
    "Head",
    "LinearLogProbs",
    "LogitTransform",
    "LowRank",
    "OneProcess",
    "Operands",
    "OwnTokens",
    "Part",
    "ReplacedRows",
    "RowsHere",
    "RowsInTurn",
    "SameTokens",
    "VocabularyShard",
    "all_gather",
    "check_kernels",
    "dense_logits",
    "linear_log_probs",
    "log_probs_of",
    "log_probs_of_product",
    "low_rank_term",
    "operand_dtype",
    "run_head",
    "statistics_dtype",
    "tiled_log_probs",
    "tokens_of_ranks",
    "why_not_triton",
]
