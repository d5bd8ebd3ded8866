"""Ascend's operators as the vendor documents them, in plain torch on the CPU: same names, same schemas, same meaning.

``scripts/trace_npu.py`` holds these schemas against the real ones.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F

SCHEMAS = {
    "npu_fusion_attention": "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    "npu_fusion_attention_grad": "(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, "
    "str input_layout, *, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, "
    "Tensor? attention_in=None, float scale_value=1., float keep_prob=1., int seed=0, int offset=0, "
    "int numels=0, int sparse_mode=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-6) -> (Tensor, Tensor)",
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_rotary_mul": '(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half") -> Tensor',
    "npu_grouped_matmul": "(Tensor[] x, Tensor[] weight, *, Tensor? group_list=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0) -> Tensor[]",
    "npu_moe_token_permute": "(Tensor tokens, Tensor indices, int? num_out_tokens=None) -> (Tensor, Tensor)",
    "npu_moe_token_unpermute": "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None) -> Tensor",
}


def _scores(query, key, scale, mask, sparse_mode, before=None):
    """[N, S, D], [G, L, D] -> scaled scores [N, S, L] with what is not seen at -inf."""
    key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    scores = (query @ key.mT).float() * scale
    if mask is None:
        return scores
    assert mask.dtype == torch.bool
    if sparse_mode in (3, 4):  # lower right, or a band of it, by the compressed mask
        assert mask.shape == (2048, 2048)
        assert torch.equal(mask, torch.ones_like(mask).triu(1))
        length, seen = scores.shape[-2:]
        whole = torch.ones(length, seen, dtype=torch.bool)
        mask = whole.triu(seen - length + 1)
        if sparse_mode == 4:
            mask |= whole.tril(seen - length - before - 1)
    return scores.masked_fill(mask, -torch.inf)


def _head_first(x, layout):
    assert layout == "BSND"
    return x.transpose(1, 2)


def npu_fusion_attention(
    query, key, value, head_num, input_layout, *, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=2147483647, next_tockens=2147483647, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0,
    **unused,
):  # fmt: skip
    assert (sparse_mode == 4) == (next_tockens == 0) == (pre_tockens < 2147483647)
    assert not any(value is not None and value not in (0, 2147483647) for value in unused.values())
    assert keep_prob == 1.0
    assert query.shape[-1] == key.shape[-1] >= value.shape[-1]
    if input_layout == "TND":
        assert all(x.is_contiguous() for x in (query, key, value))
        whole, ends = query.new_full((head_num, len(query), len(key)), -torch.inf, dtype=torch.float32), [0]
        for end, first, last in zip(actual_seq_qlen, (0, *actual_seq_kvlen), actual_seq_kvlen, strict=False):
            q, k = query[ends[-1] : end].transpose(0, 1), key[first:last].transpose(0, 1)
            whole[:, ends[-1] : end, first:last] = _scores(q, k, scale, atten_mask, sparse_mode, pre_tockens)
            ends.append(end)
        y, *found = _attended(whole, value.transpose(0, 1))
        # [N, positions] of each sequence, whatever the shape says
        flat = (torch.cat([x[:, a:b].flatten() for a, b in itertools.pairwise(ends)]) for x in found)
        peak, total = (x.view(*query.shape[:2], 1).expand(-1, -1, 8).contiguous() for x in flat)
        return y.transpose(0, 1), peak, total, query.new_zeros(0), 0, 0, 0
    q, k, v = (_head_first(x, input_layout) for x in (query, key, value))
    assert q.shape[1] == head_num
    masks = [
        atten_mask[i % len(atten_mask), 0] if atten_mask is not None and atten_mask.dim() == 4 else atten_mask
        for i in range(len(q))
    ]
    scores = [_scores(*one, scale, mask, sparse_mode) for *one, mask in zip(q, k, masks, strict=True)]
    out, peak, total = _attended(torch.stack(scores), v)
    eight = (x.unsqueeze(-1).expand(*x.shape, 8).contiguous() for x in (peak, total))
    return out.transpose(1, 2), *eight, q.new_zeros(0), 0, 0, 0


class FromOutput(torch.autograd.Function):
    """Scores [.., S, L], values [.., L, V] -> [.., S, V], whose backward reads the output, as those of kernels do."""

    @staticmethod
    def forward(ctx, scores, v):
        weights = scores.softmax(-1)
        out = weights.to(v.dtype) @ v
        ctx.save_for_backward(weights, v, out)
        return out

    @staticmethod
    def backward(ctx, *grads):
        (weights, v, out), dy = ctx.saved_tensors, grads[0]
        rows = (dy.to(weights.dtype) * out).sum(-1, keepdim=True)
        return weights * ((dy @ v.mT).to(weights.dtype) - rows), weights.to(v.dtype).mT @ dy


def _attended(scores, v):
    """Scores [.., N, S, L], values [.., G, L, V] -> output, and largest score and sum of exponentials of each row."""
    peak = scores.detach().amax(-1)
    total = (scores.detach() - peak.unsqueeze(-1)).exp().sum(-1)
    return FromOutput.apply(scores, v.repeat_interleave(scores.shape[-3] // v.shape[-3], -3)), peak, total


def npu_fusion_attention_grad(
    query, key, value, dy, head_num, input_layout, *, atten_mask=None, softmax_max=None, softmax_sum=None,
    attention_in=None, scale_value=1.0, keep_prob=1.0, sparse_mode=0, **unused,
):  # fmt: skip
    assert query.shape[-1] == key.shape[-1] >= value.shape[-1] == dy.shape[-1] == attention_in.shape[-1]
    q, k, v, dy, out = (_head_first(x, input_layout) for x in (query, key, value, dy, attention_in))
    found = [[], [], []]
    for b in range(len(q)):
        shared = q.shape[1] // k.shape[1]
        scores = _scores(q[b], k[b], scale_value, atten_mask, sparse_mode)
        weights = (scores - softmax_max[b, ..., :1]).exp() / softmax_sum[b, ..., :1]
        rows = (dy[b].float() * out[b].float()).sum(-1, keepdim=True)
        products = (dy[b] @ v[b].repeat_interleave(shared, 0).mT).float()
        into = (weights * (products - rows) * scale_value).to(q.dtype)
        found[0].append(into @ k[b].repeat_interleave(shared, 0))
        for place, whole in ((1, into.mT @ q[b]), (2, weights.to(q.dtype).mT @ dy[b])):
            found[place].append(whole.unflatten(0, (-1, shared)).sum(1))
    dq, dk, dv = (torch.stack(parts).transpose(1, 2) for parts in found)
    return dq, dk, dv, dq.new_zeros(0), dq.new_zeros(0)


def npu_rms_norm(input, gamma, epsilon=1e-6):
    scale = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * scale * gamma.float()).to(input.dtype), scale


def npu_swiglu(input, dim=-1):
    gate, up = input.chunk(2, dim)
    return F.silu(gate) * up


def npu_rotary_mul(input, r1, r2, rotary_mode="half"):
    assert rotary_mode == "interleave"
    assert (r1.shape, r2.shape) == ((1, input.shape[1], 1, input.shape[3]),) * 2
    assert input.dtype == r1.dtype == r2.dtype
    turned = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    return input * r1 + turned * r2


def npu_grouped_matmul(x, weight, *, group_list=None, split_item=0, group_type=None, group_list_type=0):
    (x,), (weight,) = x, weight
    assert (group_list.dtype, group_list_type, split_item) == (torch.int64, 1, 3)
    sizes = group_list.tolist()
    if group_type == 0:
        return [torch.cat([a @ b for a, b in zip(x.split(sizes), weight, strict=True)])]
    assert group_type == 2
    return [torch.stack([a @ b for a, b in zip(x.split(sizes, 1), weight.split(sizes), strict=True)])]


def npu_moe_token_permute(tokens, indices, num_out_tokens=None):
    order = torch.sort(indices.flatten(), stable=True).indices
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return tokens[order[:num_out_tokens] // indices.shape[1]], back.to(torch.int32)


def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None):
    assert sorted_indices.dtype == torch.int32
    assert probs is not None
    return (permuted_tokens[sorted_indices.long()].unflatten(0, probs.shape) * probs.unsqueeze(-1)).sum(1)


@functools.lru_cache(maxsize=1)
def stand_in() -> torch.library.Library:
    """Register all of them, once in a process."""
    library = torch.library.Library("npu", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _as_called(name), "CompositeImplicitAutograd")
    return library


def _as_called(name):
    """Arguments by the names that the schema gives them, however they were passed."""

    @functools.wraps(globals()[name])
    def called(*args, **kwargs):
        names = [argument.name for argument in getattr(torch.ops.npu, name).default._schema.arguments]
        return globals()[name](**dict(zip(names, args, strict=False)), **kwargs)

    return called
