"""The files that test command lines read: models, data, rewards and YAML files; and the words of a command line."""

import shlex
from pathlib import Path
from string import Template

from transformers import AutoConfig, BloomConfig

from tiny import Workshop, preferences, prompts

_COMMON = (
    "--model_name_or_path $MODEL --use_cpu --bf16 false --report_to none --save_strategy no --max_steps 1 "
    "--output_dir out --no_dataloader_pin_memory --disable_tqdm true"
)
_RUNS = {
    "SFT": f"--dataset_name texts {_COMMON}",
    "DPO": f"--dataset_name pairs {_COMMON}",
    "KTO": f"--dataset_name labelled {_COMMON}",
    "REWARD": f"--dataset_name pairs {_COMMON}",
    "DISTILLATION": f"--dataset_name prompts {_COMMON} --teacher_model_name_or_path $MODEL --max_completion_length 4",
    "SELF_DISTILLATION": f"--dataset_name prompts {_COMMON} --max_completion_length 4",
    **dict.fromkeys(
        ("GRPO", "RLOO"),
        f"--dataset_name prompts {_COMMON} --reward_funcs my_rewards.py:brevity --num_generations 2 "
        "--per_device_train_batch_size 4 --max_completion_length 4",
    ),
}
_OF_DPO = "dataset_name: pairs\nuse_cpu: true\n"
_FILES = {
    "my_rewards.py": "def brevity(completions, **_):\n    return [-float(len(x)) for x in completions]\n",
    "broken.jsonl": '{"prompt": "w1"}\n{"prompt":',
    "broken.yaml": "beta: [1\n",
    "words.yaml": "just words\n",
    "s6.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\n",
    "no_model.yaml": f"{_OF_DPO}model_name_or_path:\n",
    "lora_rank.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\nlora_rank: 8\n",
    "slip.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\nbetta: 0.1\n",
    "beta.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\nbeta: high\n",
    "older.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\nmax_prompt_length: 8\n",
    "chunk.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\nhead_chunk_size: 0\n",
    "launch.yaml": "num_processes: 4\n",
    "of_launch.yaml": "mixed_precision: bf16\nnum_processes: 1\n",
    "adapter.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\nlora_alpha: 8\n",
    "rpo.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\nrpo_alpha: 0.5\n",
    "empty.jsonl": "",
    "env.yaml": "env: {1: 2}\n",
    "env_word.yaml": "env: HF_HUB_OFFLINE=1\n",
    "processes.yaml": "num_processes: two\n",
    "flag.yaml": "cpu: maybe\n",
    "precision.yaml": "mixed_precision: fp17\n",
    "rpo_zero.yaml": f"{_OF_DPO}model_name_or_path: $MODEL\nrpo_alpha: 0\n",
    "clipped.yaml": "reward_clip_range: [1.0, -1.0]\n",
    "texts/train.jsonl": '{"text": "w1 w2 w3"}\n' * 8,
    "labelled/train.jsonl": '{"prompt": "w1 w2", "completion": " w3", "label": true}\n' * 8,
    "rated/train.jsonl": '{"prompt": "w1 w2", "completion": " w3", "label": 1}\n'
    '{"prompt": "w1 w2", "completion": " w4", "label": -1}\n',
    "questions/train.jsonl": '{"question": "w1 w2"}\n' * 8,
    "said/train.jsonl": '{"prompt": [{"role": "user", "content": "w1"}]}\n' * 8,
    "notes": "w1\n",
    "twice.yaml": "beta: 0.1\nmax_steps: 1\nbeta: 0.2\n",
    "tab.yaml": "env:\n\tHF_HUB_OFFLINE: 1\n",
    "kwargs.yaml": "generation_kwargs: [1]\n",
    "stage.json": "{}",
    "broken.parquet": "no parquet",
    "broken.py": "def brevity(:\n",
    "importing.py": "import a_package_that_nobody_has\n",
    "pages/a.md": "# w1\n",
    "adapter_only/a.bin": "w1",
    "answers/train.jsonl": '{"prompt": "w1 w2", "answer": "w3"}\n' * 8,
    "adapter/adapter_config.json": '{"base_model_name_or_path": "$MODEL"}',
    "moved/adapter_config.json": '{"base_model_name_or_path": "/old/base"}',
    "moved_on_hub/adapter_config.json": '{"base_model_name_or_path": "nobody/nothing", "peft_type": "LORA", '
    '"task_type": "CAUSAL_LM"}',
}


LONG = "x" * 300  # more than a file system takes


def fill(folder: Path, workshop: Workshop) -> None:
    """Write the files into `folder`, the current one of the command lines."""
    for name in {path.split("/")[0] for path in ("pairs/", "prompts/", *_FILES) if "/" in path}:
        (folder / name).mkdir()
    for path in ("pairs.jsonl", "pairs/train.jsonl"):
        preferences(8, seed=3).to_json(folder / path)
    preferences(8, seed=3).to_csv(folder / "pairs.csv")
    preferences(8, seed=3).to_parquet(folder / "pairs.parquet")
    prompts(8, seed=3).to_json(folder / "prompts/train.jsonl")
    for name, text in _FILES.items():
        (folder / name).write_text(text.replace("$MODEL", workshop.model("tied")))
    config = AutoConfig.from_pretrained(workshop.model("tied"))
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(folder / "quantized")
    # Models that stay padded
    BloomConfig(vocab_size=config.vocab_size, hidden_size=32, n_layer=1, n_head=2).save_pretrained(folder / "padded")
    BloomConfig(vocab_size=98, hidden_size=32, n_layer=1, n_head=2).save_pretrained(folder / "padded_98")


def words_of(line: str, workshop: Workshop) -> list[str]:
    """Return the words of a line, in which `$DPO` and the like stand for the arguments of a short run."""
    names = {"MODEL": workshop.model("tied"), "CHAT": workshop.model("chat"), "LONG": LONG}
    return shlex.split(Template(Template(line).safe_substitute(_RUNS)).substitute(names))
