"""Summarize the quickstart, and generate a sentence with transformers from the exported model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

FLUENT_TOKENS = 10**8  # with fewer tokens, no model generates sentences


def main(run: Path) -> None:
    """Print losses, speed and the paths of the results; generate from ``run``/huggingface."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speed = median(record["tokens_per_second"] for record in records)
    print(f"loss: {records[0]['lm_loss']:.3f} at the start, {records[-1]['lm_loss']:.3f} at the end")
    evaluated = [record["eval_loss"] for record in records if "eval_loss" in record]
    if evaluated:
        print(f"held-out loss: {evaluated[-1]:.3f}")
    print(f"speed: {speed:,.0f} tokens/s")
    print(f"TensorBoard: .venv/bin/tensorboard --logdir {run / 'tensorboard'}")
    print(f"checkpoint: {run / 'checkpoints'}")
    print(f"Hugging Face model: {run / 'huggingface'}")
    tokenizer = AutoTokenizer.from_pretrained(run / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(run / "huggingface", dtype=torch.float32)
    prompt = tokenizer("The function returns", return_tensors="pt", add_special_tokens=False)
    torch.manual_seed(0)
    output = model.generate(
        prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=24, do_sample=True, temperature=0.7
    )
    sentence = tokenizer.decode(output[0], skip_special_tokens=True)
    print(f"transformers generated from it: {' '.join(sentence.split())!r}")
    steps, tokens = records[-1]["iteration"], records[-1]["consumed_tokens"]
    if tokens < FLUENT_TOKENS:
        print(
            f"(Expect gibberish after {steps:,} steps and {tokens:,} tokens: sentences take thousands of times more.)"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
