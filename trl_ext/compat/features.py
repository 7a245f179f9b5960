"""Which feature needs which internals of other libraries, and what a trainer does where one of them has moved.

A feature is turned off for the trainers whose internals have moved, with one warning, and TRL's own way runs. Names in
no feature are needed by the exact head or by `compute_loss`: without them, that trainer stops before it is built.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from ..version import TESTED, __version__
from . import FOUND, MOVED
from .moved import Moved


@dataclass(frozen=True)
class Feature:
    """What a trainer can do without.

    Args:
        without (`str`): what it does then, as a clause.
        names (`dict[str, str]`): its names, by their places in `names.json`; both may hold `*`.
        methods (`str`): methods of ours that give way to TRL's.
        trainers (`str`): those that have the feature; by default, all.
        is_refused (`bool`): there is no other way, so that asking for the feature is an error.
    """

    without: str
    names: dict[str, str]
    methods: str = ""
    trainers: str = ""
    is_refused: bool = False


_TRAINERS = "trl.trainer.*_trainer"
_CLASSES = f"{_TRAINERS}:*Trainer"
_TRAINER = "transformers.trainer:Trainer"

FEATURES = {
    "vLLM": Feature(
        "cannot use vLLM",
        {
            "trl.generation.*": "*",
            _TRAINERS: "VLLMGeneration",
            _CLASSES: "vllm_generation vllm_mode vllm_importance_sampling_*",
        },
        is_refused=True,
    ),
    "adapters": Feature(
        "cannot train PEFT adapters",
        {
            "peft.*": "*",
            _TRAINERS: "BaseTunerLayer get_peft_model is_peft_model use_adapter",
            "transformers.modeling_utils:PreTrainedModel": '"_hf_peft_config_loaded"',
        },
        is_refused=True,
    ),
    "store": Feature(
        "runs the reference in each step",
        {
            _CLASSES: "_precompute_ref_logps",
            "accelerate.accelerator:*": "_models",
            "transformers.dynamic_module_utils": "*",
            "transformers.masking_utils": "*",
            "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
            "transformers.configuration_utils:*": "_experts_implementation _name_or_path",
        },
        methods="_precompute_ref_logps",
        trainers="DPOTrainer KTOTrainer",
    ),
    "freeing the reference": Feature(
        "keeps a reference model in memory after it has scored all data",
        {
            _TRAINERS: "create_model_from_path hash_module",
            "trl.trainer.utils": "disable_dropout_in_model",
        },
        trainers="DPOTrainer KTOTrainer",
    ),
    "precomputing under DeepSpeed": Feature(
        "cannot precompute reference log-probs under DeepSpeed",
        {_CLASSES: "_precompute_engine", "trl.models": "prepare_deepspeed"},
        trainers="DPOTrainer KTOTrainer",
        is_refused=True,
    ),
    "passes without checkpointing": Feature(
        "leaves gradient checkpointing on in passes without a loss",
        {"trl.models.utils": "disable_gradient_checkpointing"},
        trainers="DPOTrainer KTOTrainer GRPOTrainer RLOOTrainer",
    ),
    "packing": Feature(
        "processes padding and repeated prompts",
        {
            "accelerate.hooks": "._old_forward",
            "transformers.modeling_utils:PreTrainedModel": "_is_stateful _supports_attention_backend",
            "transformers.configuration_utils:*": "_attn_implementation_internal",
        },
    ),
    "balance": Feature(
        "keeps TRL's order of rows",
        {_TRAINERS: "shuffle_sequence_dict"},
    ),
    "parts": Feature(
        "cannot split micro-batches (`max_tokens_per_micro_batch`)",
        {"accelerate.state:GradientState": "*"},
        is_refused=True,
    ),
    "dynamic sampling": Feature(
        "cannot draw further prompts (`dynamic_sampling`)",
        {_CLASSES: "shuffle_dataset"},
        is_refused=True,
    ),
    "sampling ahead": Feature(
        "samples no generation batch ahead (`generation_lag`, `sample_ahead`)",
        {"trl.trainer.utils": "RepeatSampler identity", _CLASSES: "eos_token_ids"},
        trainers="GRPOTrainer",
    ),
    "fewer rows in generation": Feature(
        "runs every copy of a prompt and finished completions in `generate`",
        {
            "transformers.generation.utils:GenerationMixin": "_prefill _get_stopping_criteria",
            "transformers.generation.stopping_criteria:*": "*",
            "transformers.cache_utils": "*",
            "transformers.cache_utils:Cache": "*",
            _CLASSES: "continuous_batching_config generation_config use_transformers_continuous_batching",
        },
        trainers="GRPOTrainer RLOOTrainer",
    ),
    "routes of continuous batching": Feature(
        "cannot replay the routes of continuous batching",
        {"transformers.generation.continuous_batching.*": "*"},
        trainers="GRPOTrainer RLOOTrainer",
        is_refused=True,
    ),
    "sampling mask": Feature(
        "does not record which tokens `generate` can choose",
        {
            "transformers.generation.*": "_get_logits_processor",
            _CLASSES: "use_transformers_continuous_batching",
        },
        trainers="GRPOTrainer",
    ),
    "entropy ties": Feature(
        "does not correct rounding in the selection of high-entropy tokens (`top_entropy_quantile`)",
        {_CLASSES: "get_high_entropy_mask"},
        methods="get_high_entropy_mask",
    ),
    "reward losses": Feature(
        "cannot read rewards from the data set",
        {_CLASSES: "_set_signature_columns_if_needed", _TRAINER: "_signature_columns"},
        methods="_set_signature_columns_if_needed",
        is_refused=True,
    ),
    "sums of log-probs": Feature(
        "cannot compute loss types that trl_ext adds, or bound a loss that may overflow,",
        {_CLASSES: "compute_ref_log_probs"},
        is_refused=True,
    ),
    "router loss": Feature(
        "cannot add a router loss",
        {"transformers.models.mixtral.*": "*"},
        is_refused=True,
    ),
    "non-finite losses": Feature(
        "does not watch for losses that are not finite (`on_non_finite_loss`)",
        {"transformers.training_args": "OptimizerNames"},
        is_refused=True,
    ),
    "classifiers": Feature(
        "cannot train sequence classifiers",
        {
            "transformers.modeling_layers": "GenericForSequenceClassification",
            "transformers.modeling_outputs": "SequenceClassifierOutputWithPast",
        },
        trainers="RewardTrainer",
        is_refused=True,
    ),
    "teacher by name": Feature(
        "cannot load a teacher by its name",
        {
            _TRAINERS: "create_model_from_path",
            "trl.trainer.utils": "create_model_from_path",
            "trl.models": "prepare_deepspeed",
        },
        trainers="DistillationTrainer",
        is_refused=True,
    ),
    "checks of data": Feature(
        "leaves the checks of data to TRL",
        {_CLASSES: "_prepare_dataset", "datasets.*": "*"},
        methods="_prepare_dataset",
    ),
    "checks of rewards": Feature(
        "does not check what reward functions return",
        {"trl.trainer.utils": "is_async_callable"},
        trainers="GRPOTrainer RLOOTrainer",
    ),
    "checkpoints": Feature(
        "writes and reads checkpoints as TRL does",
        {
            "transformers.trainer": "OPTIMIZER_NAME SCHEDULER_NAME TRAINING_ARGS_NAME rotate_checkpoints",
            "transformers.trainer_utils": "PREFIX_CHECKPOINT_DIR",
            _TRAINER: (
                "_get_output_dir _init_training_state _load_best_model _load_from_checkpoint "
                "_load_optimizer_and_scheduler _push_from_checkpoint _save_optimizer_and_scheduler"
            ),
            _CLASSES: "_save_checkpoint _load_optimizer_and_scheduler _last_loaded_step",
        },
        methods=(
            "_init_training_state _save_checkpoint _push_from_checkpoint _save_optimizer_and_scheduler "
            "_load_from_checkpoint _load_best_model _load_optimizer_and_scheduler"
        ),
    ),
    "check of checkpointing": Feature(
        "does not check whether DDP supports the kind of gradient checkpointing",
        {"transformers.modeling_layers:*": "*"},
    ),
    "evaluation before training": Feature(
        "evaluates before training as TRL does",
        {"accelerate.accelerator": "*", "accelerate.accelerator:*": "_models"},
    ),
    "best metric": Feature(
        "chooses the best checkpoint as TRL does",
        {_TRAINER: "_determine_best_metric _report_to_hp_search"},
        methods="_determine_best_metric _report_to_hp_search",
    ),
    "logs": Feature(
        "does not log what it skips",
        {_CLASSES: "log"},
        methods="log",
    ),
    "progress bar": Feature(
        "shows TRL's progress bar",
        {"transformers.trainer_callback:ProgressCallback": "*", "transformers.trainer_callback:*": "training_bar"},
    ),
    "model card": Feature(
        "writes TRL's model card",
        {"trl.trainer.base_trainer:*": "create_model_card", _CLASSES: "_tag_names"},
        methods="create_model_card",
    ),
    "activation offloading": Feature(
        "offloads activations as TRL does",
        {_TRAINERS: "get_act_offloading_ctx_manager"},
    ),
    "moving reference": Feature(
        "cannot update the reference (`sync_ref_model`)",
        {"trl.trainer.callbacks:*": "*"},
        is_refused=True,
    ),
    "tensor parallelism": Feature(
        "cannot use tensor parallelism",
        {
            "transformers.integrations.tensor_parallel": "*",
            "transformers.modeling_utils:PreTrainedModel": "_tp_size",
            _TRAINERS: "gather gather_object",
            _TRAINER: "get_tp_size get_total_train_batch_size",
        },
        methods="get_tp_size get_total_train_batch_size",
        is_refused=True,
    ),
    "sequence parallelism": Feature(
        "cannot use context parallelism or Ulysses",
        {
            "accelerate.accelerator:Accelerator": "_prepare_cp _prepare_deepspeed deepspeed_ulysses_dl_adapter",
            "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
            _TRAINERS: "gather gather_object",
            _TRAINER: "_prepare_context_parallel_inputs floating_point_ops get_sp_size",
        },
        methods="_prepare_context_parallel_inputs floating_point_ops get_sp_size",
        is_refused=True,
    ),
    "command line": Feature(
        "has no command line",
        {
            "trl.cli.*": "*",
            "trl.scripts.*": "*",
            "trl.trainer.*_config:*": "_VALID_DICT_FIELDS lora_task_type",
            "accelerate.commands.*": "*",
            "accelerate.utils.fsdp_utils": "*",
            "transformers.integrations.integration_utils": "*",
            "transformers.quantizers": "*",
            _TRAINER: "get_decay_parameter_names get_optimizer_cls_and_kwargs push_to_hub",
        },
        is_refused=True,
    ),
}


class Features:
    """The features of one trainer that are off, because an internal that they need has moved.

    Args:
        trainer (`str`): the name of TRL's class.

    Raises:
        `ImportError`: the exact head or `compute_loss` needs an internal that has moved.
    """

    def __init__(self, trainer: str) -> None:
        self.trainer = trainer
        self.off: dict[str, Moved] = {}
        for name, features in _moved_of(trainer):
            if features is None:
                raise ImportError(self._message("does not work", name))
            for feature in features:
                self.off.setdefault(feature, name)

    def warn(self) -> None:
        """Warn of each feature that is off and not refused."""
        for feature, name in self.off.items():
            if not FEATURES[feature].is_refused:
                warnings.warn(self._message(FEATURES[feature].without, name), stacklevel=2)

    def why_off(self, feature: str) -> str | None:
        """Return why a feature is off, as a clause; `None` if it is on."""
        name = self.off.get(feature)
        return None if name is None else f"with {name.package} {FOUND[name.package]}, {name.change}"

    def require(self, feature: str, without: str | None = None) -> None:
        """Raise `ImportError` if a feature that the user asks for is off. `without`: in place of the feature's own."""
        if feature in self.off:
            raise ImportError(self._message(without or FEATURES[feature].without, self.off[feature]))

    def _message(self, without: str, name: Moved) -> str:
        return _message(f"`{self.trainer}` of trl_ext", without, name)


