"""What a stretch of a step asks of a GPU: kernels, products, bytes, waits, copies and where messages begin."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.tracing.kernels import kernels_of
from scripts.tracing.tally import LARGE_BYTES, MatrixProduct, Sums, Tally
from tests.support.ranks import run_ranks


@pytest.fixture
def tally():
    with FakeTensorMode(allow_non_fake_inputs=True), Tally("meta") as counting:
        yield counting


def on_device(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_views_and_allocations_are_no_kernels(tally):
    x = on_device(4, 8)
    y = x.view(8, 4).t()[1:].detach()
    assert tally.sums == Sums()
    (y + 1).sum()
    y.flatten().sort()
    assert tally.sums.launches == 2 + kernels_of("sort") + 1  # flatten copies what is transposed


def test_tensors_of_more_dims_than_the_kernel_takes_are_joined_by_a_copy_of_each(tally):
    torch.cat([on_device(2, 3, 4, 5)] * 3)
    assert tally.sums.launches == 1
    torch.cat([on_device(2, 3, 4, 5, 6)] * 3)
    assert tally.sums.launches == 1 + 3


def test_tensors_of_the_host_and_real_ones_are_not_counted(tally):
    torch.ones(3) + 1
    assert tally.sums.launches == 0


def test_rows_of_a_product_are_those_of_all_its_batches_and_of_a_gradient_those_it_sums_over(tally):
    x, dy, weight = on_device(128, 32), on_device(128, 64), on_device(64, 32)
    x @ weight.t()
    dy @ weight
    dy.t() @ x
    torch.bmm(on_device(7, 16, 32), on_device(7, 32, 8))
    torch.addmm(on_device(64), x, weight.t())
    found = {product for product, _ in tally.sums.products}
    assert found == {MatrixProduct(128, 64, 32), MatrixProduct(128, 32, 64), MatrixProduct(7 * 16, 8, 32)}
    assert tally.sums.smallest_product == MatrixProduct(112, 8, 32)
    assert MatrixProduct(112, 8, 32).work == 112 * 8 * 32
    assert tally.sums.bytes_outside_products == 0


def test_bytes_are_those_of_what_goes_in_and_out_once(tally):
    x = on_device(100)
    x + x
    assert tally.sums.bytes_outside_products == 400
    tally.sums = Sums()
    on_device(1, 10).expand(50, 10) * on_device(50, 10)  # ten elements are read, not five hundred
    assert tally.sums.bytes_outside_products == 2 * (10 + 500 + 500)


def test_only_the_elements_that_an_operator_needs_are_read(tally):
    x, rows = on_device(100, 8), on_device(5, dtype=torch.int64)
    x.new_zeros(10)
    torch.zeros_like(x[:3])
    assert tally.sums.bytes_outside_products == 2 * (10 + 24)
    tally.sums = Sums()
    x.index_select(0, rows)
    assert tally.sums.bytes_outside_products == 2 * 2 * 40 + 8 * 5
    tally.sums = Sums()
    torch.nn.functional.embedding_bag(rows, x, rows[:2], mode="sum")
    assert 2 * (40 + 16) + 8 * 7 <= tally.sums.bytes_outside_products < 2 * 100 * 8


def test_copies_that_hold_up_the_host_are_waits(tally):
    x = on_device(LARGE_BYTES)
    torch.empty(LARGE_BYTES, dtype=torch.bfloat16, pin_memory=False).to("meta", non_blocking=True)
    torch.empty(8).to("meta", non_blocking=True)  # CUDA takes it aside
    assert (tally.sums.waits.total(), tally.sums.copies.total()) == (1, 2)
    torch.empty(8).to("meta")
    x.to("cpu", non_blocking=True)  # nobody knows when pageable memory has it
    x[torch.tensor([1, 0])]
    torch.nonzero_static(x, size=2)
    assert (tally.sums.waits.total(), tally.sums.copies.total()) == (4, 5)


def test_a_slice_of_log_sum_exps_is_refused_where_a_kernel_ignores_strides(tally):
    q = on_device(2, 4, 6, 8)
    lse = on_device(2, 4, 12, dtype=torch.float32).narrow(2, 6, 6)
    out, _, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    with pytest.raises(ValueError, match="ignores the strides"):
        backward(out, q, q, q, out, lse, None, None, 6, 6, 0.0, False, seed, offset)
    backward(out, q, q, q, out, on_device(2, 4, 6, dtype=torch.float32), None, None, 6, 6, 0.0, False, seed, offset)


def test_differences_leave_nothing_below_zero():
    more, less = Sums(), Sums()
    more.waits["a"], less.waits["a"], less.waits["b"] = 3, 1, 2
    assert more.without(less).waits == {"a": 2}


def unaligned(rank, world_size, rendezvous, columns, start):
    """How many messages with parts that begin anywhere an exchange of rows of so many columns has."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with FakeTensorMode(), Tally("cpu") as tally:
            rows = 4096
            flat = torch.empty(2, start + rows * columns, dtype=torch.bfloat16)
            received, sent = (x[start:].view(rows, columns) for x in flat.unbind(0))
            dist.all_to_all_single(received, sent, [rows // 4] * 4, [rows // 4] * 4)
            dist.all_to_all_single(received, sent)
            dist.all_gather_into_tensor(received, sent[: rows // 4])
        return tally.sums.unaligned.total()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("columns", "start", "times"), [(64, 0, 0), (66, 0, 2), (64, 4, 3)])
def test_parts_of_large_messages_begin_at_multiples_of_16_bytes(columns, start, times):
    assert run_ranks(1, unaligned, columns, start, group=False, timeout=60)[0] == times
