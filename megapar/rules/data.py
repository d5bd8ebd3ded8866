"""Rows on the training data, and parsing of ``--data-path``."""

from __future__ import annotations

from functools import partial

from megapar.files.data_files import NUMBER, blend_of, may_be_text, split_name
from megapar.files.task_file import named_tasks
from megapar.schema.batch_size import BatchSize
from megapar.schema.flag import MOE
from megapar.schema.phase_plan import parse_phases, plan_phases
from megapar.schema.rule import Facts, Rule, unused

SOURCE = "data"
OVERRIDES = ("sources", "weights", "split", "seed", "seq-length", "knowledge", "chat")
"""Legal words of ``--override-data``."""
_APART = {"reset_position_ids", "reset_attention_mask"}
_BOUNDARIES = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def _blends(f: Facts) -> bool:
    for paths in (f.data_path, f.eval_data_path):
        try:
            blend_of(paths)
        except ValueError:
            return False
    return True


def _tasks_apart(f: Facts) -> bool:
    names = [name for name, _ in named_tasks(f.eval_tasks)]
    return len(set(names)) == len(names)


def _split(f: Facts) -> bool:
    """Return True if --split is two or three weights, the first one above 0."""
    parts = f.split.split(",")
    return len(parts) in (2, 3) and all(NUMBER.fullmatch(part.strip()) for part in parts) and float(parts[0]) > 0


def _names(f: Facts) -> set[str]:
    return {item.name for item in blend_of(f.data_path)} - {""} if _blends(f) else set()


def _no_place(f: Facts) -> str:
    """Return the reason why the phases have no places in the run; "" if they have."""
    batch = BatchSize(f.global_batch_size, *(f.rampup_batch_size or ()))
    try:
        plan_phases(parse_phases(f.data_phases), f.seq_length, batch)
    except ValueError as error:
        return str(error)
    return ""


def _warms_up_before_phases(f: Facts) -> bool:
    """Return True if no phase with a learning rate begins inside the warmup; of phases without places, too."""
    if _no_place(f):
        return True
    batch = BatchSize(f.global_batch_size, *(f.rampup_batch_size or ()))
    spans = plan_phases(parse_phases(f.data_phases), f.seq_length, batch).spans
    return all(span.first_step >= f.lr_warmup_iters for span in spans if span.rate)


def _has_records(f: Facts) -> bool:
    """Return True if some data may consist of records; files are not opened here."""
    words = [word for word in (*f.data_path, *f.eval_data_path) if not NUMBER.fullmatch(word)]
    files = [split_name(word)[1] for word in words]
    return f.data_source == "hf" or any(name not in ("builtin", "mock") for name in files)


def _is_sft(f: Facts) -> bool:
    return bool(f.task == "sft")


_row = partial(Rule, source=SOURCE)
_sft_row = partial(Rule, source=SOURCE, models=MOE, when=_is_sft)
_SFT = "--task sft --tokenizer-model tokenizer --data-path chat.jsonl"

_TUNING: tuple[Rule, ...] = (
    unused(
        "sft-flags",
        ("sft_loss", "sft_packing", "sft_overlong", "sft_turns", "chat_template", "chat_date", "train_epochs"),
        ("task",),
        lambda f: not _is_sft(f),
        "without --task sft",
        passing=f"{_SFT} --sft-loss conversation",
        failing="--sft-loss conversation",
        models=MOE,
    ),
    _sft_row(
        id="sft-tokenizer",
        reads=("task", "tokenizer_model"),
        requires=lambda f: f.tokenizer_model is not None,
        message="--task sft needs the tokenizer of the model, with a chat template",
        fix="Set --tokenizer-model to a Hugging Face tokenizer folder, such as that of --load-hf.",
        passing=_SFT,
        failing="--task sft --data-path chat.jsonl",
    ),
    _sft_row(
        id="sft-data",
        reads=("task", "data_path", "eval_data_path", "data_source"),
        requires=lambda f: f.data_source != "hf" and not {"builtin", "mock"} & {*f.data_path, *f.eval_data_path},
        message="--task sft reads conversations, from JSONL files or prepared ones, and neither text nor datasets",
        fix="Set --data-path to conversations; datasets.Dataset.to_json writes JSONL.",
        passing=_SFT,
        failing="--task sft --tokenizer-model tokenizer --data-path builtin",
    ),
    _sft_row(
        id="sft-phases",
        reads=("task", "data_path", "eval_data_path", "data_phases", "on_source_end"),
        requires=lambda f: (
            f.data_phases is None
            and f.on_source_end == "repeat"
            and not any(split_name(word)[0] for word in (*f.data_path, *f.eval_data_path))
        ),
        message="--task sft has no phases: --data-phases, names of sources and --on-source-end stop are for text",
        fix="Leave them out; weights mix sources, and --train-epochs ends a run.",
        passing=_SFT,
        failing=f"{_SFT} --on-source-end stop",
    ),
    _sft_row(
        id="sft-packing",
        reads=("task", "sft_packing", "given", "requested"),
        requires=lambda f: (
            not f.given & {"packing", "text_field", "document_per", "eod_mask_loss"}
            and all(f.requested[name] == (f.sft_packing == "best_fit") for name in f.given & _APART)
        ),
        message=(
            "--task sft keeps conversations apart by itself (--sft-packing) and knows their fields: --packing, "
            "--reset-position-ids, --reset-attention-mask, --eod-mask-loss, --text-field and --document-per are for "
            "text"
        ),
        fix="Leave them out; --sft-packing pad places one conversation in each sample.",
        passing=f"{_SFT} --sft-packing pad",
        failing=f"{_SFT} --no-packing",
    ),
    _sft_row(
        id="train-epochs",
        reads=("task", "train_epochs", "data_path", "rampup_batch_size", "given"),
        when=lambda f: _is_sft(f) and f.train_epochs > 0,
        requires=lambda f: (
            "train_iters" not in f.given and f.rampup_batch_size is None and not NUMBER.fullmatch(f.data_path[0])
        ),
        message=(
            "--train-epochs is the length of a run over data that is read as a whole, in batches of one size: "
            "--train-iters, weights in --data-path and --rampup-batch-size exclude it"
        ),
        fix="Leave out --train-epochs, or each of those.",
        passing=f"{_SFT} --train-epochs 3",
        failing=f"{_SFT} --train-epochs 3 --train-iters 10",
    ),
)

