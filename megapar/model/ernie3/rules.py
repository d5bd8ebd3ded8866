"""Rules on ERNIE 3.0: its tasks, its branches, and unproven combinations."""

from __future__ import annotations

from typing import Any

from megapar.model.ernie3.sizes import DOCUMENT_LM, KNOWLEDGE_MLM, KNOWLEDGE_TEXT, TASKS, tasks_of
from megapar.schema.flag import ERNIE
from megapar.schema.rule import NO_EFFECT, Facts, Rule, divisors, either

SOURCE = "ERNIE 3.0"
BASE = "--ernie-model ernie3 --task-type-vocab-size 5"
_ONLY = (
    *("ernie_tasks", "phrase_file", "entity_file", "triples_file", "sentence_reorder_pieces", "task_num_layers"),
    *("task_hidden_size", "task_num_attention_heads", "task_ffn_hidden_size", "generation_segments", "memory_length"),
)


def ernie3(f: Facts) -> bool:
    """Return True if the model is ERNIE 3.0."""
    return bool(f.ernie_model == "ernie3")


def _tasks(f: Facts) -> frozenset[str]:
    """Return the names of the tasks; none if ``--ernie-tasks`` is malformed, which another rule reports."""
    try:
        return frozenset(tasks_of(f.ernie_tasks))
    except ValueError:
        return frozenset()


def _readable(f: Facts) -> bool:
    try:
        return bool(tasks_of(f.ernie_tasks))
    except ValueError:
        return False


def _segmented(f: Facts, segments: int) -> bool:
    return bool(f.seq_length % (segments * (f.mp_degree if f.sequence_parallel else 1)) == 0)


def _heads(f: Facts) -> str:
    legal = [n for n in divisors(f.task_hidden_size) if n % f.mp_degree == 0][:6]
    if not legal:
        return f"Choose a --task-hidden-size that is a multiple of {f.mp_degree}, or a smaller --mp-degree."
    return f"Choose --task-num-attention-heads {either(legal)}, and multiples of {f.mp_degree} for the MLPs."


def _row(id: str, reads: tuple[str, ...], failing: str, passing: str = "", **more: Any) -> Rule:
    """Return a rule that applies to ERNIE 3.0. failing, passing: Flags in addition to BASE."""
    when = more.pop("when", lambda f: True)
    return Rule(
        id=id,
        reads=("ernie_model", *reads),
        when=lambda f: ernie3(f) and when(f),
        passing=f"{BASE} {passing}".strip(),
        failing=f"{BASE} {failing}",
        models=ERNIE,
        **{"source": SOURCE, **more},
    )


def _apart(id: str, reads: tuple[str, ...], free: Any, what: str, failing: str) -> Rule:
    return _row(
        id,
        reads,
        failing,
        requires=free,
        message=f"--ernie-model ernie3 and {what} are not supported together yet",
        fix="Leave one of them out.",
        source="not proven yet",
    )


def _needs(id: str, flags: tuple[str, ...], task: str, failing: str) -> Rule:
    spelled = either("--" + name.replace("_", "-") for name in flags)
    return _row(
        id,
        ("ernie_tasks", "not_default"),
        failing,
        when=lambda f: bool(f.not_default & set(flags)) and bool(_tasks(f)),
        requires=lambda f: task in _tasks(f),
        message=f"{spelled} has no effect without {task} in --ernie-tasks",
        fix=f"Add {task}:1.0 to --ernie-tasks, or leave the flag out.",
        source=NO_EFFECT,
    )


