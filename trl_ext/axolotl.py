"""A plugin for axolotl: its DPO trainer with the exact head, packed rows, and each reference row scored once.

```yaml
rl: dpo
plugins:
  - trl_ext.axolotl.TrlExtPlugin
```
"""

from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import DistributedType, is_peft_model
from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
from axolotl.integrations.base import BasePlugin
from axolotl.utils.logging import get_logger
from packaging.specifiers import SpecifierSet
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from . import core
from .packing.randomness import randomness_of
from .reference.weights import ReferenceWeights

__all__ = ["ExactDPOTrainer", "TrlExtPlugin"]

logger = get_logger(__name__)

# The releases of TRL whose DPO loss and metrics are those of `ExactDPOTrainer`
_TRL = SpecifierSet("==1.9.*")
# What TRL's collator returns for text. Another collator's keys may change the model's output
_KEYS = {"input_ids", "attention_mask", "completion_mask", "ref_chosen_logps", "ref_rejected_logps"}
# Keys of axolotl's config that split sequences, layers or weights over GPUs
_SPLITS = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "dp_shard_size")
_ENGINES = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


class TrlExtPlugin(BasePlugin):
    """Trains `rl: dpo` with [`ExactDPOTrainer`]. Other trainings are axolotl's, and one line of the log says so."""

    def register(self, cfg: Any) -> None:
        """Choose the trainer."""
        # Not `get_trainer_cls`: for RL, axolotl builds the class that it returns without a model
        ours = f"{__name__}.{ExactDPOTrainer.__name__}"
        split = next((name for name in _SPLITS if (cfg.get(name) or 1) != 1), None)
        reason = None
        if cfg.get("rl") != "dpo":
            reason = f"it covers only `rl: dpo`, not {_setting(cfg, 'rl')}"
        elif cfg.get("trainer_cls") not in (None, ours):
            reason = f"{_setting(cfg, 'trainer_cls')} is set"
        elif split is not None:
            reason = f"it was not tried with {_setting(cfg, split)}"
        elif trl.__version__ not in _TRL:
            reason = f"it covers only the DPO loss of trl{_TRL}, not that of trl {trl.__version__}"
        if reason is None:
            cfg["trainer_cls"] = ours
        else:
            _log_handed_over(reason)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Set the model card's data sets, which axolotl gives to its own trainer class alone."""
        if isinstance(trainer, ExactDPOTrainer):
            paths = [dataset["path"] for dataset in cfg.datasets or []]
            trainer.dataset_tags = [path for path in paths if not Path(path).is_dir()]


