"""A made-up TRL 1.17: a copy of the installed TRL with changes of its source, for processes that find it first.

`NEW_LOSS_TYPES` adds a loss type to each trainer whose gradient depends on the whole micro-batch, on rows and tokens
that the loss types of today ignore, and on the entropy. Their names are in `NEW`.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path
from typing import NamedTuple

import trl

VERSION = "1.17.0"
SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]


class Change(NamedTuple):
    """A change of one of TRL's files: each match of the regular expression `old` becomes `new`."""

    file: str
    old: str
    new: str


# Trainer -> its new loss type
NEW = {"dpo": "batch_centered", "grpo": "batch_pull", "kto": "batch_kto", "sft": "batch_focal"}
# A new loss type of DPO that sums over all ranks within the loss
OF_RANKS = "sft_of_ranks"

_DPO = r"""
            elif loss_type == "batch_centered":
                centred = delta_score - delta_score.mean()
                per_sequence_loss = -F.logsigmoid(self.beta * (delta_score + centred)) - 0.1 * outputs.entropy.mean()

            elif loss_type == "sft_of_ranks":
                chosen_mask, _ = shift_completion_mask.chunk(2, dim=0)
                chosen_per_token_logps, _ = per_token_logps.chunk(2, dim=0)
                tokens = self.accelerator.gather(chosen_mask.sum()).sum()
                total = -(chosen_per_token_logps * chosen_mask).sum()
                mean = total * self.accelerator.num_processes / tokens
                per_sequence_loss = mean.expand(chosen_per_token_logps.size(0))

            elif loss_type == "sft":
"""
_GRPO = r"""
        elif self.loss_type == "batch_pull":
            mean_logp = (per_token_logps * mask).sum() / mask.sum().clamp(min=1.0)
            per_token_loss = -coef_1 * advantages + 0.1 * (per_token_logps - mean_logp) ** 2 - 0.1 * entropies
        elif self.loss_type == "sapo":
"""
_KTO = r"""\1            elif self.loss_type == "batch_kto":
                \2_losses = 1 - F.sigmoid(self.beta * (\2_logratios - 0.5 * \2_logratios.mean()))
"""
_SFT = r"""
                    if self.args.loss_type == "batch_focal":
                        per_token_loss = per_token_loss * (per_token_loss.mean().detach() + per_token_loss)
                    if self.args.loss_type == "dft":
"""
NEW_LOSS_TYPES = [
    Change("trainer/dpo_trainer.py", r'\n            elif loss_type == "sft":\n', _DPO),
    Change("trainer/grpo_trainer.py", r'\n        elif self\.loss_type == "sapo":\n', _GRPO),
    Change(
        "trainer/grpo_trainer.py",
        r'elif self\.loss_type == "bnpo":\n            loss =',
        'elif self.loss_type in ["bnpo", "batch_pull"]:\n            loss =',
    ),
    Change("trainer/kto_trainer.py", r"( +(chosen)_losses = 1 - F\.sigmoid\(self\.beta \* \(.* - kl\)\)\n)", _KTO),
    Change("trainer/kto_trainer.py", r"( +(rejected)_losses = 1 - F\.sigmoid\(self\.beta \* \(kl - .*\)\)\n)", _KTO),
    Change("trainer/sft_trainer.py", r'not in \("nll", "dft"\)', 'not in ("nll", "dft", "batch_focal")'),
    Change("trainer/sft_trainer.py", r'\n                    if self\.args\.loss_type == "dft":\n', _SFT),
]


def make_later_trl(folder: Path, changes: list[Change]) -> None:
    """Write the installed TRL into `folder`, with its version and these changes.

    Raises:
        `AssertionError`: there is nothing to change.
    """
    of_package, metadata = Path(trl.__file__).parent, Path(str(distribution("trl")._path))  # type: ignore[attr-defined]
    shutil.copytree(of_package, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(metadata, folder / f"trl-{VERSION}.dist-info")
    text = (metadata / "METADATA").read_text()
    (folder / f"trl-{VERSION}.dist-info" / "METADATA").write_text(
        text.replace(f"Version: {version('trl')}", f"Version: {VERSION}")
    )
    for change in changes:
        path = folder / "trl" / change.file
        source, count = re.subn(change.old, change.new, path.read_text())
        assert count, f"{change.file} has no {change.old}"
        path.write_text(source)


def environment_of(folder: Path, *paths: Path) -> dict[str, str]:
    """Return the environment of a process that finds the TRL in `folder` first, then this package and `paths`."""
    path = os.pathsep.join(map(str, (folder, ROOT, SUPPORT, *paths)))
    return os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


def run_python(code: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run `code` in a new process, which shows warnings instead of raising them, because libraries warn too."""
    command = [sys.executable, "-W", "default", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
