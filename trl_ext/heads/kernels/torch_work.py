"""The work between the products in plain torch: on any device, and the reference for the kernels."""

import torch
from torch import Tensor

from ..gradients import Coefficients
from ..logits import LogitTransform
from ..statistics import RunningStatistics
from ..tiles import Tile


class TorchWork:
    """What is done with a tile of the product, by torch's own operations; the product is overwritten.

    Args:
        transform (`LogitTransform`): from the product to the logits.
    """

    def __init__(self, transform: LogitTransform) -> None:
        self.transform = transform
        self._scratch: Tensor | None = None

    def fold(
        self, statistics: RunningStatistics, tile: Tile, coefficients: torch.dtype | None, sums_nH: Tensor | None
    ) -> Tensor | None:
        """Fold a tile into `statistics`.

        Args:
            coefficients (`torch.dtype`, *optional*): asks for exp(z - shift) dz/dx over the slope, of shape (n, v) and
                this dtype, 0 for the target.
            sums_nH (`Tensor` of shape `(n, H)`, *optional*): what earlier tiles have summed up in units of exp(shift),
                rescaled where the shift moves.
        """
        logits, scratch = self._logits(tile)
        # Read before the target's column is put out: that column holds no logit
        softcap_derivative = self.transform.softcap_derivative(logits) if coefficients is not None else None
        statistics.take_target_(tile.tokens, tile.classes.start, logits, scratch)
        rescale = statistics.fold_(tile.tokens, logits, scratch)
        # Elsewhere the look would wait for the device
        if sums_nH is not None and (sums_nH.device.type != "cpu" or bool((rescale != 1).any())):
            sums_nH.mul_(rescale)
        if coefficients is None:
            return None
        return (scratch if softcap_derivative is None else scratch.mul_(softcap_derivative)).to(coefficients)

    def gradient(
        self,
        coefficients: Coefficients,
        tile: Tile,
        targets: Tensor,
        *,
        nontarget_grad: torch.dtype | None,
        whole: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradient of a tile's products without the target's term, and the whole one, in the coefficients' unit.

        Either of shape (n, v), None where no dtype is given. `targets` (n,) are class ids.
        """
        logits, scratch = self._logits(tile)
        local = targets - tile.classes.start
        of_others = coefficients.nontarget_grad_(tile.tokens, local, logits, scratch)
        result = of_others.to(nontarget_grad) if nontarget_grad is not None else None
        if whole is None:
            return result, None
        if result is of_others:
            of_others = logits.copy_(of_others)
        return result, coefficients.add_target_grad_(tile.tokens, local, of_others).to(whole)

    def _logits(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The logits in the place of the product, and a buffer of their shape."""
        if self._scratch is None or self._scratch.numel() < tile.product.numel():
            self._scratch = torch.empty_like(tile.product).view(-1)
        if tile.bias is not None:
            tile.product.add_(tile.bias)
        self.transform.apply_(tile.product)
        return tile.product, self._scratch[: tile.product.numel()].view(tile.product.shape)
