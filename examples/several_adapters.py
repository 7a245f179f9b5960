r"""Several adapters on one model: DPO trains one, and another, frozen one is the reference.

Takes half a minute on a CPU, with the demo's model and data:

    python examples/several_adapters.py --output_dir runs/adapters

The base model is in memory only once. `policy_adapter_name` names the adapter to train, and `ref_adapter_name` the
reference; a fresh adapter whose reference is the base model needs neither. Here the first stage trains the adapter
"sums", and the second trains "both", a copy of it, with "sums" as the reference.
"""

from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import TrlParser

from trl_ext import DPOConfig, DPOTrainer


@dataclass
class Task:
    """The model and the data.

    Args:
        model (`str`, *optional*): a Hub name or a folder.
        data (`str`, *optional*): a dataset of preference pairs.
    """

    model: str = field(default="examples/demo/model", metadata={"help": "Hub name or folder."})
    data: str = field(default="examples/demo/data/dpo", metadata={"help": "With `prompt`, `chosen` and `rejected`."})


def stage(model: PeftModel, data: Dataset, config: DPOConfig, tokenizer: AutoTokenizer) -> None:
    """Train the adapter that `config` names."""
    trainer = DPOTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    print(trainer.explain()["reference"].reason)
    trainer.train()


def main(task: Task, config: DPOConfig) -> None:
    data = load_dataset(task.data, split="train")
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(task.model), lora, adapter_name="sums")
    config.policy_adapter_name = "sums"
    stage(model, data.filter(lambda pair: "+" in pair["prompt"]), config, tokenizer)

    folder = Path(config.output_dir)
    model.save_pretrained(folder, selected_adapters=["sums"])
    model.load_adapter(folder / "sums", "both", is_trainable=True)
    config.policy_adapter_name, config.ref_adapter_name = "both", "sums"
    stage(model, data, config, tokenizer)
    model.save_pretrained(folder, selected_adapters=["both"])


if __name__ == "__main__":
    parser = TrlParser((Task, DPOConfig))
    parser.set_defaults(
        beta=1.0,
        learning_rate=3e-4,
        max_steps=20,
        per_device_train_batch_size=16,
        logging_steps=4,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    main(*parser.parse_args_and_config())
