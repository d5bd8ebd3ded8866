"""Conversations, and tokenizers of a few hundred ids that have a chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parents[1] / "data" / "chat" / "templates"
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|start|>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|begin_of_sentence|>"),
    "<|end_of_sentence|>",
)
TEXT = "The user asks. The assistant answers: a river, a stone, a mountain of paper. user assistant system think\n"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% generation %}{{ m.content if m.role == 'assistant' else '' }}{% endgeneration %}"
    "{{ m.content if m.role != 'assistant' else '' }}{{ '<|im_end|>' }}{% endfor %}"
)
WORDS = ("red", "green", "blue", "river", "stone", "ancient", "quickly", "walks", "sees", "under", "mountain", "paper")


def save_tokenizer(folder: Path, template: str | None = CHATML, vocab_size: int = 330) -> None:
    """Write the folder of a byte-level tokenizer of at most ``vocab_size`` ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False, initial_alphabet=alphabet
    )
    inner.train_from_iterator([TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|begin_of_text|>", eos_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(str(folder))


def turns(*contents: str, system: str = "") -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    spoken = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *spoken] if system else spoken


def conversations(count: int, seed: int = 0, words: int = 12) -> Iterator[dict[str, Any]]:
    """Records of one to three questions and answers of up to ``words`` words."""
    draw = random.Random(seed)
    for _ in range(count):
        said = (" ".join(draw.choices(WORDS, k=draw.randint(1, words))) for _ in range(2 * draw.randint(1, 3)))
        yield {"messages": turns(*said)}


def write_conversations(path: Path, count: int, seed: int = 0, words: int = 12) -> Path:
    """Write records as JSONL."""
    path.write_text("".join(json.dumps(record) + "\n" for record in conversations(count, seed, words)))
    return path
