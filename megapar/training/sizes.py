"""From a configuration to the numbers of its model and the plan of its segments. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megapar.arguments import Config
from megapar.config.stored import stored_facts, stored_schedule
from megapar.core.checkpoint.facts import differences
from megapar.core.sharding.cut import Described, local_box
from megapar.core.sharding.plan import PlanError, PlannedSegment, by_anchors, by_bytes, by_unit
from megapar.core.units import MEGABYTE, billions
from megapar.errors import Complaint, ConfigError
from megapar.model.decoder.sizes import DecoderSizes, MoeSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.ernie3.sizes import Ernie3Sizes
from megapar.model.ernie3.tasks import tasks_of
from megapar.model.spec import parameter_counts, table_of
from megapar.training.fit import fitted
from megapar.training.identity import another_run
from megapar.training.learning_rate import another_schedule, make_learning_rate
from megapar.training.stages import Sizes as Sizes
from megapar.training.stages import outline as pipeline_outline

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def make_sizes(config: Config) -> Sizes:
    """The numbers of the model."""
    model = config.model
    common: dict[str, Any] = {
        name: getattr(model, name)
        for name in (
            *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size", "seq_length"),
            *("max_position_embeddings", "layernorm_epsilon", "attention_dropout", "hidden_dropout", "init_std"),
            *("depth_scaled_init", "use_flash_attn"),
        )
    }
    if config.kind == "ernie":
        common |= {name: getattr(model, name) for name in ("type_vocab_size", "task_type_vocab_size")}
        if model.ernie_model == "ernie":
            return ErnieSizes(**common)
        return Ernie3Sizes(
            **common,
            task_layers=model.task_num_layers,
            task_hidden_size=model.task_hidden_size,
            task_heads=model.task_num_attention_heads,
            task_ffn_hidden_size=model.task_ffn_hidden_size,
            segments=model.generation_segments,
            memory=model.memory_length,
            tasks=tuple(tasks_of(config.data.ernie_tasks)),
            reorder_pieces=config.data.sentence_reorder_pieces,
        )
    return DecoderSizes(
        **common,
        num_query_groups=model.num_query_groups,
        head_dim=model.head_dim,
        normalization=model.normalization,
        position_embedding_type=model.position_embedding_type,
        activation=model.activation,
        add_bias_linear=model.add_bias_linear,
        qk_norm=model.qk_norm,
        rope_theta=model.rope_theta,
        tie_embeddings=not model.untie_embeddings_and_output_weights,
        first_k_dense=config.moe.first_k_dense,
        moe=_moe_sizes(config),
        moe_widths=config.moe.moe_layer_ffn_hidden_sizes or (),
        mtp_depth=model.mtp_depth,
    )


def _moe_sizes(config: Config) -> MoeSizes | None:
    moe = config.moe
    if moe.num_experts == 0:
        return None
    return MoeSizes(
        hidden_size=config.model.hidden_size,
        ffn_hidden_size=moe.moe_ffn_hidden_size,
        num_experts=moe.num_experts,
        topk=moe.moe_router_topk,
        shared_experts=moe.moe_shared_experts,
        kind=moe.moe_model_type,
        capacity_factor=moe.moe_capacity_factor,
        min_capacity=moe.moe_min_capacity,
        drop_policy=moe.moe_drop_policy,
        capacity_scope=moe.moe_capacity_scope,
        activation=config.model.activation,
        add_bias=config.model.add_bias_linear,
        score=moe.moe_router_score_function,
        groups=moe.moe_router_num_groups,
        group_topk=moe.moe_router_group_topk,
        scaling=moe.moe_router_topk_scaling_factor,
        sequence_aux=moe.moe_seq_aux_loss_coeff > 0,
        orthogonal=moe.moe_orthogonal_loss_coeff > 0,
        biased=moe.moe_router_bias_update_rate > 0 or bool(config.checkpoint.load or config.checkpoint.load_hf),
    )


def make_segments(config: Config, sizes: Sizes) -> list[PlannedSegment]:
    """The plan of ``--sharding-segment-strategy``. Raises ConfigError for anchors that do not fit the model.

    Bytes are those that rank 0 gathers in the compute dtype; where the device is to choose that, bf16 is assumed.
    """
    rows = [spec for spec in table_of(sizes) if spec.trainable]
    item = ITEM_BYTES.get(config.training.dtype, 2)

    def cost(row: Described) -> int:
        return local_box(row, config.grid, 0).numel * (max(4, item) if row.fp32 else item)

    sharding = config.sharding
    # At stage 3 a part of a layer is gathered by its call. ERNIE 3.0 calls the parts of a layer as often as a rank's
    # samples ask for, and hidden gathers of mp take the attention's weights without a call.
    whole = sharding.sharding_stage == 3 and (isinstance(sizes, Ernie3Sizes) or config.ampipe.ampipe_tp_sp_comm_overlap)
    if sharding.sharding_segment_strategy == "segment_broadcast_MB":
        return by_bytes(rows, cost, sharding.segment_broadcast_mb * MEGABYTE, whole=whole)
    if sharding.sharding_segment_strategy == "segment_anchors":
        try:
            return by_anchors(rows, cost, sharding.segment_anchors, whole=whole)
        except PlanError as error:
            raise ConfigError([Complaint("segment-anchors", str(error))]) from error
    return by_unit(rows, cost)


def outline(config: Config) -> str:
    """What --validate-only adds of the model: its parameters and its segments."""
    sizes = make_sizes(config)
    not_compared = _check_saved(config, sizes)
    segments = make_segments(config, sizes)
    shown = segments if len(segments) <= 12 else [*segments[:6], *segments[-5:]]
    lines = [f"  {s.bytes / MEGABYTE:.3g} MB: {len(s.names)} parameters of {s.span}" for s in shown]
    if len(shown) < len(segments):
        lines.insert(6, f"  ... {len(segments) - len(shown)} more")
    segmented = "\n".join([f"segments: {len(segments)}", *lines]) + "\n"
    return _counts(sizes) + pipeline_outline(config, sizes) + segmented + not_compared


def _check_saved(config: Config, sizes: Sizes) -> str:
    """Refuse a checkpoint of another model, schedule, tokenizer or data, before any rank is started.

    What could not be compared, as a line for people.
    """
    saved = config.checkpoint
    if saved.load is None or config.runtime.rules_only:
        return ""
    if (found := stored_facts(Path(saved.load), saved.ckpt_step)) is None:
        return ""
    folder, facts = found
    alone = saved.finetune or stored_schedule(folder) is None
    complaints = []
    if apart := differences(facts, fitted(facts, sizes.facts(), alone=alone).facts):
        message = f"--load {saved.load}: {folder.name} is a checkpoint of another model: {apart}."
        fix = "Give the flags that it was trained with, or the folder of another run."
        complaints.append(Complaint("checkpoint-model", message, fix))
    trained = None if alone or saved.no_load_optim else stored_schedule(folder)
    if trained is not None and not config.optimizer.override_opt_param_scheduler:
        other = another_schedule(trained, make_learning_rate(config).to_dict())
        if other is not None:
            message = f"--load {saved.load}: {folder.name} was trained on another learning-rate schedule: {other[0]}."
            complaints.append(Complaint("checkpoint-schedule", message, other[1]))
    others, not_compared = ([], "") if alone else another_run(config, folder)
    if complaints or others:
        raise ConfigError([*complaints, *others])
    return not_compared


def _counts(sizes: Sizes) -> str:
    total, active = parameter_counts(sizes)
    passed = "" if active == total else f", of which a token passes {billions(active)}"
    every = sum(row.numel for row in table_of(sizes) if row.trainable)
    ahead = "" if every == total else f"\nmulti-token prediction: {billions(every - total)} more, in training only"
    return f"parameters: {billions(total)}{passed}{ahead}\n"
