import pytest
import torch

from megapar.core.comm.axis import Axis
from megapar.core.optimizer.gradient_norm import clip_gradients, global_norm
from megapar.core.sharding.master_shard import MasterShard


@pytest.mark.parametrize("votes", [(), (1, 0)])
def test_the_norm_of_offloaded_masters_stays_where_the_gradients_are(votes):
    """Masters in host memory, gradients on a device that lets nobody look: its tensors have no values."""
    shards = [MasterShard(torch.zeros(n), torch.empty(n, device="meta"), decay=True, counted=n != 3) for n in (4, 3, 5)]
    norm, told = global_norm(shards, Axis.single("world"), votes)
    assert norm.device.type == told.device.type == "meta"
    assert (norm.dtype, told.shape) == (torch.float32, (len(votes),))
    clip_gradients(shards, norm, 1.0)


def test_the_norm_counts_what_is_counted():
    """3, 4 and 12, of which the 12 is another rank's to count; votes come back as they were."""
    values = {3.0: True, 4.0: True, 12.0: False}
    shards = [
        MasterShard(torch.zeros(1), torch.tensor([x]), decay=True, counted=counted) for x, counted in values.items()
    ]
    norm, told = global_norm(shards, Axis.single("world"), (2, 0, 1))
    assert (norm.item(), told.tolist()) == (5.0, [2.0, 0.0, 1.0])
