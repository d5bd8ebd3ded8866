"""Features that come with a later version: one row each. Building a feature removes its line."""

from __future__ import annotations

from megapar.rules.rule import MODELS, NOT_BUILT, Facts, Rule, Test

MOE = ("moe",)
ERNIE = ("ernie",)


def _later(name: str, feature: str, failing: str, models: tuple[str, ...] = MODELS, when: Test | None = None) -> Rule:
    """The row `a flag away from its default needs a feature that is not there yet` (or where ``when`` holds)."""
    spelled = "--" + name.replace("_", "-").replace("broadcast-mb", "broadcast-MB")
    return Rule(
        id=f"not-built-{name.replace('_', '-')}",
        reads=(name, "changed") if when is None else (name, "asked"),
        when=when or (lambda f: name in f.changed),
        requires=lambda f: False,
        message=f"{spelled} asks for {feature}, which this version does not have yet",
        fix="Leave it out.",
        source="later version",
        passing="",
        failing=failing,
        kind=NOT_BUILT,
        models=models,
    )


def _indexed(f: Facts) -> bool:
    return any(path.endswith((".bin", ".idx")) or path.replace(".", "", 1).isdigit() for path in f.data_path)


RULES: tuple[Rule, ...] = (
    _later("pp_degree", "pipeline parallelism", "--world-size 2 --pp-degree 2"),
    _later("pp_seg_method", "pipeline parallelism", "--world-size 2 --pp-degree 2 --pp-seg-method balanced"),
    _later("pp_schedule", "pipeline schedules", "--world-size 2 --pp-degree 2 --pp-schedule gpipe"),
    _later("vpp_degree", "pipeline chunks", "--world-size 2 --pp-degree 2 --vpp-degree 2 --pp-schedule interleaved"),
    _later("use_nanopipe", "the zero-bubble schedule", "--world-size 2 --pp-degree 2 --use-nanopipe"),
    _later("cp_degree", "context parallelism", "--world-size 2 --cp-degree 2"),
    _later("recompute_interval", "recompute", "--recompute-interval 1"),
    _later("recompute_offload", "recompute", "--recompute-interval 1 --recompute-offload"),
    _later("recompute_partition", "recompute", "--recompute-interval 1 --recompute-partition"),
    _later("recompute_granularity", "recompute", "--recompute-granularity selective"),
    _later("recompute_method", "recompute", "--recompute-method block --recompute-num-layers 1"),
    _later("recompute_num_layers", "recompute", "--recompute-method block --recompute-num-layers 1"),
    _later("recompute_in_advance", "recompute ahead of the gradient", "--recompute-in-advance"),
    _later("recompute_in_bubble", "recompute in the bubble", "--recompute-in-bubble"),
    _later("adaptive_recompute_device_size", "adaptive recompute", "--adaptive-recompute-device-size 32"),
    _later("data_path", "Megatron .bin/.idx files and mixtures", "--data-path 0.7 a.bin 0.3 b.bin", when=_indexed),
    _later("split", "splits of one corpus", "--split 969,30,1"),
    _later("data_source", "streaming from datasets", "--data-source hf"),
    _later("hf_dataset", "streaming from datasets", "--hf-dataset local/corpus"),
    _later("reset_position_ids", "document boundaries in packed samples", "--reset-position-ids"),
    _later("reset_attention_mask", "document boundaries in packed samples", "--reset-attention-mask"),
    _later("eod_mask_loss", "document boundaries in packed samples", "--eod-mask-loss"),
    _later("packing", "samples of one document", "--no-packing"),
    _later("on_bad_record", "skipping records", "--on-bad-record skip"),
    _later("load_hf", "starting from a Hugging Face model", "--load-hf model"),
    _later("ernie_model", "ERNIE 3.0", "--ernie-model ernie3", ERNIE),
    _later("ernie_tasks", "the objectives of ERNIE 3.0", "--ernie-tasks document_lm:1.0", ERNIE),
    _later("phrase_file", "knowledge masking", "--phrase-file phrases.txt", ERNIE),
    _later("entity_file", "knowledge masking", "--entity-file entities.txt", ERNIE),
    _later("progressive_iters", "progressive learning", "--progressive-iters 100", ERNIE),
    _later("mtp_depth", "multi-token prediction", "--mtp-depth 1", MOE),
    _later("save_interval_minutes", "checkpoints by the clock", "--save runs/a --save-interval-minutes 30"),
    _later("keep", "removing old checkpoints", "--save runs/a --keep 2"),
    _later("exit_interval", "planned exits", "--exit-interval 100"),
    _later("exit_duration_minutes", "planned exits", "--exit-duration-minutes 60"),
    _later("profile", "profiler traces", "--profile 3:5"),
    _later("compile", "torch.compile", "--compile"),
    _later("fp8", "fp8 linear layers", "--fp8"),
)