class ExactDPOTrainer(AxolotlDPOTrainer):  # type: ignore[misc]
    """Axolotl's DPO trainer, whose sigmoid loss reads log-probs from [`core.score`].

    With options that it does not cover, axolotl's trainer trains, and one line of the log says so.
    """

    def __init__(self, model: Any, ref_model: Any = None, *args: Any, **kwargs: Any) -> None:
        # Trained as axolotl does, if there is a reason
        self.uncovered_reason: str | None = None
        self._reference: core.Reference | None = None
        # TRL's constructor prepares the reference model, which `core.attach` must precede
        self._attach(ref_model)
        super().__init__(model, ref_model, *args, **kwargs)
        self.uncovered_reason = self.uncovered_reason or self._find_uncovered()
        if self.uncovered_reason is None:
            self._attach(self.model)
            self._attach(self.ref_model)  # which TRL may have loaded
        if self.uncovered_reason is not None:
            _log_handed_over(self.uncovered_reason)
            return
        if self.precompute_ref_logps:  # batches have its log-probs
            return
        if self.ref_model is None:
            self._reference = core.Reference(self.model, self.accelerator, within=self.model.disable_adapter)
        else:
            # TRL never trains it
            self._reference = core.Reference(self.ref_model.requires_grad_(False), self.accelerator)

    def _attach(self, model: nn.Module | None) -> None:
        if model is not None:
            try:
                core.attach(model)
            except (ValueError, RuntimeError) as error:
                self.uncovered_reason = str(error).rstrip(".")

    def _find_uncovered(self) -> str | None:
        """Return why axolotl's trainer must train, or None."""
        return self._uncovered_loss() or self._uncovered_engine() or self._uncovered_model()

    def _uncovered_loss(self) -> str | None:
        # Of DPOConfig's fields that TRL's loss reads, these may differ from their defaults: `beta`, which is read
        # below; `label_smoothing`, `discopop_tau` and `f_alpha_divergence_coef`, which belong to other losses;
        # `padding_free`, which TRL turns off; `precompute_ref_log_probs`; `max_length`, which the collator reads
        values = {
            "loss_type": (self.loss_types, ["sigmoid"]),
            "loss_weights": (self.loss_weights, [1.0]),
            "f_divergence_type": (self.f_divergence_type, "reverse_kl"),
            "ld_alpha": (self.ld_alpha, None),
            "use_weighting": (self.use_weighting, False),
            "use_liger_kernel": (self.use_liger_kernel, False),
            "sync_ref_model": (self.args.sync_ref_model, False),
        }
        for name, (value, covered) in values.items():
            if value != covered:
                return f"it covers only `{name}={covered!r}`, not {value!r}"
        if self.aux_loss_enabled:
            return "the model has experts, and `router_aux_loss_coef` is not 0"
        return "the data set has images" if self._is_vision_dataset else None

    def _uncovered_engine(self) -> str | None:
        accelerator, args = self.accelerator, self.args
        parallelism = accelerator.parallelism_config
        if accelerator.distributed_type not in _ENGINES:
            return f"it was not tried with {accelerator.distributed_type.value}"
        if parallelism is not None and parallelism.total_size > parallelism.dp_replicate_size:
            return "it was not tried with sequences, layers or weights that are split over GPUs"
        if args.n_gpu > 1:
            return "torch's `DataParallel` splits batches over GPUs. Start one process for each GPU instead"
        if accelerator.mixed_precision not in ("no", "bf16"):
            return f"it covers only fp32 and bf16, not {accelerator.mixed_precision}"
        for name in ("torch_compile", "activation_offloading"):
            if getattr(args, name):
                return f"it was not tried with `{name}`"
        return None

    def _uncovered_model(self) -> str | None:
        # In TRL, an adapter's reference draws too: its pass runs in training mode
        randomness = randomness_of(self.model, self.args.neftune_noise_alpha)
        if randomness is not None:
            return f"two passes of the model may differ, because {randomness.reason}"
        if self.ref_model is not None or self.precompute_ref_logps:
            return None
        if not is_peft_model(self.model):
            return "it needs a reference model or an adapter"
        if "ref" in self.model.peft_config:
            return "the model had an adapter already, and TRL copied it as the reference"
        with self.model.disable_adapter():
            trained = next(ReferenceWeights.of_model(self.model).trained_parameters(), None)
        return None if trained is None else f"training changes `{trained[0]}`, which the reference reads"

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        unknown = inputs.keys() - _KEYS
        if unknown and self.uncovered_reason is None:
            self.uncovered_reason = f"batches have `{min(unknown)}`, which the model may read but trl_ext does not pass"
            _log_handed_over(self.uncovered_reason)
        if self.uncovered_reason is not None or return_outputs:  # the outputs have logits
            return super()._compute_loss(model, inputs, return_outputs)
        batch = {
            "input_ids": inputs["input_ids"],
            "attention_mask": inputs["attention_mask"],
            "labels": inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100),
        }
        if self._reference is None:
            reference_B = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        else:
            reference_B = self._reference.log_probs(**batch).sum(dim=1)
        scores = core.score(model, **batch, outputs=("entropy", "mean_logits", "is_top1"))
        assert scores.log_probs is not None
        policy_B = scores.log_probs.sum(dim=1)
        chosen_ratios, rejected_ratios = (policy_B - reference_B).chunk(2)
        self._record(inputs["attention_mask"], scores, policy_B.detach(), self.beta * (policy_B - reference_B).detach())
        return -logsigmoid(self.beta * (chosen_ratios - rejected_ratios)).mean()

    @torch.no_grad()
    def _record(
        self, attention_mask: Tensor, scores: core.FusedCausalLMOutput, policy_B: Tensor, rewards_B: Tensor
    ) -> None:
        """Add TRL's metrics of a batch, `(B, S)`, whose first half is chosen. Every rank calls it."""
        mode = "train" if self.model.training else "eval"
        of_tokens = {
            "tokens": scores.label_mask,
            "entropy": scores.entropy,
            "logits": scores.mean_logits,
            "correct": scores.is_top1,
        }
        sums: dict[str, Any] = {"attended": attention_mask.sum()}
        for name, values in of_tokens.items():
            assert values is not None
            sums[f"chosen {name}"], sums[f"rejected {name}"] = (x.sum() for x in values.chunk(2))
        # As TRL does: in evaluation, a rank beyond the last rows of the data set does not count
        sums = {name: x.sum().item() for name, x in self.accelerator.gather_for_metrics(sums).items()}
        chosen_rewards, rejected_rewards = rewards_B.chunk(2)
        chosen_logps, rejected_logps = policy_B.chunk(2)
        rows = {
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
            "rewards/margins": chosen_rewards - rejected_rewards,
            "logps/chosen": chosen_logps,
            "logps/rejected": rejected_logps,
        }
        chosen_tokens, rejected_tokens = sums["chosen tokens"], sums["rejected tokens"]
        entropy = sums["chosen entropy"] + sums["rejected entropy"]
        metrics = {
            "entropy": _ratio(entropy, chosen_tokens + rejected_tokens),
            "logits/chosen": _ratio(sums["chosen logits"], chosen_tokens),
            "logits/rejected": _ratio(sums["rejected logits"], rejected_tokens),
            "mean_token_accuracy": _ratio(sums["chosen correct"], chosen_tokens),
            **{name: x.mean().item() for name, x in self.accelerator.gather(rows).items()},
        }
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        if mode == "train":
            self._total_train_tokens += sums["attended"]
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]


def _ratio(total: float, tokens: float) -> float:
    return total / tokens if tokens else 0.0


def _setting(cfg: Any, name: str) -> str:
    return f"`{name}: {cfg.get(name)}`"


def _log_handed_over(reason: str) -> None:
    logger.warning(f"trl_ext is off, and axolotl trains without it: {reason}.")