def check_command_line() -> None:
    """Raise `ImportError` if an internal that the command line needs has moved."""
    for name in MOVED:
        if "command line" in features_of(name.place, name.name):
            raise ImportError(_message("`trl-ext`", "does not work", name))


def features_of(place: str, name: str) -> list[str]:
    """Return the features that need a name of `names.json`; none if the exact head or `compute_loss` needs it."""
    return [
        feature
        for feature, needs in FEATURES.items()
        if any(
            fnmatch(place, pattern) and any(fnmatch(name, x) for x in names.split())
            for pattern, names in needs.names.items()
        )
    ]


def _message(subject: str, without: str, name: Moved) -> str:
    package = name.package
    return (
        f"{subject} {__version__} {without} with {package} {FOUND[package]}, because {name.change}. Run `pip install "
        f"'{package}{TESTED[package]}'`, or install a later trl_ext."
    )


def methods_off(trainer: str) -> list[str]:
    """Return the methods of ours that give way to those of TRL's class `trainer`."""
    off = dict.fromkeys(feature for _, features in _moved_of(trainer) for feature in features or ())
    return [method for feature in off for method in FEATURES[feature].methods.split()]


def _moved_of(trainer: str) -> Iterator[tuple[Moved, list[str] | None]]:
    """Yield what has moved, with the features of `trainer` that need it; `None` if `trainer` does not train without."""
    for name in MOVED:
        if _concerns(name.place, trainer):
            features = features_of(name.place, name.name)
            of_trainer = [x for x in features if trainer in (FEATURES[x].trainers or trainer).split()]
            yield name, of_trainer if features else None


def config_of_trl(name: str) -> Any:
    """Return a config of TRL's. If TRL no longer has it, a class that cannot be built: the other trainers go on."""
    import trl  # here, because the command line asks for features before it imports a library

    config_class = getattr(trl, name, None)
    if config_class is not None:
        return config_class

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        gone = Moved("trl", name, f"`trl` has no `{name}`")
        raise ImportError(_message(f"`{name}` of trl_ext", "does not work", gone))

    return type(name, (), {"__new__": refuse})


def _concerns(place: str, trainer: str) -> bool:
    """Whether a trainer uses a place: that of no trainer, or of its own file or config."""
    file = place.partition(":")[0].rpartition(".")[2]
    owner = file.removesuffix("_trainer").removesuffix("_config")
    return owner == file or owner == "base" or f"{owner}trainer" == trainer.lower()
