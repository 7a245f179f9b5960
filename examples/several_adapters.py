r"""Several adapters in one model: one is trained with DPO, another, frozen, is its reference.

On the demo's model and data, on a CPU, half a minute:

    python examples/several_adapters.py --output_dir runs/adapters

The weights of the base model are there once. `policy_adapter_name` says which adapter is trained and
`ref_adapter_name` which one the policy is held near; a fresh adapter whose reference is the base model needs neither.
Here the first stage makes the adapter "sums", and the second trains "both" from a copy of it, with "sums" as its
reference.
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
    """What is trained on what.

    Args:
        model (`str`, *optional*): a name on the Hub or a folder.
        data (`str`, *optional*): a data set of pairs.
    """

    model: str = field(default="examples/demo/model", metadata={"help": "A name on the Hub or a folder."})
    data: str = field(default="examples/demo/data/dpo", metadata={"help": "With `prompt`, `chosen` and `rejected`."})


def stage(model: PeftModel, data: Dataset, config: DPOConfig, tokenizer: AutoTokenizer) -> None:
    """Train what `config` names."""
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
