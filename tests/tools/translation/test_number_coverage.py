"""Every argument that is the same here, renamed or implied and touches numbers has a test that holds its formula."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megapar.config.read import normal, spellings
from megapar.tools.translation.translated import Translated, translate
from megapar.tools.translation.verdict import IMPLIED, RENAMED, SAME
from tests.tools.translation import test_megatron_numbers, test_numbers
from tests.tools.translation.tables import declared, values_of

ROOT = Path(__file__).parents[3]
# A framework's tables, and the lines that are trained by its formulas.
FRAMEWORKS = {
    "megatron": (("megatron_lm",), test_megatron_numbers.LINES),
    "deepspeed": (("megatron_deepspeed",), test_megatron_numbers.LINES),
    "mindspeed": (("mindspeed", "mindspeed_llm"), test_numbers.LINES),
    "paddle": (("paddlenlp", "paddleformers", "ernie_4_5", "paddle_fleet"), test_numbers.LINES),
}
# Test -> our flags that no line has, and other frameworks' arguments that are implied here.
HELD = {
    "checkpoints/export/test_convert.py::test_logits_on_every_layout": """
        --embedding-multiplier --logits-scaling --softmax-scale
    """,
    "core/optimizer/test_rounded_adamw.py::test_unrounded_moments_are_those_of_adamw": """
        --exp-avg-dtype --exp-avg-sq-dtype
    """,
    "training/test_two_byte_state.py::test_ranks_have_the_bits_of_one_process": "--main-grads-dtype",
    "data/sampling/test_samples.py::test_every_epoch_has_every_window_once_in_its_own_order": "dataloader-type",
    "equivalence/test_equivalence.py::test_fp64": """
        auto-parallel-sync-shared-params create-moe-param-group dp-allreduce-avg-in-gradinent-scale
        enable-delay-scale-loss enable-expert-tensor-parallelism enable-mtp-magic-send
        enable-recompute-layers-per-pp-rank enable-token-rearrange-opt enable-zbh1-exact-semantics
        gradient-merge-configs.avg gradient-scale-configs.scale-gradient gradient-scale-configs.scale-strategy
        gradient-sync-after-accumulate hybrid-configs.mp-configs.sync-grad hybrid-configs.mp-configs.sync-moment
        hybrid-configs.mp-configs.sync-param hybrid-configs.pp-configs.delay-scale-loss
        hybrid-configs.sharding-configs.use-reduce-avg moe-enable-deepep moe-flex-dispatcher-backend
        moe-hierarchical-alltoallv moe-permutation-async-comm moe-token-dispatcher-type moe-zerc
        overlap-p2p-communication pipeline pp-delay-scale-loss pp-sync-moment pp-sync-param sharding
        sharding-configs.use-calc-stream sp-allreduce-avg-in-gradinent-scale split-inputs-sequence-dim
        stage1-reduce-avg sync-grad tensor-parallel tensor-parallel-configs.tensor-parallel-degree tp-sync-moment
        tp-sync-param use-cp-send-recv-overlap use-expert-parallel use-fused-ring-attention-update use-mc2
        use-sp-callback
    """,
    "model/conformance/test_conformance.py::test_conformance": """
        --attention-sinks --moe-router-linear-bias --moe-router-pre-softmax --multi-latent-attention
        --no-norm-topk-prob --norm-topk-prob
    """,
    "model/decoder/test_layer_ropes.py::test_layers_without_rope_are_those_of_megatron": "--no-rope-freq",
    "model/layers/test_norm.py::test_one_plus_weight_is_gemma_s_to_the_bit": "--apply-layernorm-1p",
    "model/decoder/test_mtp.py::test_loss_by_hand": "--mtp-depth --mtp-loss-weight",
    "model/decoder/test_mtp_layer.py::test_the_published_block_by_its_formula": "--mtp-block",
    "model/decoder/test_windows.py::test_a_window_is_read_as_megatron_s_or_as_a_number_of_keys": "--window-size",
    "model/hugging_face/test_save.py::test_exported_decoder_gives_our_logits": "--qk-norm",
    "model/layers/test_loss.py::test_equals_the_reference": """
        cross-entropy-fusion-impl cross-entropy-loss-fusion loss-chunk-size loss-compute-mode loss-subbatch-seqlen
        loss-subbatch-sequence-length mtp-mem-efficient-logits output-layer-slice-num replace-with-c-embedding
        replace-with-parallel-cross-entropy tensor-parallel-output use-fused-head-and-loss-fn
        use-fused-head-loss-fn use-fused-linear-cross-entropy use-sparse-head-and-loss-fn
    """,
    "model/layers/test_mlp.py::test_output_and_gradients_are_those_of_qwen2_moe_s_formula": """
        --moe-shared-expert-gate --moe-shared-expert-intermediate-size
    """,
    "model/test_layer_pattern.py::test_a_number_gives_experts_to_every_nth_layer_as_megatron_does": """
        --moe-layer-freq
    """,
    "moe/test_deepspeed_gates.py::test_capacity_counts_and_loss": "--moe-min-capacity",
    "moe/test_deepspeed_gates.py::test_kept_pairs_and_weights": """
        --moe-model-type disable-moe-top2-2nd-expert-sampling
    """,
    "moe/test_router.py::test_computes_in_fp32_at_least": "router-gating-in-fp32",
    "moe/test_router.py::test_sigmoid_scores_are_not_normalised_but_their_sums_are": "--moe-router-score-function",
    "moe/test_router.py::test_correction_bias_moves_against_the_load": "--moe-router-bias-update-rate",
    "moe/test_router.py::test_choices_stay_in_the_best_groups": "--moe-router-group-topk --moe-router-num-groups",
    "tools/translation/test_megatron_numbers.py::test_documents_are_parted_as_megatron_s": """
        --eod-mask-loss --reset-attention-mask --reset-position-ids packing use-attn-mask-startend-row-indices
    """,
    "tools/translation/test_megatron_numbers.py::test_dropout_is_of_so_many_and_scales_the_rest": """
        --attention-dropout --hidden-dropout use-fused-dropout-add
    """,
    "tools/translation/test_megatron_numbers.py::test_masters_gradients_and_moments_are_fp32": """
        amp-configs.custom-black-list amp-configs.custom-black-varnames amp-configs.custom-white-list
        amp-configs.use-fp16-guard amp-configs.use-optimizer-fp16 amp-custom-black-list amp-custom-white-list
        amp-master-grad ddp-param-name-patterns-for-fp32-local-accumulation exp-avg-dtype exp-avg-sq-dtype
        input-layernorm-in-fp32 main-grads-dtype main-params-dtype megatron-fsdp-grad-comm-dtype
        megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype no-use-gmm-fp8
        sharding-configs.optimize-cast use-precision-aware-optimizer
    """,
    "tools/translation/test_megatron_numbers.py::test_the_learning_rate_behind_the_warm_up_is_theirs": """
        --lr-decay-iters --lr-warmup-iters --lr-wsd-decay-iters
    """,
    "tools/translation/test_megatron_numbers.py::test_the_loss_scale_moves_as_theirs": """
        --hysteresis --loss-scale-factor --loss-scale-window --min-loss-scale amp-configs.decr-ratio
        amp-configs.use-dynamic-loss-scaling
    """,
    "tools/translation/test_megatron_numbers.py::test_two_steps_are_megatron_s": """
        --add-bias-linear --global-batch-size --head-dim --moe-router-topk-scaling-factor --moe-z-loss-coeff
        --normalization --rotary-percent --rope-scaling-type add-dense-bias add-qkv-bias attention-backend
        disable-pad-vocab-size ds_fused_adam mlp-type moe-router-load-balancing-type no-pad-vocab-size
        no-rope-fusion rope-type rotary-interleaved seq-aux softmax-type torch_adam use-flash-attn-builder
        use-flash-attn-triton use-flash-attn-v1 use-flash-attn-v2
    """,
    "tools/translation/test_numbers.py::test_the_capacity_is_mindspeed_s": "--moe-capacity-factor",
    "tools/translation/test_numbers.py::test_two_steps_are_paddle_s": """
        apply-rope-fusion attention-mask-type attn-implementation cp-attention-mask-type fa-version
        fuse-attention-ffn fuse-attention-qkv fuse-attn-ffn fuse-gate-detach-matmul fuse-grad-merge fuse-linear
        fuse-ln fuse-rms-norm fuse-rope fuse-softmax-mask fuse-swiglu gradient-merge hidden-act moe-expert-fusion
        moe-gate moe-layer-freq moe-norm-gate-logits moe-router-fusion moe-shared-expert-overlap
        moe-use-fusion-node moe-with-send-router-loss noop-layers optim optimizer-selection remove-tail-layer
        tie-word-embeddings use-fast-layer-norm use-fast-ln use-flash-attention use-flash-attn
        use-flash-attn-with-mask use-fused-linear use-fused-mlp use-fused-moe-token-permute-and-unpermute
        use-fused-rms-norm use-fused-rmsnorm use-fused-rope use-fused-rotary-pos-emb use-fused-swiglu
        use-fusion-attn-v2 use-global-causal-attn use-mem-eff-attn use-moe use-ortho-loss-callback use-rmsnorm
        use-sparse-flash-attn use-triton-swiglu-limit use-unified-moe using-sonic-moe
    """,
    "training/building/test_rates.py::test_the_word_embedding_and_the_head_have_rates_of_their_own": """
        --decoupled-lr --decoupled-min-lr
    """,
    "training/step/test_schedules.py::test_weight_decay_goes_from_its_first_value_to_its_last": """
        --end-weight-decay --start-weight-decay --weight-decay-incr-style
    """,
}
# What touches no number of a training, whatever it says.
SILENT = """
    --data-path --deterministic --dtype --eval-data-path --eval-interval --eval-iters --log-interval --manual-gc
    --manual-gc-interval --no-use-flash-attn --seed --split --tokenizer-model
    auto-detect-ckpt-format auto-parallel-resume-form-hybrid-parallel check-for-large-grads check-for-spiky-loss
    ckpt-format data-impl disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-format distributed-backend
    distributed-dataloader do-train evaluation-strategy exit-on-missing-checkpoint exit-signal-handler
    exit-signal-handler-for-dataloader exit-signal-handler-for-training flex-ckpt-comm-method force-reshard-pp
    from-scratch load-checkpoint-format load-sharded-model load-sharded-model-remap-parameter-name local-rank
    local_rank log-batch-size-to-tensorboard log-global-grad-norm log-memory-to-tensorboard log-straggler
    log-throughput log-timers-to-tensorboard log-world-size-to-tensorboard logging-strategy
    no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-use-rts
    no-use-tokenizer-model-from-checkpoint-args onnx-safe pp-need-data pp-need-data-degree save-checkpoint-format
    save-rng-states save-sharded-model save-strategy tokenizer-type unified-checkpoint unified-checkpoint-config
    use-dist-ckpt use-intermediate-api
