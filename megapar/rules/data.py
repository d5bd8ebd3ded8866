"""Rows on the training data, and parsing of ``--data-path``."""

from __future__ import annotations

from functools import partial

from megapar.files.data_files import NUMBER, blend_of
from megapar.schema.flag import MOE
from megapar.schema.rule import Facts, Rule

SOURCE = "data"
OVERRIDES = ("sources", "weights", "split", "seed", "seq-length", "knowledge")
"""Legal words of ``--override-data``."""
_BOUNDARIES = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def _blends(f: Facts) -> bool:
    for paths in (f.data_path, f.eval_data_path):
        try:
            blend_of(paths)
        except ValueError:
            return False
    return True


def _split(f: Facts) -> bool:
    """Return True if --split is two or three weights, the first one above 0."""
    parts = f.split.split(",")
    return len(parts) in (2, 3) and all(NUMBER.fullmatch(part.strip()) for part in parts) and float(parts[0]) > 0


def _holds_out(f: Facts) -> bool:
    return not _split(f) or float(f.split.split(",")[1]) > 0


def _has_records(f: Facts) -> bool:
    """Return True if some data may consist of records; files are not opened here."""
    files = [name for name in (*f.data_path, *f.eval_data_path) if not NUMBER.fullmatch(name)]
    return f.data_source == "hf" or any(name not in ("builtin", "mock") for name in files)


_row = partial(Rule, source=SOURCE)

RULES: tuple[Rule, ...] = (
    _row(
        id="data-weights",
        reads=("data_path", "eval_data_path"),
        requires=_blends,
        message="--data-path and --eval-data-path must be paths, or weights above 0 and paths in turn",
        fix="Write --data-path 0.7 A 0.3 B, or leave the numbers out; write ./7 for a file whose name is a number.",
        passing="--data-path 0.7 a.jsonl 0.3 b.jsonl",
        failing="--data-path 0.7 a.jsonl b.jsonl",
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
        requires=_holds_out,
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
        requires=lambda f: not f.not_default & {"data_path", "eval_data_path", "on_bad_record"},
        message=(
            "--data-source hf reads only --hf-dataset; --data-path, --eval-data-path and --on-bad-record have no effect"
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
