"""Flags for training, data, checkpoints, logging and the runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megapar.schema import role as roles
from megapar.schema.flag import ERNIE, MOE, SWITCH, Alias, fact, flag

METRICS_OFF = "off"  # a value of --metrics-jsonl


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Batches, steps and precision."""

    role: ClassVar[roles.Role] = roles.OPTIMIZER
    micro_batch_size: int = flag(
        4, "sequences per forward pass on each data rank", unit="sequences", low=1, role=roles.KNOB, other=2
    )
    global_batch_size: int = flag(
        None,
        "sequences per optimizer step",
        unit="sequences",
        low=1,
        derived="micro-batch-size x gradient-merge-acc-step x data ranks",
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "START INCREMENT SAMPLES: increase the global batch size from START, by INCREMENT at a time, over the first "
        "SAMPLES samples",
        count=3,
        low=1,
        other=(1, 1, 2),
    )
    train_iters: int = flag(100, "number of optimizer steps", unit="steps", low=0, other=3)
    seed: int = flag(1234, "seed of weights, data order and dropout", low=0, high=2**63 - 1, other=7)
    dtype: str = flag(
        "auto",
        "compute precision; auto: bf16 on accelerators, fp16 on those without bf16 (V100), fp32 on CPUs",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
        aliases=(Alias("bf16", "bf16"), Alias("fp16", "fp16")),
        role=roles.PRECISION,
    )
    deterministic: bool = flag(
        False,
        "use only kernels whose results are reproducible bit for bit",
        aliases=("deterministic-mode",),
        role=roles.PRECISION,
    )
    eval_interval: int = flag(100, "steps between evaluations; 0: never", unit="steps", low=0, role=roles.EVALUATES)
    eval_iters: int = flag(10, "global batches per evaluation", unit="batches", low=1, role=roles.EVALUATES, other=2)
    initial_loss_scale: float = flag(65536.0, "fp16: initial loss scale", above=0, other=1024.0)
    min_loss_scale: float = flag(1.0, "fp16: minimum loss scale", above=0)
    loss_scale_window: int = flag(1000, "fp16: steps without overflow before the scale grows", unit="steps", low=1)
    loss_scale_factor: float = flag(2.0, "fp16: factor by which the scale grows and shrinks", above=1)
    hysteresis: int = flag(2, "fp16: overflows before the scale shrinks", unit="steps", low=1)
    progressive_iters: int = flag(
        0,
        "progressive training: steps over which sequence length, batch size, learning rate and dropout increase; "
        "0: off",
        unit="steps",
        low=0,
        models=ERNIE,
        other=2,
    )
    progressive_batch_multiple: int = flag(
        1,
        "progressive training: increment of the batch, in micro-batches of all data ranks together",
        unit="micro-batches",
        low=1,
        models=ERNIE,
    )
    progressive_length_multiple: int = flag(
        8, "progressive training: increment of the sequence length", unit="tokens", low=6, models=ERNIE, other=16
    )
    fp8: bool = flag(
        False,
        "compute linear layers (except experts) in fp8, with torchao",
        role=roles.PRECISION,
        undrawn="needs a GPU; tests/core/tensor_parallel/test_fp8.py emulates it",
    )
    attention_backend: str = flag(
        "auto",
        "kernel of attention on an NVIDIA GPU; auto: today's choice until a GPU day has confirmed another",
        choices=("auto", "flash", "cudnn", "flash3"),
        role=roles.by_hand("has no confirmed kernel but the default's, so no figures"),
        undrawn="needs a GPU; scripts/gpu_day.sh compares the kernels",
        other="cudnn",
    )
    compile: str = flag(
        "auto",
        "compile the functions between collectives with torch.compile",
        type="switch",
        choices=SWITCH,
        derived="off until measured on GPUs",
        role=roles.by_hand("has no measured gain on any accelerator, so no figures"),
        other="on",
    )
    manual_gc: str = flag(
        "auto",
        "run Python's garbage collector only at fixed steps, the same on all ranks",
        type="switch",
        choices=SWITCH,
        derived="on from 64 ranks",
        role=roles.COLLECTS,
        other="on",
    )
    manual_gc_interval: int = flag(
        100, "steps between garbage collections with --manual-gc", unit="steps", low=1, role=roles.COLLECTS
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer and its learning rate schedule."""

    role: ClassVar[roles.Role] = roles.OPTIMIZER
    optimizer: str = flag(
        "adamw",
        "adamw: decoupled weight decay; sgd: with momentum, and weight decay added to the gradient",
        choices=("adamw", "sgd"),
    )
    sgd_momentum: float = flag(0.9, "sgd: decay rate of the momentum; 0: none", low=0, high=0.999999)
    lr: float = flag(1e-3, "maximum learning rate", above=0, other=0.02)
    min_lr: float = flag(0.0, "learning rate after the decay", low=0, other=0.001)
    lr_decay_style: str = flag(
        "cosine",
        "shape of the learning rate decay after warmup; wsd (warmup-stable-decay): constant, then a decay over the "
        "last --lr-wsd-decay-iters",
        choices=("constant", "linear", "cosine", "inverse-square-root", "wsd"),
    )
    lr_warmup_iters: int = flag(0, "steps of linear learning rate warmup", unit="steps", low=0)
    lr_decay_iters: int = flag(
        None, "step at which the decay ends", unit="steps", low=1, derived="train-iters", other=4
    )
    lr_wsd_decay_iters: int = flag(
        None, "wsd: steps of the final decay", unit="steps", low=1, derived="a tenth of lr-decay-iters", other=3
    )
    lr_wsd_decay_style: str = flag(
        "linear",
        "wsd: shape of the final decay",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
        other="exponential",
    )
    weight_decay: float = flag(0.1, "weight decay (not applied to biases and norms)", ernie=0.01, low=0, other=0.5)
    clip_grad: float = flag(1.0, "gradient clipping: maximum global gradient norm; 0: off", low=0, other=0.01)
    adam_beta1: float = flag(0.9, "AdamW beta 1", low=0, high=0.999999)
    adam_beta2: float = flag(0.95, "AdamW beta 2", ernie=0.999, low=0, high=0.999999)
    adam_eps: float = flag(1e-8, "AdamW epsilon", above=0, other=0.001)
    override_opt_param_scheduler: bool = flag(
        False, "use the learning rate schedule of the flags instead of the checkpoint's", undrawn="is about checkpoints"
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Training and evaluation data, and the tokenizer."""

    role: ClassVar[roles.Role] = roles.DATA
    data_path: tuple[str, ...] = flag(
        ("builtin",),
        "training data: text, JSONL or parquet files (also .gz, .zst), folders of them, prefixes of .bin/.idx files, "
        "or weights and paths in turn; builtin: Python's documentation; mock: random tokens",
        aliases=("train-data-path", Alias("mock-data", ("mock",))),
        path=True,
    )
    eval_data_path: tuple[str, ...] = flag(
        (),
        "held-out data for evaluation, in the form of --data-path; mock only together with --data-path mock",
        aliases=("valid-data-path",),
        path=True,
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
    tokenizer_model: str | None = flag(
        None,
        "sentencepiece model, tokenizer.json or Hugging Face tokenizer folder; without it a tokenizer is trained on "
        "the data and cached",
        path=True,
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
        "(files of phrases, entities and triples), separated by commas",
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
    save: str | None = flag(None, "folder in which checkpoints are saved", path=True)
    load: str | None = flag(None, "folder of checkpoints to continue from; the layout of ranks may differ", path=True)
    save_interval: int = flag(0, "steps between checkpoints; 0: only at the end", unit="steps", low=0)
    ckpt_step: int | None = flag(None, "load the checkpoint of this step instead of the latest", unit="step", low=0)
    finetune: bool = flag(False, "load only the weights; reset step, optimizer, random and data state")
    no_load_optim: bool = flag(False, "do not load the optimizer state")
    no_load_rng: bool = flag(False, "do not load the random state")
    save_hf: str | None = flag(None, "folder for the trained model in Hugging Face format", path=True)
    load_hf: str | None = flag(None, "folder of a Hugging Face model to start from", path=True)
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
class LoggingOptions:
    """Log, metrics and profiler traces."""

    role: ClassVar[roles.Role] = roles.LOGS
    log_interval: int = flag(10, "steps between log lines", unit="steps", low=1, other=2)
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard files", path=True, per_node=True)
    metrics_jsonl: str | None = flag(
        None,
        "metrics file, one JSON object per step; off: none",
        path=True,
        per_node=True,
        derived="metrics.jsonl in the folder of --save, if there is one",
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
