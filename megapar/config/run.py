"""How a run trains, reads, saves and reports."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.schema.flag import SWITCH, Alias, fact, flag

ERNIE = ("ernie",)
MOE = ("moe",)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Batches, steps and precision."""

    micro_batch_size: int = flag(4, "sequences of one forward pass of a data rank", unit="sequences", low=1)
    global_batch_size: int = flag(
        None,
        "sequences of one optimizer step",
        unit="sequences",
        low=1,
        derived="micro-batch-size x gradient-merge-acc-step x data ranks",
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES samples",
        count=3,
        low=1,
    )
    train_iters: int = flag(100, "optimizer steps of the run", unit="steps", low=0)
    seed: int = flag(1234, "seed of weights, data order and dropout", low=0, high=2**63 - 1)
    dtype: str = flag(
        "auto",
        "compute precision; auto: bf16 on an accelerator, fp16 on one that has no bf16 (V100), fp32 on CPU",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
        aliases=(Alias("bf16", "bf16"), Alias("fp16", "fp16")),
    )
    deterministic: bool = flag(
        False, "only kernels that repeat their results to the last bit", aliases=("deterministic-mode",)
    )
    eval_interval: int = flag(100, "steps between evaluations; 0: never", unit="steps", low=0)
    eval_iters: int = flag(10, "global batches of one evaluation", unit="batches", low=1)
    initial_loss_scale: float = flag(65536.0, "fp16: loss scale at the start", above=0)
    min_loss_scale: float = flag(1.0, "fp16: least loss scale", above=0)
    loss_scale_window: int = flag(1000, "fp16: steps without overflow before the scale grows", unit="steps", low=1)
    loss_scale_factor: float = flag(2.0, "fp16: factor the scale grows and shrinks by", above=1)
    hysteresis: int = flag(2, "fp16: overflows before the scale shrinks", unit="steps", low=1)
    progressive_iters: int = flag(
        0, "steps over which length, batch, lr and dropout grow; 0: off", unit="steps", low=0, models=ERNIE
    )
    progressive_batch_multiple: int = flag(
        1, "micro-batches of all data ranks together that the batch grows by", unit="micro-batches", low=1, models=ERNIE
    )
    progressive_length_multiple: int = flag(8, "tokens that the length grows by", unit="tokens", low=6, models=ERNIE)
    fp8: bool = flag(False, "products of linear layers (not of experts) in fp8, by torchao")
    compile: bool = flag(False, "torch.compile of the functions between collectives")
    manual_gc: str = flag(
        "auto",
        "Python's garbage collector runs at the same steps on all ranks, and never else",
        type="switch",
        choices=SWITCH,
        derived="on from 64 ranks",
    )
    manual_gc_interval: int = flag(100, "steps between its runs", unit="steps", low=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW and its schedule."""

    lr: float = flag(1e-3, "highest learning rate", above=0)
    min_lr: float = flag(0.0, "learning rate after the decay", low=0)
    lr_decay_style: str = flag(
        "cosine",
        "shape of the decay after warm-up; wsd: none until its last --lr-wsd-decay-iters",
        choices=("constant", "linear", "cosine", "inverse-square-root", "wsd"),
    )
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", unit="steps", low=0)
    lr_decay_iters: int = flag(None, "step at which the decay ends", unit="steps", low=1, derived="train-iters")
    lr_wsd_decay_iters: int = flag(
        None, "wsd: steps of the final decay", unit="steps", low=1, derived="a tenth of lr-decay-iters"
    )
    lr_wsd_decay_style: str = flag(
        "linear", "wsd: shape of the final decay", choices=("linear", "cosine", "exponential", "minus_sqrt")
    )
    weight_decay: float = flag(0.1, "AdamW weight decay (not on biases and norms)", ernie=0.01, low=0)
    clip_grad: float = flag(1.0, "largest global gradient norm; 0: no clipping", low=0)
    adam_beta1: float = flag(0.9, "AdamW beta 1", low=0, high=0.999999)
    adam_beta2: float = flag(0.95, "AdamW beta 2", ernie=0.999, low=0, high=0.999999)
    adam_eps: float = flag(1e-8, "AdamW epsilon", above=0)
    override_opt_param_scheduler: bool = flag(False, "take the schedule from the flags, not from the checkpoint")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is read."""

    data_path: tuple[str, ...] = flag(
        ("builtin",),
        "builtin, mock, or text, JSONL, parquet (also .gz, .zst) and .bin/.idx files; or weights and paths in turn",
        aliases=("train-data-path", Alias("mock-data", ("mock",))),
        path=True,
    )
    eval_data_path: tuple[str, ...] = flag(
        (),
        "held-out data for evaluation, as --data-path; mock only beside mock",
        aliases=("valid-data-path",),
        path=True,
    )
    split: str | None = flag(None, "shares of training, held-out and unused documents, such as 969,30,1 (default 95,5)")
    text_field: str = flag(
        "text", "field of JSONL records, column of parquet files and datasets, that holds the document"
    )
    tokenizer_model: str | None = flag(
        None,
        "sentencepiece model or Hugging Face tokenizer folder; without it one is trained on the data and cached",
        path=True,
    )
    mlm_probability: float = flag(0.15, "share of tokens that are masked", above=0, high=0.9, models=ERNIE)
    data_source: str = flag("files", "read files, or stream a datasets source", choices=("files", "hf"))
    hf_dataset: str | None = flag(None, "path or cached name of the datasets source", path=True)
    reset_position_ids: bool = flag(False, "positions start again at every document", models=MOE)
    reset_attention_mask: bool = flag(False, "attention stays inside a document", models=MOE)
    eod_mask_loss: bool = flag(False, "no loss where the input is an end-of-document token", models=MOE)
    packing: bool = flag(True, "documents are joined to full sequences; off: one document per sample", models=MOE)
    on_bad_record: str = flag("stop", "what a record that cannot be read does", choices=("stop", "skip"))
    ernie_tasks: str | None = flag(
        None, "mixture of objectives, such as knowledge_mlm:1.0,document_lm:1.0", models=ERNIE
    )
    phrase_file: str | None = flag(None, "lexicon of phrases that are masked whole", models=ERNIE, path=True)
    entity_file: str | None = flag(None, "lexicon of named entities that are masked whole", models=ERNIE, path=True)
    triples_file: str | None = flag(
        None,
        "HEAD, RELATION, TAIL and SENTENCE on a line, with tabs between them, for knowledge_text",
        models=ERNIE,
        path=True,
    )
    override_data: tuple[str, ...] = flag(
        (),
        "what of the data may be another than the checkpoint's: sources, weights, split, seed, seq-length, knowledge "
        "(files of phrases, entities and triples), with commas",
        comma=True,
    )
    sentence_reorder_pieces: int = flag(
        3, "parts that sentence_reorder cuts a piece into, at most", unit="parts", low=2, high=6, models=ERNIE
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is saved and loaded."""

    save: str | None = flag(None, "folder for checkpoints", path=True)
    load: str | None = flag(None, "folder of checkpoints to continue from, on any layout", path=True)
    save_interval: int = flag(0, "steps between checkpoints; 0: only at the end", unit="steps", low=0)
    ckpt_step: int | None = flag(None, "load this step instead of the latest one", unit="step", low=0)
    finetune: bool = flag(False, "load weights only: step, optimizer, random and data state start anew")
    no_load_optim: bool = flag(False, "leave the optimizer state of the checkpoint out")
    no_load_rng: bool = flag(False, "leave the random state of the checkpoint out")
    save_hf: str | None = flag(None, "folder for the trained model in Hugging Face form", path=True)
    load_hf: str | None = flag(None, "Hugging Face model folder to start from", path=True)
    save_interval_minutes: float = flag(0.0, "minutes between checkpoints; 0: off", unit="minutes", low=0)
    async_save: bool = flag(True, "write checkpoints while training goes on; the final one is waited for")
    keep: int = flag(
        0,
        "newest checkpoints that are kept, besides the newest that each check vouches for; 0: all",
        unit="checkpoints",
        low=0,
    )
    checkpoint_verify: str = flag(
        "full",
        "what is checked before a file is loaded: size and SHA-256, size, nothing",
        choices=("full", "size", "off"),
    )
    on_bad_checkpoint: str = flag(
        "previous",
        "where a checkpoint is damaged: take the newest sound one before it, or stop",
        choices=("previous", "stop"),
    )
    on_save_error: str = flag(
        "continue", "where a checkpoint cannot be written: train on, or stop", choices=("continue", "stop")
    )
    exit_interval: int = flag(0, "save and stop at every so many steps; 0: off", unit="steps", low=0)
    exit_duration_minutes: float = flag(0.0, "save and stop after so long; 0: off", unit="minutes", low=0)


@dataclass(frozen=True, kw_only=True)
class LoggingOptions:
    """What is reported."""

    log_interval: int = flag(10, "steps between lines of the log", unit="steps", low=1)
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard files", path=True, per_node=True)
    metrics_jsonl: str | None = flag(None, "file that gets one JSON object per step", path=True, per_node=True)
    profile: str | None = flag(
        None, "START:END steps to write a profiler trace of, trace.json beside the metrics, or in the working folder"
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Where a run runs, and what is only checked."""

    device: str = flag(
        "auto",
        "device; auto: the accelerator where there is one",
        choices=("auto", "cpu", "cuda", "npu"),
        per_node=True,
    )
    validate_only: bool = flag(
        False,
        "refuse what a start would refuse, files and checkpoint too, print the effective configuration, stop; "
        "what this machine lacks (a GPU, RANK, MASTER_ADDR) is not asked for",
        meta=True,
    )
    rules_only: bool = flag(
        False, "as --validate-only, by the rules alone: data, tokenizer and checkpoints need not be here", meta=True
    )
    world_size: int = flag(
        None, "ranks of the run", unit="ranks", low=1, high=10_000_000, derived="WORLD_SIZE of the environment, or 1"
    )
    strict_seed_rules: bool = flag(False, "turn restrictions of published documents that megapar lifts back on")
    config: tuple[str, ...] = flag(
        (),
        "YAML file with the same names; of several the later wins, and a flag on the line over all",
        meta=True,
        each=True,
    )
    data_ranks: int = fact("positions that read data of their own: dp x sharding")
