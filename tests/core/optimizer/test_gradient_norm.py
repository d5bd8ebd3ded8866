import math

import pytest
import torch

from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device
from megapar.core.optimizer import gradient_norm
from megapar.core.optimizer.gradient_norm import clip_divisor, clip_gradients, found_nonfinite, global_norm
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.optimizer.optimizer import Optimizer
from megapar.core.optimizer.update_rule import AdamW, Sgd
from megapar.core.sharding.master_shard import MasterShard


@pytest.mark.parametrize("votes", [(), (1, 0)])
def test_the_norm_of_offloaded_masters_stays_where_the_gradients_are(votes):
    """Masters in host memory, gradients on a device that lets nobody look: its tensors have no values."""
    shards = [MasterShard(torch.zeros(n), torch.empty(n, device="meta"), decay=True, counted=n != 3) for n in (4, 3, 5)]
    norm, sums = global_norm(shards, Axis.single("world"), votes)
    assert norm.device.type == sums.device.type == "meta"
    assert (norm.dtype, sums.shape) == (torch.float32, (1 + len(votes),))
    clip_gradients(shards, norm, 1.0)


def test_the_norm_counts_what_is_counted():
    """3, 4 and 12, of which the 12 is another rank's to count; votes come back as they were."""
    values = {3.0: True, 4.0: True, 12.0: False}
    shards = [
        MasterShard(torch.zeros(1), torch.tensor([x]), decay=True, counted=counted) for x, counted in values.items()
    ]
    norm, sums = global_norm(shards, Axis.single("world"), (2, 0, 1))
    assert (norm.item(), sums.tolist()) == (5.0, [5.0, 2.0, 0.0, 1.0])


def test_an_invalid_norm_is_not_a_number_and_votes_are_summed_all_the_same():
    shards = [MasterShard(torch.zeros(1), torch.ones(1), decay=True, counted=True)]
    norm, sums = global_norm(shards, Axis.single("world"), (2,), valid=False)
    assert math.isnan(norm.item())
    assert math.isnan(sums[0].item())
    assert sums[1].item() == 2.0


def random_shards(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(2, size, generator=generator).to(dtype) for size in (7, 40, 3, 64)]
    return [MasterShard(master, grad, decay=True, counted=True) for master, grad in draws]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [0, 7, 64])
def test_the_norm_does_not_depend_on_which_kernel_takes_a_tensor(monkeypatch, dtype, elements):
    shards = random_shards(dtype)
    expected = torch.cat([shard.grad for shard in shards]).double().norm().item()
    monkeypatch.setattr(gradient_norm, "LIST_ELEMENTS", elements)
    norm, sums = global_norm(shards, Axis.single("world"))
    assert norm.item() == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-14)
    assert sums.tolist() == [norm.item()]  # the host sees the number that the device decides by


@pytest.mark.parametrize("exact", [False, True])
def test_the_norm_does_not_depend_on_the_length_of_a_shard(exact):
    """A CPU adds the squares of a tensor one after another, in its dtype: 4 M of them lose 7e-5 of the norm."""
    grad = torch.rand((1 << 22) + 3, generator=torch.Generator().manual_seed(0))
    expected = grad.double().norm().item()
    for pieces in (1, 64):  # the sum over pieces is in fp64
        shards = [MasterShard(torch.zeros(0), piece, decay=True, counted=True) for piece in grad.chunk(pieces)]
        norm = global_norm(shards, Axis.single("world"), exact=exact)[0].item()
        assert norm == pytest.approx(expected, rel=5e-7), f"{pieces} shards"


def test_sums_of_rows_keep_what_one_long_sum_loses():
    """As docs/parallelism.md has it, of 16 M elements: torch's sum of all squares loses 5e-4."""
    grad = torch.rand(1 << 24, generator=torch.Generator().manual_seed(0))
    expected = grad.double().norm().item()
    norm = global_norm([MasterShard(torch.zeros(0), grad, decay=True, counted=True)], Axis.single("world"))[0].item()
    assert norm == pytest.approx(expected, rel=6e-8)  # it is rounded to fp32 at the end
    assert grad.norm().item() != pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("bad", [1.0, 0.0, 3e38, math.inf, -math.inf, math.nan])
def test_only_a_norm_that_is_not_finite_is_found(bad):
    found = found_nonfinite(torch.tensor(bad))
    assert (found.dtype, found.item()) == (torch.float32, float(not math.isfinite(bad)))


@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("rule", [AdamW((0.9, 0.95), 1e-8, 0.1), Sgd(0.9, 0.1)], ids=["adamw", "sgd"])
def test_an_optimizer_that_divides_gradients_itself_clips_them(limit, offload, rule):
    before, inside = random_shards(), random_shards()
    norm = global_norm(before, Axis.single("world"))[0]
    for shards, grad_scale in ((before, None), (inside, clip_divisor(norm, limit))):
        optimizer = OffloadedOptimizer(shards, Device(), rule) if offload else Optimizer(shards, rule)
        if grad_scale is None:
            clip_gradients(shards, norm, limit)
        optimizer.step(1e-2, grad_scale=grad_scale)
    for one, other in zip(before, inside, strict=True):
        torch.testing.assert_close(other.master, one.master, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-6, atol=0.0)  # it stores the clipped gradient
        assert limit > 1 or one.grad.norm() < 0.5


def test_an_exact_norm_does_not_depend_on_the_places_of_parts():
    """Three parts of one shard in two orders; votes and what another rank counts are as ever."""
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (40, 24, 32)]
    norms = []
    for order in ((0, 1, 2), (2, 0, 1)):
        cut = [parts[i] for i in order]
        shard = MasterShard(torch.zeros(96), torch.cat(cut), True, True, parts=tuple(len(part) for part in cut))
        other = MasterShard(torch.zeros(1), torch.full((1,), 7.0), decay=True, counted=False)
        norm, sums = global_norm([shard, other], Axis.single("world"), (3,), exact=True)
        norms.append(norm)
        assert sums.tolist() == [norm.item(), 3.0]
    assert torch.equal(*norms)
    assert norms[0].item() == pytest.approx(torch.cat(parts).norm().item(), rel=1e-6)
