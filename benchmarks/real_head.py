"""Measure the errors of SmolLM2-135M's log-probs in bf16: those of the LM head alone, and those of the whole model.

    make bench-real            # runs this after benchmarks/real.py

*Head alone*: both heads get the hidden states and the weight in bf16; the truth is float64 from the same operands.
*With the backbone*: the truth is the fp32 model's hidden states with a float64 head, so its rounding counts too.
"""

import argparse
from pathlib import Path
from typing import Any

import head_subjects
import real_data
import results
import torch
from head_inputs import Inputs
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 160  # of a row
ROWS = 4
HEADS = {"trl": head_subjects.trl, "trl_ext_torch": lambda: head_subjects.ours(kernels="torch")}


def token_rows(tokenizer: Any) -> Tensor:
    """Return rows of real text, each as long: shape (ROWS, TOKENS)."""
    rows = real_data.continued(ROWS, prompt=20, words=150, varies=False)
    chats = [tokenizer.apply_chat_template(x["prompt"] + x["chosen"], return_dict=False)[:TOKENS] for x in rows]
    return torch.tensor(chats)


def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """Return the hidden states of all tokens but each row's last: shape (tokens, hidden size)."""
    return model.model(ids[:, :-1]).last_hidden_state.flatten(0, 1)


def float64_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.double() @ weight.double().t()


@torch.no_grad()
def measure() -> list[dict[str, Any]]:
    """Return a line for each head."""
    folder = real_data.checkpoint()
    ids = token_rows(AutoTokenizer.from_pretrained(folder))
    targets = ids[:, 1:].flatten()
    exact_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    hidden = hidden_states(model, ids)
    weight = model.lm_head.weight
    logits = float64_logits(hidden, weight)
    same_operands = log_probs_of(logits, targets)
    truth = log_probs_of(float64_logits(hidden_states(exact_model, ids), exact_model.lm_head.weight), targets)
    inputs = Inputs(hidden, weight, targets, torch.ones(len(targets)))
    shape = {
        "model": "SmolLM2-135M-Instruct",
        "tokens": len(targets),
        "hidden": hidden.shape[1],
        "vocabulary": len(weight),
    }
    run = results.new_run()
    lines = []
    for subject, load in HEADS.items():
        log_probs = load()(inputs, ("log_probs",)).double()
        with_backbone = (log_probs - truth).abs()
        line = {"benchmark": "real_head_bf16", "shape": shape, "subject": subject, "run": run}
        line |= {"median_ms": None, "peak_mib": None, "largest_logit": logits.abs().max().item()}
        line["max_error"] = (log_probs - same_operands).abs().max().item()
        line["with_backbone"] = {"max": with_backbone.max().item(), "mean": with_backbone.mean().item()}
        lines.append(line)
    return lines


def log_probs_of(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to write to")
    chosen = parser.parse_args()
    origin = results.origin("cpu")
    lines = measure()
    results.add([line | origin for line in lines], chosen.results)
    for line in lines:
        print(
            f"{line['subject']}: largest error of a log-prob {line['max_error']:.1e}, with the backbone "
            f"{line['with_backbone']['max']:.2f} (mean {line['with_backbone']['mean']:.3f}); "
            f"largest logit {line['largest_logit']:.0f}"
        )


if __name__ == "__main__":
    main()