RULES: tuple[Rule, ...] = (
    *_TUNING,
    _row(
        id="data-weights",
        reads=("data_path", "eval_data_path"),
        requires=_blends,
        message=(
            "--data-path and --eval-data-path must be paths, or weights above 0 and paths in turn; all paths have "
            "different names (NAME=PATH), or none has one"
        ),
        fix="Write --data-path 0.7 A 0.3 B, or leave the numbers out; write ./7 for a file whose name is a number.",
        passing="--data-path 0.7 a.jsonl 0.3 b.jsonl",
        failing="--data-path 0.7 a.jsonl b.jsonl",
    ),
    _row(
        id="names-without-weights",
        reads=("data_path", "eval_data_path", "given"),
        when=lambda f: len(_names(f)) > 1 and "data_phases" not in f.given,  # also of phases that are not well-formed
        requires=lambda f: blend_of(f.data_path)[0].weight is not None,
        message="several named sources of --data-path need weights, which each of them, or each phase, gives",
        fix="Write --data-path 0.7 a=A 0.3 b=B, or set --data-phases.",
        passing="--data-path 0.7 a=a.jsonl 0.3 b=b.jsonl",
        failing="--data-path a=a.jsonl b=b.jsonl",
    ),
    _row(
        id="eval-names-weights",
        reads=("data_path", "eval_data_path"),
        when=lambda f: _blends(f) and any(item.name for item in blend_of(f.eval_data_path)),
        requires=lambda f: blend_of(f.eval_data_path)[0].weight is None,
        message="named sets of --eval-data-path are evaluated one by one, so weights have no effect",
        fix="Leave the weights out, or the names for the loss of the mixture.",
        passing="--eval-data-path a=a.jsonl b=b.jsonl",
        failing="--eval-data-path 2 a=a.jsonl 1 b=b.jsonl",
    ),
    _row(
        id="eval-tasks-interval",
        reads=("eval_tasks", "eval_interval"),
        when=lambda f: bool(f.eval_tasks),
        requires=lambda f: f.eval_interval > 0,
        message="--eval-tasks are scored by evaluations, which --eval-interval 0 turns off",
        fix="Set --eval-interval, or leave --eval-tasks out.",
        passing="--eval-tasks arc.jsonl",
        failing="--eval-tasks arc.jsonl --eval-interval 0",
    ),
    _row(
        id="eval-tasks-names",
        reads=("eval_tasks",),
        requires=_tasks_apart,
        message="two tasks of --eval-tasks have one name",
        fix="Give names: --eval-tasks easy=a/arc.jsonl hard=b/arc.jsonl.",
        passing="--eval-tasks easy=a/arc.jsonl hard=b/arc.jsonl",
        failing="--eval-tasks a/arc.jsonl b/arc.jsonl",
    ),
    _row(
        id="eval-tasks-tokenizer",
        reads=("eval_tasks", "data_path", "tokenizer_model"),
        when=lambda f: bool(f.eval_tasks) and "mock" in f.data_path,
        requires=lambda f: f.tokenizer_model is not None,
        message="--eval-tasks are text, and --data-path mock has no tokenizer of text",
        fix="Set --tokenizer-model.",
        passing="--eval-tasks arc.jsonl --data-path mock --tokenizer-model tokenizers/llama",
        failing="--eval-tasks arc.jsonl --data-path mock",
    ),
    _row(
        id="phases-sources",
        reads=("data_phases", "data_path", "eval_data_path"),
        when=lambda f: f.data_phases is not None and _blends(f),
        requires=lambda f: (
            _names(f) == {name for phase in parse_phases(f.data_phases) for name, _ in phase.weights}
            and blend_of(f.data_path)[0].weight is None
        ),
        message="--data-phases gives the weights of sources that --data-path names without weights, each in some phase",
        fix=lambda f: (
            "Write --data-path "
            + " ".join(sorted({f"{name}=PATH" for phase in parse_phases(f.data_phases) for name, _ in phase.weights}))
        ),
        passing="--data-path a=a.jsonl b=b.jsonl --data-phases '0: a=1,b=2'",
        failing="--data-path a=a.jsonl b=b.jsonl --data-phases '0: a=1'",
        models=MOE,
    ),
    _row(
        id="phases-places",
        reads=("data_phases", "seq_length", "global_batch_size", "rampup_batch_size"),
        when=lambda f: f.data_phases is not None,
        requires=lambda f: not _no_place(f),
        message="every phase of --data-phases needs a step, and a ramp of the batch size ends inside the first",
        fix=lambda f: f"As it is, {_no_place(f)}.",
        passing="--data-path a=a.jsonl --global-batch-size 4 --data-phases '0: a=1; 8 samples: a=2'",
        failing="--data-path a=a.jsonl --global-batch-size 4 --data-phases '0: a=1; 1 iterations: a=2; 3 samples: a=1'",
        models=MOE,
    ),
    _row(
        id="phases-lr",
        reads=("data_phases", "lr_decay_style"),
        when=lambda f: f.data_phases is not None and f.lr_decay_style == "wsd",
        requires=lambda f: not any(phase.rate for phase in parse_phases(f.data_phases)),
        message="the lr of a phase and --lr-decay-style wsd would both end the stable learning rate",
        fix="Choose --lr-decay-style constant, or leave the lr of the phases out.",
        passing="--data-path a=a.jsonl --lr-decay-style constant --data-phases '0: a=1 lr=0'",
        failing="--data-path a=a.jsonl --lr-decay-style wsd --data-phases '0: a=1 lr=0'",
        models=MOE,
    ),
    _row(
        id="phases-warmup",
        reads=("data_phases", "lr_warmup_iters", "seq_length", "global_batch_size", "rampup_batch_size"),
        when=lambda f: f.data_phases is not None and f.lr_warmup_iters > 0,
        requires=_warms_up_before_phases,
        message="the lr of a phase begins at the rate before it, which inside the warmup is not that of --lr",
        fix="Give an lr to phases that begin after --lr-warmup-iters only.",
        passing="--data-path a=a.jsonl --lr-warmup-iters 2 --data-phases '0: a=1; 2 iterations: a=1 lr=0'",
        failing="--data-path a=a.jsonl --lr-warmup-iters 2 --data-phases '0: a=1 lr=0'",
        models=MOE,
    ),
    _row(
        id="phases-decoupled-lr",
        reads=("data_phases", "decoupled_lr"),
        when=lambda f: f.data_phases is not None and f.decoupled_lr is not None,
        requires=lambda f: not any(phase.rate for phase in parse_phases(f.data_phases)),
        message="the lr of a phase is that of all parameters, and --decoupled-lr gives some of them another",
        fix="Leave out --decoupled-lr, or the lr of the phases.",
        passing="--data-path a=a.jsonl --decoupled-lr 1e-3 --data-phases '0: a=1'",
        failing="--data-path a=a.jsonl --decoupled-lr 1e-3 --data-phases '0: a=1 lr=0'",
        models=MOE,
    ),
    _row(
        id="phases-adaptive",
        reads=("data_phases", "seq_length", "adaptive_recompute_device_size"),
        when=lambda f: f.data_phases is not None and f.adaptive_recompute_device_size > 0,
        requires=lambda f: len({phase.seq_length or f.seq_length for phase in parse_phases(f.data_phases)}) == 1,
        message=(
            "--adaptive-recompute-device-size chooses layers by what the first steps need, and later phases have "
            "samples of another length"
        ),
        fix="Choose --recompute-interval 1, or one seq-length.",
        passing="--data-path a=a.jsonl --adaptive-recompute-device-size 1048576 --data-phases '0: a=1'",
        failing=(
            "--data-path a=a.jsonl --adaptive-recompute-device-size 1048576 "
            "--data-phases '0: a=1; 1 iterations: a=1 seq-length=8'"
        ),
        models=MOE,
    ),
    _row(
        id="override-data",
        reads=("override_data",),
        requires=lambda f: set(f.override_data) <= set(OVERRIDES),
        message=f"--override-data takes only the data settings that may change: {', '.join(OVERRIDES)}",
        fix="Write for example --override-data sources,weights.",
        passing="--load runs/a --override-data weights",
        failing="--load runs/a --override-data tokenizer",
    ),
    _row(
        id="split-weights",
        reads=("split",),
        when=lambda f: f.split is not None,
        requires=_split,
        message="--split must be two or three weights, the first one above 0",
        fix="Write for example --split 95,5 or --split 969,30,1.",
        passing="--split 969,30,1",
        failing="--split 0,100",
    ),
    _row(
        id="split-nothing-held-out",
        reads=("split", "eval_interval"),
        when=lambda f: f.split is not None and f.eval_interval > 0,
        requires=lambda f: not _split(f) or float(f.split.split(",")[1]) > 0,
        message="--split holds out no documents to evaluate on",
        fix="Set --eval-interval 0, or a second weight above 0.",
        passing="--split 100,0,0 --eval-interval 0",
        failing="--split 100,0,0",
    ),
    _row(
        id="split-or-eval-data",
        reads=("split", "eval_data_path"),
        requires=lambda f: f.split is None or not f.eval_data_path,
        message="--split and --eval-data-path both define the held-out data",
        fix="Keep one of them.",
        passing="--eval-data-path held_out.jsonl",
        failing="--split 95,5 --eval-data-path held_out.jsonl",
    ),
    _row(
        id="split-mock",
        reads=("split", "data_path"),
        when=lambda f: "mock" in f.data_path,
        requires=lambda f: f.split is None,
        message="--data-path mock generates its held-out tokens, so --split has no effect",
        fix="Leave --split out.",
        passing="--data-path mock",
        failing="--data-path mock --split 95,5",
    ),
    _row(
        id="text-field",
        reads=("text_field", "data_path", "eval_data_path", "data_source"),
        when=lambda f: f.text_field != "text",
        requires=_has_records,
        message="--text-field applies to JSONL and parquet files and datasets, and has no effect without any",
        fix="Set --data-path, or leave --text-field out.",
        passing="--text-field content --data-path a.jsonl",
        failing="--text-field content --data-path mock",
    ),
    _row(
        id="document-per",
        reads=("document_per", "data_source", "not_default", "data_path", "eval_data_path"),
        when=lambda f: "document_per" in f.not_default and f.data_source != "hf",
        requires=lambda f: may_be_text((*f.data_path, *f.eval_data_path)),
        message="--document-per says what a document of text files is, and has no effect without any",
        fix="Set --data-path to text files, or leave --document-per out.",
        passing="--document-per file --data-path a.txt b.txt",
        failing="--document-per file --data-path a.jsonl",
    ),
    _row(
        id="packing-off",
        reads=("packing", *_BOUNDARIES),
        when=lambda f: not f.packing,
        requires=lambda f: not (f.reset_position_ids or f.reset_attention_mask or f.eod_mask_loss),
        message="--no-packing puts one document in a sample, where document boundaries have no effect",
        fix="Leave out --no-packing, or --reset-position-ids, --reset-attention-mask and --eod-mask-loss.",
        passing="--no-packing",
        failing="--no-packing --reset-attention-mask",
        models=MOE,
    ),
    _row(
        id="hf-source",
        reads=("data_source", "hf_dataset"),
        requires=lambda f: (f.data_source == "hf") == (f.hf_dataset is not None),
        message="--data-source hf and --hf-dataset must be used together",
        fix="Set both or neither.",
        passing="--data-source hf --hf-dataset corpus",
        failing="--data-source hf",
    ),
    _row(
        id="hf-source-alone",
        reads=("data_source", "not_default"),
        when=lambda f: f.data_source == "hf",
        requires=lambda f: not f.not_default & {"data_path", "eval_data_path", "document_per", "on_bad_record"},
        message=(
            "--data-source hf reads only --hf-dataset; --data-path, --eval-data-path, --document-per and "
            "--on-bad-record have no effect"
        ),
        fix="Leave them out, or leave --data-source hf out.",
        passing="--data-source hf --hf-dataset corpus --split 90,10",
        failing="--data-source hf --hf-dataset corpus --data-path a.jsonl",
    ),
    _row(
        id="hf-source-packing",
        reads=("data_source", "packing"),
        when=lambda f: f.data_source == "hf",
        requires=lambda f: f.packing,
        message="--data-source hf streams only packed samples",
        fix="Leave --no-packing out, or write the data to a file with megapar data prepare.",
        passing="--data-source hf --hf-dataset corpus",
        failing="--data-source hf --hf-dataset corpus --no-packing",
        models=MOE,
    ),
)
