"""``megapar generate``: continues a prompt by a checkpoint of any layout.

The checkpoint is exported as a Hugging Face folder, and transformers generates. The folder is temporary unless
--hf-cache keeps it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.checkpoints.format.names import holds_checkpoints
from megapar.config.config import FLAGS
from megapar.errors import CheckpointError, MegaparError
from megapar.files.location import at
from megapar.files.tensor_file import CONFIG_FILE
from megapar.files.uri import refuse_wrong
from megapar.tools.parser import Parser, count, failed, whole

if TYPE_CHECKING:
    import torch

NO_TEMPLATE = "the tokenizer has no chat template; leave --chat out, or write the prompt in the form that was learned"
HAS_TEMPLATE = "prompts are continued as they are; --chat puts them into the tokenizer's chat template"


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(
        prog="megapar generate",
        description="Continue a prompt by a checkpoint of any layout: it is exported to a temporary folder, and "
        "transformers generates from it.",
        epilog="Exit status: 0 done, 2 refused, 1 anything else.",
        examples=("runs/tiny --prompt 'The license'", "runs/tuned --chat --prompt 'What does os.getcwd do?'"),
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="folder or URI of --save, for its latest checkpoint, or one in it")
    add("--prompt", action="append", required=True, metavar="TEXT", help="the text to continue; may be repeated")
    add("--chat", action="store_true", help="a prompt is a user's message, in the chat template; print the answers")
    add("--max-new-tokens", type=count, default=64, metavar="N", help="maximum length of a continuation (default: 64)")
    add("--temperature", type=_from_zero, default=0.7, metavar="T", help="0: the likeliest token (default: 0.7)")
    add("--top-k", type=count, metavar="K", help="draw only from the K likeliest tokens")
    add("--top-p", type=_share, metavar="P", help="draw only from the likeliest tokens of total probability P")
    add("--seed", type=whole, default=0, metavar="N", help="seed of the draws (default: 0)")
    add("--hf-cache", type=Path, metavar="DIR", help="keep the exported folder in DIR, and use it again the next time")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="data type of the weights (default: as megapar convert)")
    add("--tokenizer-model", metavar="PATH", help="the tokenizer of the run, if none is stored with the checkpoint")
    add("--device", choices=FLAGS["device"].choices, default="auto", help="where to generate (default: auto)")
    return parser


def _from_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number >= 0")
    return value


def _share(text: str) -> float:
    value = _from_zero(text)
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a share above 0, of 1 at most")
    return value


def main(argv: Sequence[str]) -> int:
    """Print the prompts with their continuations. Return the exit status: 0 done, 2 refused, 1 failed."""
    options = make_parser().parse_args(argv)
    try:
        for text in generate(options):
            print(text, flush=True)
    except (MegaparError, OSError) as error:
        return failed("generate", error)
    return 0


def generate(options: Namespace) -> list[str]:
    """Return the prompts with their continuations, for parsed options. Raises MegaparError and OSError."""
    refuse_wrong(options.checkpoint)
    local = at(options.checkpoint).local_path()
    if local is not None and (local / CONFIG_FILE).is_file() and not holds_checkpoints(local):
        raise CheckpointError(
            f"{options.checkpoint} is a model of transformers, not the folder of a run. transformers generates from it "
            "(docs/finetune.md#use-it); a run that begins with it is --load-hf."
        )
    import torch
    import transformers

    from megapar.checkpoints.export.export import exported
    from megapar.core.device.accelerators import pick
    from megapar.data.tokenizers.load import load_tokenizer
    from megapar.training.step.dtypes import DTYPES

    device = pick(options.device).torch_device
    own = load_tokenizer(options.tokenizer_model) if options.tokenizer_model else None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with exported(options.checkpoint, options.hf_cache, dtype=DTYPES.get(options.dtype), tokenizer=own) as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = loaded(folder, device)
    if options.chat and not tokenizer.chat_template:
        raise CheckpointError(f"--chat: {NO_TEMPLATE}")
    if tokenizer.chat_template and not options.chat:
        print(f"megapar generate: note: {HAS_TEMPLATE}", file=sys.stderr)
    torch.manual_seed(options.seed)
    return [_continued(options, model, tokenizer, prompt) for prompt in options.prompt]


def loaded(folder: Path, device: torch.device) -> Any:
    """Return the model of a Hugging Face folder on a device, ready to generate.

    transformers multiplies the rows of all experts at once, which torch takes only where rows are multiples of 16
    bytes; experts of other widths are multiplied one after another.
    """
    import transformers

    from megapar.core.device.grouped import ALIGNMENT_BYTES

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    experts = (weight for weight in model.parameters() if weight.dim() == 3)
    if any(width * weight.itemsize % ALIGNMENT_BYTES for weight in experts for width in weight.shape[1:]):
        model.set_experts_implementation("eager")
    return model.to(device).eval()


def _continued(options: Namespace, model: Any, tokenizer: Any, prompt: str) -> str:
    """Return a prompt with its continuation, or the answer to it alone; it ends at the model's last position."""
    import torch

    ids, positions = prompt_ids(tokenizer, prompt, chat=options.chat), model.config.max_position_embeddings
    left = positions - len(ids)
    if not ids or left < 1:
        limit = f"the model has positions for {positions}, and one is for the answer"
        raise CheckpointError(f"the prompt has {len(ids)} tokens; {limit}. Pass another --prompt")
    draws = {"do_sample": options.temperature > 0}
    if draws["do_sample"]:
        # Without these, transformers draws from the 50 likeliest tokens.
        draws |= {"temperature": options.temperature, "top_k": options.top_k or 0, "top_p": options.top_p or 1.0}
    given = torch.tensor([ids], device=model.device)
    if (new := min(options.max_new_tokens, left)) < options.max_new_tokens:
        limit = f"the model has positions for {positions}, so at most {new} tokens follow the {len(ids)} of the prompt"
        print(f"megapar generate: note: {limit}", file=sys.stderr)
    found = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, **draws)
    return str(tokenizer.decode(found[0, len(ids) if options.chat else 0 :], skip_special_tokens=True))


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool = False) -> list[int]:
    """Return the ids of a prompt, with the beginning that the tokenizer adds to texts and without its end.

    With ``chat`` they are those of the chat template with the prompt as a user's message, up to the answer.
    """
    if chat:
        message = {"role": "user", "content": prompt}
        return list(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)["input_ids"])
    ids = list(tokenizer(prompt)["input_ids"])
    plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id}
    while len(ids) > len(plain) and ids[-1] in ends:
        ids.pop()
    return ids