"""
KNOWN = {*SILENT.split(), *(word for words in HELD.values() for word in words.split())}


def answers(framework: str) -> Iterator[tuple[str, Translated]]:
    """Every argument with what becomes of its values."""
    for table in FRAMEWORKS[framework][0]:
        for row in declared(table):
            for value in dict.fromkeys(("true", "false", "2", "0.5", *values_of(row))):
                yield row.name, translate(row.words(value), framework)[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_the_same_here_is_held_to_a_formula(framework: str) -> None:
    megatron, lines = framework in ("megatron", "deepspeed"), FRAMEWORKS[framework][1]
    written = {
        word
        for line in lines.values()
        for word in test_megatron_numbers.ours(line, "megatron" if megatron else "paddle")
        if word.startswith("--")
    }
    known = KNOWN | {name for line in lines.values() if megatron for name in test_megatron_numbers.given(line)}
    missing = {}
    for name, item in answers(framework):
        if item.verdict == IMPLIED and name not in known:
            missing[name] = item.reason
        for word in shlex.split(item.ours) if item.verdict in (SAME, RENAMED) else []:
            flag = spellings().get(normal(word[2:])) if word.startswith("--") else None
            touches = flag is not None and flag.flag.group in ("model", "moe", "training", "optimizer", "data")
            if touches and word not in written and word not in KNOWN:
                missing[name] = item.ours
    assert missing == {}


def test_no_argument_is_excused_that_needs_no_excuse() -> None:
    implied = {name for framework in FRAMEWORKS for name, item in answers(framework) if item.verdict == IMPLIED}
    assert {name for name in KNOWN if not name.startswith("--")} - implied == set()


@cache
def names_of_tests(path: str) -> frozenset[str]:
    """The names of a file's tests."""
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("place", HELD)
def test_the_tests_that_are_named_are_there(place: str) -> None:
    path, _, name = place.partition("::")
    assert name in names_of_tests(path)
