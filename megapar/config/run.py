"""Flags for data, checkpoints, reliability, logging and the runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from typing import Any, ClassVar

from megapar.files.data_files import AUTO, FILE, PARAGRAPH
from megapar.schema import role as roles
from megapar.schema.flag import ERNIE, MOE, Alias, fact, flag
from megapar.schema.phase_plan import phases_text

METRICS_OFF = "off"  # a value of --metrics-jsonl
PRETRAIN, SFT = "pretrain", "sft"  # values of --task


def day_text(value: Any) -> str:
    """Return a day of YAML or a command line as YYYY-MM-DD. Raises ValueError unless it is one."""
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(f"{value} is not a day; write YYYY-MM-DD") from None


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Training and evaluation data, and the tokenizer."""

    role: ClassVar[roles.Role] = roles.DATA
    data_path: tuple[str, ...] = flag(
        ("builtin",),
        "training data: text, JSONL or parquet files (also .gz, .zst), folders of them, prefixes of .bin/.idx files, "
        "URIs of them (s3://, gs://), or weights and paths in turn, each path perhaps with a name (NAME=PATH); "
        "builtin: Python's documentation; mock: random tokens",
        aliases=("train-data-path", "sources", Alias("mock-data", ("mock",))),
        path=True,
        named=True,
        store=True,
    )
    eval_data_path: tuple[str, ...] = flag(
        (),
        "held-out data for evaluation, in the form of --data-path; sets with names (NAME=PATH) are evaluated one by "
        "one; mock only together with --data-path mock",
        aliases=("valid-data-path",),
        path=True,
        named=True,
        store=True,
    )
    eval_tasks: tuple[str, ...] = flag(
        (),
        "tasks that evaluations score: JSONL files of {context, choices, gold} or {context, completion}, each perhaps "
        "with a name (NAME=FILE) in place of the file's",
        path=True,
        models=MOE,
        named=True,
        role=roles.EVALUATES,
        undrawn="it needs text and a tokenizer; tests/equivalence/test_eval_tasks.py compares its layouts",
    )
    data_phases: str | None = flag(
        None,
        "phases of the named sources of --data-path, separated by semicolons: where each begins, the weights of its "
        "sources, and perhaps its seq-length, global-batch-size and lr, as in '0: a=1,b=1; 10B tokens: a=3,b=1,c=2 "
        "lr=1e-6:linear'; in YAML a list",
        aliases=("phases",),
        models=MOE,
        form=phases_text,
    )
    on_source_end: str = flag(
        "repeat",
        "when a source has no sample left that was not read: repeat it in another order, or stop before the first "
        "global batch that would repeat one",
        choices=("repeat", "stop"),
        models=MOE,
        undrawn="a run that ends early has no twin; tests/training/test_phases.py ends some",
    )
    split: str | None = flag(
        None,
        "proportions of training, held-out and unused documents, such as 969,30,1 (95,5 if not given)",
        other="50,50",
    )
    text_field: str = flag(
        "text",
        "field of JSONL records, and column of parquet files and datasets, that contains the document",
        role=roles.FILES,
    )
    document_per: str = flag(
        AUTO,
        "what a document of text files is; paragraph: what is between blank lines; file: a whole file; auto: a whole "
        "file of a folder, and a paragraph of a file that is named itself",
        ernie=PARAGRAPH,
        choices=(AUTO, FILE, PARAGRAPH),
        role=roles.FILES,
    )
    tokenizer_model: str | None = flag(
        None,
        "sentencepiece model, tokenizer.json or Hugging Face tokenizer folder; without it a tokenizer is trained on "
        "the data and cached",
        path=True,
    )
    task: str = flag(
        PRETRAIN,
        "pretrain: predict text; sft: fine-tune on the assistant's turns of conversations in --data-path, JSONL or "
        "prepared by megapar data prepare --task sft",
        choices=(PRETRAIN, SFT),
        models=MOE,
    )
    chat_template: str | None = flag(
        None,
        "sft: file of the template (Jinja) that makes a conversation text, in place of the tokenizer's",
        path=True,
        models=MOE,
        role=roles.FILES,
    )
    chat_date: str | None = flag(
        None,
        "sft: the day that a template sees, YYYY-MM-DD",
        derived="the day of the first start",
        form=day_text,
        models=MOE,
        role=roles.FILES,
        other="2024-02-29",
    )
    sft_turns: str = flag(
        "all",
        "sft: learn all turns of the assistant, or the last one of each conversation",
        choices=("all", "last"),
        models=MOE,
    )
    sft_loss: str = flag(
        "token",
        "sft: what counts equally in the loss of a global batch: each learned token, or each conversation",
        choices=("token", "conversation"),
        models=MOE,
    )
    sft_packing: str = flag(
        "best_fit",
        "sft: place as many conversations in a sample as fit, apart in attention and positions; pad: one in each",
        choices=("best_fit", "pad"),
        models=MOE,
    )
    sft_overlong: str = flag(
        "stop",
        "sft: on conversations longer than a sample, stop, leave them out, or cut their ends off",
        choices=("stop", "drop", "truncate"),
        models=MOE,
    )
    mlm_probability: float = flag(
        0.15, "fraction of tokens that are masked", above=0, high=0.9, models=ERNIE, role=roles.LOSS
    )
    data_source: str = flag(
        "files", "files: read --data-path; hf: stream a Hugging Face dataset", choices=("files", "hf"), role=roles.FILES
    )
    hf_dataset: str | None = flag(None, "path or cached name of the Hugging Face dataset", path=True, role=roles.FILES)
    reset_position_ids: bool = flag(False, "restart position ids at every document", models=MOE)
    reset_attention_mask: bool = flag(False, "restrict attention to the tokens of the same document", models=MOE)
    eod_mask_loss: bool = flag(False, "mask the loss at end-of-document input tokens", models=MOE)
    packing: bool = flag(True, "concatenate documents into full sequences; off: one document per sample", models=MOE)
    on_bad_record: str = flag(
        "stop",
        "on a record that cannot be read, stop the run or skip the record",
        choices=("stop", "skip"),
        role=roles.FILES,
    )
    ernie_tasks: str | None = flag(
        None,
        "mixture of objectives with weights, such as knowledge_mlm:1.0,document_lm:1.0",
        models=ERNIE,
        other="knowledge_mlm:1,document_lm:2",
    )
    phrase_file: str | None = flag(
        None, "lexicon of phrases that are masked as a whole", models=ERNIE, path=True, role=roles.FILES
    )
    entity_file: str | None = flag(
        None, "lexicon of named entities that are masked as a whole", models=ERNIE, path=True, role=roles.FILES
    )
    triples_file: str | None = flag(
        None,
        "knowledge triples for knowledge_text: HEAD, RELATION, TAIL and SENTENCE per line, separated by tabs",
        models=ERNIE,
        path=True,
        role=roles.FILES,
    )
    override_data: tuple[str, ...] = flag(
        (),
        "data settings that may differ from the checkpoint's: sources, weights, split, seed, seq-length, knowledge "
        "(files of phrases, entities and triples), chat (how conversations become samples), separated by commas",
        comma=True,
        undrawn="is about checkpoints",
        other=("seed",),
    )
    sentence_reorder_pieces: int = flag(
        3,
        "maximum number of parts into which sentence_reorder splits a text",
        unit="parts",
        low=2,
        high=6,
        models=ERNIE,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Saving and loading of checkpoints."""

    role: ClassVar[roles.Role] = roles.SAVES
    save: str | None = flag(None, "folder or URI (s3://, gs://) in which checkpoints are saved", path=True, store=True)
    load: str | None = flag(None, "folder or URI of checkpoints to continue from, on any layout", path=True, store=True)
    save_interval: int = flag(0, "steps between checkpoints; 0: only at the end", unit="steps", low=0)
    ckpt_step: int | None = flag(None, "load the checkpoint of this step instead of the latest", unit="step", low=0)
    finetune: bool = flag(False, "load only the weights; reset step, optimizer, random and data state")
    no_load_optim: bool = flag(False, "do not load the optimizer state")
    no_load_rng: bool = flag(False, "do not load the random state")
    save_hf: str | None = flag(None, "folder or URI for the trained model in Hugging Face form", path=True, store=True)
    load_hf: str | None = flag(None, "folder or URI of a Hugging Face model to start from", path=True, store=True)
    save_interval_minutes: float = flag(0.0, "minutes between checkpoints; 0: off", unit="minutes", low=0, other=1e-6)
    async_save: bool = flag(
        True, "write checkpoints in the background while training continues; the run waits for the final one"
    )
    keep: int = flag(
        0,
        "number of newest checkpoints to keep, in addition to the newest that each check has verified; 0: all",
        unit="checkpoints",
        low=0,
    )
    checkpoint_verify: str = flag(
        "full",
        "verification of each file before it is loaded; full: size and SHA-256",
        choices=("full", "size", "off"),
        other="off",
    )
    on_bad_checkpoint: str = flag(
        "previous",
        "if a checkpoint is damaged, load the newest valid one before it, or stop",
        choices=("previous", "stop"),
    )
    on_save_error: str = flag(
        "continue", "if a checkpoint cannot be written, continue training, or stop", choices=("continue", "stop")
    )
    exit_interval: int = flag(
        0, "save and stop at the next step that is a multiple of this; 0: off", unit="steps", low=0
    )
    exit_duration_minutes: float = flag(0.0, "save and stop after this time; 0: off", unit="minutes", low=0, other=1e-6)


@dataclass(frozen=True, kw_only=True)
class ReliabilityOptions:
    """Bad numbers, replicas, hangs, stragglers, local checkpoints."""

    role: ClassVar[roles.Role] = roles.WATCHES
    bad_step_limit: int = flag(
        3,
        "consecutive steps that are skipped because a gradient is not finite; one more stops the run",
        low=0,
        role=roles.OPTIMIZER,
    )
    spike_sigmas: float = flag(
        6.0,
        "a loss or gradient norm is a spike if it exceeds the mean of the last 128 steps by this many standard "
        "deviations; 0: off",
        low=0,
        role=roles.OPTIMIZER,
    )
    spike_skip: bool = flag(
        False, "skip the update of a spike, at most --bad-step-limit times in a row", role=roles.OPTIMIZER
    )
    skip_samples: tuple[str, ...] = flag((), "ranges A-B of sample numbers to skip", role=roles.DATA, other=("0-1",))
    replica_check_interval: int = flag(
        100,
        "steps between comparisons of the parameters that are replicated on several ranks; 0: off",
        unit="steps",
        low=0,
    )
    recompute_check_interval: int = flag(
        500,
        "steps between checks that running a micro-batch again gives bit-identical results; 0: off",
        unit="steps",
        low=0,
    )
    state_digest_steps: int = flag(
        -1,
        "steps in which all master weights and moments are checked once, a part in each step, for changes between two "
        "updates (memory corruption); 1: all in every step; auto: as many as cost 1 % of a step; 0: off",
        unit="steps",
        low=-1,
        words={"auto": -1},
    )
    step_timeout_seconds: float = flag(
        600.0,
        "time limit of a step; a longer one is a hang: the late ranks are named and the run ends; 0: only report it",
        unit="seconds",
        low=0,
    )
    section_timeouts: tuple[str, ...] = flag(
        (),
        "NAME=SECONDS: time limits of start-up, load, first-step, step, evaluation, save, log; a section without a "
        "limit is only reported, after 10 minutes and 10 times its longest duration so far",
        unit="seconds",
        comma=True,
    )
    local_checkpoint_interval: int = flag(
        0,
        "steps between checkpoints in node memory, with a copy on the next node if all have equally many ranks, for "
        "fast restarts; 0: off",
        unit="steps",
        low=0,
        role=roles.SAVES,
    )
    local_checkpoint_dir: str | None = flag(
        None,
        "folder for these checkpoints, in node-local memory",
        derived="/dev/shm/megapar-UID",
        path=True,
        per_node=True,
        role=roles.SAVES,
    )
    straggler_factor: float = flag(
        1.5,
        "a rank is a straggler, and is named in the log, if its own work takes this many times as long as the median "
        "rank's; 0: off",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class LoggingOptions:
    """Log, metrics and profiler traces."""

    role: ClassVar[roles.Role] = roles.LOGS
    log_interval: int = flag(10, "steps between log lines", unit="steps", low=1, other=2)
    log_start: str = flag(
        "short",
        "lines before the first step; short: what the run is; full: also kernels, communicators and every flag that is "
        "not at its default; of --validate-only, full: the defaults as well",
        choices=("short", "full"),
    )
    log_update_norms: bool = flag(
        False,
        "every --log-interval, log how far the update moved each class of tensors, and the norm of its weights; the "
        "device holds a copy of the master weights meanwhile",
        role=roles.by_hand("measures an update"),
        undrawn="reads masters and changes none; tests/training/step/test_update_norms.py compares layouts",
    )
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard files", path=True, per_node=True)
    metrics_jsonl: str | None = flag(
        None,
        "metrics file, one JSON object per step; off: none",
        path=True,
        per_node=True,
        derived="metrics.jsonl in the folder of --save, if there is one on a disk",
    )
    wandb_project: str | None = flag(None, "Weights & Biases: log to this project")
    wandb_exp_name: str | None = flag(None, "Weights & Biases: name of the run")
    wandb_entity: str | None = flag(None, "Weights & Biases: user or team of the project")
    wandb_save_dir: str | None = flag(None, "Weights & Biases: folder for local files", path=True, per_node=True)
    mlflow_experiment: str | None = flag(None, "MLflow: log to this experiment")
    mlflow_run_name: str | None = flag(None, "MLflow: name of the run")
    mlflow_tracking_uri: str | None = flag(
        None, "MLflow: server, or database such as sqlite:///mlflow.db, instead of that of MLFLOW_TRACKING_URI"
    )
    swanlab_project: str | None = flag(None, "SwanLab: log to this project")
    swanlab_exp_name: str | None = flag(None, "SwanLab: name of the experiment")
    swanlab_save_dir: str | None = flag(None, "SwanLab: folder for local files", path=True, per_node=True)
    profile: str | None = flag(
        None,
        "START:END: profile these steps, and write trace.json to the folder of --metrics-jsonl, else to the working "
        "directory",
        other="1:2",
    )

    @property
    def metrics_file(self) -> str | None:
        """The metrics file, or None if none is written."""
        return None if self.metrics_jsonl == METRICS_OFF else self.metrics_jsonl

    def silenced(self) -> LoggingOptions:
        """Return these options without anything that writes files or connects to a tracker."""
        files = replace(self, metrics_jsonl=None, tensorboard_dir=None)
        return replace(files, wandb_project=None, mlflow_experiment=None, swanlab_project=None)


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Device, number of ranks, and checks without training."""

    role: ClassVar[roles.Role] = roles.CLUSTER
    device: str = flag(
        "auto",
        "device; auto: the accelerator if there is one, else the CPU",
        choices=("auto", "cpu", "cuda", "npu"),
        per_node=True,
    )
    device_tflops: float | None = flag(
        None,
        "matrix products of one device in the compute dtype, without sparsity: the peak of MFU and of predicted times",
        unit="TFLOP/s",
        above=0,
        derived="the device table's; without a row, MFU has a measured one",
        other=1.0,
    )
    device_memory_gib: float | None = flag(
        None,
        "memory of one device, for megapar plan and for the report of a run that is out of memory",
        unit="GiB",
        above=0,
        derived="the device table's",
        other=0.001,
    )
    memory_check: bool = flag(
        True,
        "refuse a start whose ranks need more memory than this machine's CPU, or each device, has, by megapar plan",
        per_node=True,
    )
    link_gb: float | None = flag(
        None,
        "rate at which one device can send to others of its node, in one direction, for predicted times and the "
        "choices that depend on them",
        unit="GB/s",
        above=0,
        derived="the device table's",
        other=1.0,
    )
    network_gb: float | None = flag(
        None,
        "rate at which one device can send to other nodes, its share of the network cards of its node, in one "
        "direction, for predicted times and the choices that depend on them",
        unit="GB/s",
        above=0,
        derived="the device table's",
    )
    validate_only: bool = flag(
        False,
        "check everything that a start would check, including files and checkpoints, print the effective "
        "configuration, and exit; the machine (GPU, RANK, MASTER_ADDR) is not checked",
        meta=True,
        role=roles.STARTS_NOTHING,
    )
    rules_only: bool = flag(
        False,
        "like --validate-only, but check only the compatibility rules: data, tokenizer and checkpoints need not exist",
        meta=True,
        role=roles.STARTS_NOTHING,
    )
    world_size: int = flag(
        None, "number of ranks", unit="ranks", low=1, high=10_000_000, derived="WORLD_SIZE of the environment, or 1"
    )
    strict_seed_rules: bool = flag(False, "apply the restrictions of published documents that megapar normally lifts")
    config: tuple[str, ...] = flag(
        (),
        "YAML file whose keys are flag names, or a name that megapar configs lists; may be repeated: later files "
        "override earlier ones, and the command line overrides all files",
        meta=True,
        each=True,
    )
    data_ranks: int = fact("ranks that read different data: dp x sharding")
