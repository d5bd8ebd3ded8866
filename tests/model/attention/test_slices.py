"""Data that stands in slices' order under sequence parallelism: from the second time on the host waits for nothing."""

from dataclasses import replace

import pytest
import torch

from megapar.core.comm.axis import Axis
from megapar.model.decoder.model import Decoder
from megapar.moe.slicing import Slicing
from tests.model.small import MOE
from tests.support.host_tensors import HostTensors

LENGTH = 16


def make(**options):
    mp, ep = Axis("mp", 2, 1, None, (0, 1)), Axis.single("ep")
    sizes = replace(MOE, vocab_size=68)
    return Decoder(sizes, mp=mp, ep=ep, emp=mp, dtype=torch.float32, device="meta", **options)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_positions_stand_by_slice_within_each_rank(sequence_parallel):
    model = make(sequence_parallel=sequence_parallel, slicing=Slicing(2))
    x = torch.arange(2 * LENGTH).view(2, LENGTH)
    arranged = model._arrange(x)
    place = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)] if sequence_parallel else list(range(LENGTH))
    assert arranged.tolist() == [place, [LENGTH + i for i in place]]


def test_the_order_is_brought_to_the_device_once():
    model = make(sequence_parallel=True, slicing=Slicing(2))
    model._arrange(torch.empty(2, LENGTH, device="meta"))
    with HostTensors() as found:
        again = model._arrange(torch.empty(2, LENGTH, device="meta"))
    assert (again.shape, found.waits) == ((2, LENGTH), {})
