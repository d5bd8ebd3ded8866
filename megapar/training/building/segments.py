"""The buckets in which parameters are gathered and gradients reduced. Does not import torch.

The flags call a bucket a segment.
"""

from __future__ import annotations

from collections.abc import Sequence

from megapar.arguments import Config
from megapar.core.sharding.bucket_plan import PlanError, PlannedBucket, by_anchors, by_bytes, by_unit
from megapar.core.sharding.cut import ParameterInfo, box_at
from megapar.core.units import MEGABYTE
from megapar.errors import Complaint, ConfigError
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes
from megapar.model.spec import table_of

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def make_segments(
    config: Config, sizes: ModelSizes, table: Sequence[ParameterSpec] | None = None
) -> list[PlannedBucket]:
    """Plan the buckets of ``--sharding-segment-strategy``. Raises ConfigError for anchors that do not fit the model.

    The size of a bucket is the number of bytes that rank 0 gathers in the compute dtype. If the device chooses the
    dtype, bf16 is assumed.

    Args:
        table: Parameter table of the model; None for that of ``sizes``.
    """
    rows = [spec for spec in table or table_of(sizes) if spec.trainable]
    item = ITEM_BYTES.get(config.training.dtype, 2)
    first = {axis: (config.grid.size(axis), 0) for axis in ("mp", "ep", "emp")}  # rank 0

    def cost(row: ParameterInfo) -> int:
        return box_at(row, first).numel * (max(4, item) if row.fp32 else item)

    sharding = config.sharding
    # At stage 3 the call of a module gathers its parameters. Whole layers are needed where that does not work for parts
    # of a layer: ERNIE 3.0 calls them a different number of times on each rank, depending on its samples, and
    # overlapped gathers of mp use the attention's weights without a call.
    whole = sharding.sharding_stage == 3 and (sizes.mixes_tasks or config.ampipe.ampipe_tp_sp_comm_overlap)
    if sharding.sharding_segment_strategy == "segment_broadcast_MB":
        return by_bytes(rows, cost, sharding.segment_broadcast_mb * MEGABYTE, whole=whole)
    if sharding.sharding_segment_strategy == "segment_anchors":
        try:
            return by_anchors(rows, cost, sharding.segment_anchors, whole=whole)
        except PlanError as error:
            raise ConfigError([Complaint("segment-anchors", str(error))]) from error
    return by_unit(rows, cost)
