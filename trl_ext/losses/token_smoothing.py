"""Label smoothing over the tokens of a language-modelling loss, from log-probs and their mean over the vocabulary."""

from torch import Tensor

CONVENTIONS = ("pytorch", "megatron")


def smoothing_term(
    log_probs: Tensor, mean_log_probs: Tensor, mask: Tensor, smoothing: float, convention: str, vocabulary: int
) -> Tensor:
    """What label smoothing adds to the mean negative log-prob of the tokens in `mask`; a scalar.

    With K classes, PyTorch gives a / K to every class and 1 - a more to the target; Megatron gives the target 1 - a and
    every other class a / (K - 1), which is PyTorch's with a K / (K - 1) for a (Megatron-LM issue 5522). In PyTorch's a
    token's loss is (1 - a) (-log p_t) + a (-mean log p), that is -log p_t and a (log p_t - mean log p) more.

    Args:
        log_probs (`Tensor`): of the targets.
        mean_log_probs (`Tensor`): of the same shape, the mean over the whole vocabulary.
        mask (`Tensor`): of the same shape, nonzero where a token counts.
        smoothing (`float`): a, in [0, 1).
        convention (`str`): `"pytorch"` or `"megatron"`.
        vocabulary (`int`): K, also where a rank holds a part of the classes.
    """
    if convention == "megatron":
        smoothing *= vocabulary / (vocabulary - 1)
    counted = mask.bool()
    return smoothing * (log_probs[counted] - mean_log_probs[counted]).mean()
