"""``megapar evaluate CHECKPOINT --lm-eval TASKS``: lm-evaluation-harness itself, on an export of a checkpoint.

Tasks are names of the harness, or YAML files of one task each. Nothing is put before a text, as in training.
"""

from __future__ import annotations

import importlib.util
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapar.config.config import FLAGS
from megapar.errors import Complaint, ConfigError
from megapar.files.uri import refuse_wrong
from megapar.tools.parser import Parser, count

_NAME = re.compile(r"^task:[ \t]*['\"]?([^'\"#\s]+)", re.MULTILINE)


def run_harness(options: Namespace, rest: Sequence[str]) -> str:
    """Return the harness's table of results; ``rest`` are the words that ``options`` have not. Raises MegaparError."""
    parser = Parser(prog="megapar evaluate CHECKPOINT --lm-eval TASKS")
    parser.add_argument("--device", choices=FLAGS["device"].choices, default="auto")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--micro-batch-size", type=count, default=1)
    more = parser.parse_args(list(rest))
    if given := [name for name in ("data_path", "eval_data_path") if getattr(options, name)]:
        message = f"--lm-eval evaluates the harness's own data, so --{given[0].replace('_', '-')} has no effect."
        raise ConfigError([Complaint("evaluate-lm-eval", message, "Leave one of them out.")])
    if importlib.util.find_spec("lm_eval") is None:
        fix = "Install it: pip install 'megapar[eval]'. --eval-tasks needs no package."
        raise ConfigError([Complaint("package", "--lm-eval needs the package lm-eval.", fix)])
    names, folders = _tasks(options.lm_eval)
    refuse_wrong(options.checkpoint)
    from lm_eval.utils import make_table

    return str(make_table(evaluated(options, more, names, folders))).rstrip()


def evaluated(options: Namespace, more: Namespace, names: Sequence[str], folders: Sequence[str]) -> dict[str, Any]:
    """Return the harness's results; ``folders`` have YAML files of tasks. Raises MegaparError."""
    import lm_eval
    import transformers
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megapar.checkpoints.export.export import exported
    from megapar.core.device.accelerators import pick
    from megapar.data.tokenizers.load import load_tokenizer
    from megapar.tools.generate import loaded
    from megapar.training.step.dtypes import DTYPES

    manager = TaskManager(include_path=list(folders) or None)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        message = f"lm-evaluation-harness has no task {unknown[0]}."
        raise ConfigError([Complaint("evaluate-lm-eval", message, "List its tasks with lm-eval ls tasks.")])
    device = pick(more.device).torch_device
    own = load_tokenizer(options.tokenizer_model) if options.tokenizer_model else None
    with exported(options.checkpoint, options.hf_cache, dtype=DTYPES.get(more.dtype), tokenizer=own) as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = loaded(folder, device)
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=more.micro_batch_size, add_bos_token=False)
    found: dict[str, Any] = lm_eval.simple_evaluate(model=wrapped, tasks=list(names), task_manager=manager)
    return found


def _tasks(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of tasks, and the folders of those that are given as YAML files."""
    names, folders = [], []
    for word in (part for text in words for part in text.split(",") if part):
        path = Path(word)
        if path.suffix not in (".yaml", ".yml"):
            names.append(word)
            continue
        found = _NAME.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found is None:
            message = f"--lm-eval {word} {'names no task' if path.is_file() else 'does not exist'}."
            raise ConfigError([Complaint("evaluate-lm-eval", message, "Pass a YAML file of the harness, with task:.")])
        names.append(found[1])
        folders.append(str(path.parent))
    return names, list(dict.fromkeys(folders))
