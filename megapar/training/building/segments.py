"""The plan of the segments that parameters are gathered and reduced in, from a configuration. No torch."""

from __future__ import annotations

from megapar.arguments import Config
from megapar.core.sharding.bucket_plan import PlanError, PlannedBucket, by_anchors, by_bytes, by_unit
from megapar.core.sharding.cut import ParameterInfo, local_box
from megapar.core.units import MEGABYTE
from megapar.errors import Complaint, ConfigError
from megapar.model.sizes import ModelSizes
from megapar.model.spec import table_of

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def make_segments(config: Config, sizes: ModelSizes) -> list[PlannedBucket]:
    """The plan of ``--sharding-segment-strategy``. Raises ConfigError for anchors that do not fit the model.

    Bytes are those that rank 0 gathers in the compute dtype; where the device is to choose that, bf16 is assumed.
    """
    rows = [spec for spec in table_of(sizes) if spec.trainable]
    item = ITEM_BYTES.get(config.training.dtype, 2)

    def cost(row: ParameterInfo) -> int:
        return local_box(row, config.grid, 0).numel * (max(4, item) if row.fp32 else item)

    sharding = config.sharding
    # At stage 3 a part of a layer is gathered by its call. ERNIE 3.0 calls the parts of a layer as often as a rank's
    # samples ask for, and hidden gathers of mp take the attention's weights without a call.
    whole = sharding.sharding_stage == 3 and (sizes.mixes_tasks or config.ampipe.ampipe_tp_sp_comm_overlap)
    if sharding.sharding_segment_strategy == "segment_broadcast_MB":
        return by_bytes(rows, cost, sharding.segment_broadcast_mb * MEGABYTE, whole=whole)
    if sharding.sharding_segment_strategy == "segment_anchors":
        try:
            return by_anchors(rows, cost, sharding.segment_anchors, whole=whole)
        except PlanError as error:
            raise ConfigError([Complaint("segment-anchors", str(error))]) from error
    return by_unit(rows, cost)