RULES: tuple[Rule, ...] = (
    Rule(
        id="ernie3-unused",
        reads=("ernie_model", "not_default"),
        when=lambda f: not ernie3(f),
        requires=lambda f: not f.not_default & set(_ONLY),
        message="tasks, branches and segments belong to ERNIE 3.0",
        fix="Add --ernie-model ernie3, or leave them out.",
        source=NO_EFFECT,
        passing="",
        failing="--ernie-tasks document_lm:1.0",
        models=ERNIE,
    ),
    _row(
        "ernie-tasks",
        ("ernie_tasks",),
        "--ernie-tasks document_lm:1.0,poetry:2",
        "--ernie-tasks document_lm:1.0,sentence_reorder:0.5",
        requires=_readable,
        message=f"--ernie-tasks must be NAME:WEIGHT,.. of {', '.join(TASKS)}, with weights of at least 0 and one above",
        fix="Write --ernie-tasks knowledge_mlm:1.0,document_lm:1.0.",
    ),
    Rule(
        id="ernie3-task-types",
        reads=("ernie_model", "task_type_vocab_size"),
        when=ernie3,
        requires=lambda f: f.task_type_vocab_size >= len(TASKS),
        message=f"each task has a task type: --task-type-vocab-size must be at least {len(TASKS)}",
        fix=f"Choose --task-type-vocab-size {len(TASKS)}.",
        source=SOURCE,
        passing=BASE,
        failing="--ernie-model ernie3 --task-type-vocab-size 3",
        models=ERNIE,
    ),
    _row(
        "ernie3-length",
        ("seq_length",),
        "--seq-length 8",
        "--seq-length 9",
        requires=lambda f: f.seq_length >= 9,
        message="texts are split into thirds, and none may be empty: --seq-length must be at least 9",
        fix="Choose --seq-length 9 or more.",
    ),
    _row(
        "ernie3-sop-weight",
        ("not_default",),
        "--sop-loss-weight 0.5",
        requires=lambda f: "sop_loss_weight" not in f.not_default,
        message="--sop-loss-weight has no effect: sentence_reorder has its weight in --ernie-tasks",
        source=NO_EFFECT,
    ),
    _row(
        "triples",
        ("ernie_tasks", "triples_file", "data_path"),
        "--ernie-tasks knowledge_text:1.0",
        "--ernie-tasks knowledge_text:1.0 --triples-file triples.tsv",
        when=lambda f: KNOWLEDGE_TEXT in _tasks(f),
        requires=lambda f: f.triples_file is not None or f.data_path == ("mock",),
        message="knowledge_text takes its triples from --triples-file",
        fix="Set --triples-file, or take knowledge_text out of --ernie-tasks.",
    ),
    _needs("triples-unused", ("triples_file",), KNOWLEDGE_TEXT, "--triples-file triples.tsv"),
    _needs(
        "lexicons-unused",
        ("phrase_file", "entity_file"),
        KNOWLEDGE_MLM,
        "--ernie-tasks document_lm:1.0 --phrase-file phrases.txt",
    ),
    _needs(
        "segments-unused",
        ("generation_segments",),
        DOCUMENT_LM,
        "--ernie-tasks knowledge_mlm:1.0 --generation-segments 2",
    ),
    _row(
        "segments",
        ("seq_length", "generation_segments", "mp_degree", "sequence_parallel"),
        "--seq-length 128 --generation-segments 3",
        "--seq-length 128 --generation-segments 2 --memory-length 64",
        when=lambda f: _segmented(f, 1),  # else --seq-length is refused
        requires=lambda f: _segmented(f, f.generation_segments),
        message="--generation-segments, under sequence parallelism times mp, must divide --seq-length",
        fix=lambda f: f"Choose --generation-segments {either(n for n in (1, 2, 4, 8) if _segmented(f, n))}.",
    ),
    _row(
        "memory",
        ("seq_length", "generation_segments", "memory_length"),
        "--seq-length 128 --generation-segments 2 --memory-length 65",
        "--seq-length 128 --generation-segments 2 --memory-length 64",
        when=lambda f: f.generation_segments > 1,
        requires=lambda f: f.memory_length <= f.seq_length // f.generation_segments,
        message="a memory is part of one segment: --memory-length must be at most --seq-length / --generation-segments",
        fix=lambda f: f"Choose --memory-length {f.seq_length // f.generation_segments} or less.",
    ),
    _row(
        "memory-unused",
        ("generation_segments", "not_default"),
        "--memory-length 64",
        when=lambda f: f.generation_segments == 1,
        requires=lambda f: "memory_length" not in f.not_default,
        message="--memory-length has no effect with one segment",
        fix="Choose --generation-segments 2, or leave it out.",
        source=NO_EFFECT,
    ),
    _row(
        "task-heads",
        ("task_hidden_size", "task_num_attention_heads", "task_ffn_hidden_size", "mp_degree"),
        "--task-hidden-size 64 --task-num-attention-heads 3",
        "--task-hidden-size 64 --task-num-attention-heads 4",
        requires=lambda f: (
            f.task_hidden_size % f.task_num_attention_heads == 0
            and f.task_num_attention_heads % f.mp_degree == 0
            and f.task_ffn_hidden_size % f.mp_degree == 0
        ),
        message="--task-num-attention-heads must divide --task-hidden-size, and mp must divide both the heads and the "
        "MLP width of the branches",
        fix=_heads,
    ),
    _row(
        "ernie3-hf",
        ("save_hf", "load_hf"),
        "--save-hf exported",
        requires=lambda f: f.save_hf is None and f.load_hf is None,
        message="ERNIE 3.0 with its branches has no Hugging Face form",
        fix="Leave --save-hf and --load-hf out; checkpoints load on every layout.",
        source="Hugging Face form",
    ),
    _apart(
        "ernie3-adaptive",
        ("adaptive_recompute_device_size",),
        lambda f: not f.adaptive_recompute_device_size,
        "adaptive selective recompute",
        "--adaptive-recompute-device-size 32768",
    ),
    _apart(
        "ernie3-cp", ("cp_degree",), lambda f: f.cp_degree == 1, "context parallelism", "--world-size 2 --cp-degree 2"
    ),
)
