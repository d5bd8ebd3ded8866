import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.arguments import FLAGS
from megapar.moe.layer import MoeLayer
from megapar.moe.sizes import MoeSizes
from tests.moe import oracle

HIDDEN, FFN, EXPERTS = 8, 12, 6


def make(dtype=torch.float64, seed=0, shared=False, **changes):
    sizes = MoeSizes(
        **{
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "num_experts": EXPERTS,
            "topk": 2,
            "min_capacity": 1,
            "shared_experts": int(shared),
            **changes,
        }
    )
    module = nn.Linear(sizes.hidden_size, sizes.hidden_size, dtype=dtype) if shared else None
    layer = MoeLayer(sizes, shared=module, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return layer


def inputs(valid, dtype=torch.float64, seed=1, shape=(3, 7)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)
    upstream = torch.randn(*shape, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)
    valid_BS = torch.ones(shape, dtype=torch.bool)
    if valid == "padded":
        valid_BS[0, 5:] = False
        valid_BS[2, 2:] = False
    if valid == "none":
        valid_BS[:] = False
    return x.requires_grad_(), upstream, valid_BS


KINDS = [
    {"kind": "megatron_moe"},
    *({"kind": "deepspeed_moe", "drop_policy": policy} for policy in FLAGS["moe_drop_policy"].choices),
]


def check_against_oracle(layer, valid):
    """Output, statistics and every gradient equal the token-by-token double."""
    x, upstream, valid_BS = inputs(valid)
    given = None if valid == "all" else valid_BS
    y, stats = layer(x, given, int(valid_BS.sum()))
    wanted_y, aux, z, load, dropped = oracle.dense(layer, x, valid_BS)
    torch.testing.assert_close(y, wanted_y, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(stats.aux, aux.to(stats.aux), rtol=1e-11, atol=0)
    torch.testing.assert_close(stats.z, z.to(stats.z), rtol=1e-11, atol=0)
    assert stats.load.tolist() == load
    assert stats.load.dtype == stats.dropped.dtype == torch.int64
    assert int(stats.dropped) == dropped
    assert (stats.over is None) is not layer.sizes.has_capacity

    leaves = [x, *layer.parameters()]
    own_loss = (y * upstream).sum() + stats.aux + 0.1 * stats.z
    loss = (wanted_y * upstream).sum() + aux + 0.1 * z
    if layer.sizes.sequence_aux:
        sequence = oracle.sequence_loss(layer, x, valid_BS)
        torch.testing.assert_close(stats.sequence, sequence, rtol=1e-11, atol=0)
        own_loss, loss = own_loss + stats.sequence, loss + sequence
    else:
        assert stats.sequence is None
    ours = torch.autograd.grad(own_loss, leaves)
    theirs = torch.autograd.grad(loss, leaves, allow_unused=True)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-9, atol=1e-12)
    return dropped


@pytest.mark.parametrize("valid", ["all", "padded"])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_equal_to_a_loop_over_tokens(kind, topk, valid):
    layer = make(topk=topk, capacity_factor=0.7, **kind)
    layer.router.correction_bias[2] = 0.05
    dropped = check_against_oracle(layer, valid)
    assert (dropped > 0) == (kind["kind"] == "deepspeed_moe")


@pytest.mark.parametrize("valid", ["all", "padded"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
@pytest.mark.parametrize(
    "routing",
    [
        *({"score": score, "sequence_aux": True} for score in FLAGS["moe_router_score_function"].choices),
        {"score": "sigmoid", "groups": 3, "group_topk": 2, "scaling": 2.5, "sequence_aux": True},
        {"norm_topk_prob": "off"},
        {"norm_topk_prob": "on", "topk": 1},
        {"norm_topk_prob": "off", "score": "sigmoid", "scaling": 2.5},
        {"norm_topk_prob": "on", "score": "sigmoid", "topk": 1},
        {"groups": 2, "group_topk": 1, "group_score_topk": 1},
        {"topk": 3, "groups": 3, "group_topk": 2, "group_score_topk": 2, "score": "sigmoid"},
    ],
    ids=lambda routing: "-".join(map(str, routing.values())),
)
def test_scores_of_groups_and_weights_as_they_are_or_divided(kind, routing, valid):
    layer = make(capacity_factor=0.7, **kind, **routing)
    layer.router.correction_bias[2] = 0.05
    check_against_oracle(layer, valid)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
@pytest.mark.parametrize("options", [{"activation": "gelu", "add_bias": True}, {"add_bias": True, "shared": True}])
def test_biases_gelu_and_shared_experts(kind, options):
    check_against_oracle(make(capacity_factor=0.7, **kind, **options), "padded")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_experts_without_tokens_and_all_tokens_to_one(kind):
    layer = make(topk=2, **kind)
    layer.router.correction_bias[:2] = 100.0
    check_against_oracle(layer, "padded")
    _, stats = layer(*inputs("padded")[::2], 14)
    assert stats.load.tolist() == [14, 14, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add_bias", [False, True])
def test_no_valid_token(kind, dtype, add_bias):
    layer = make(dtype, add_bias=add_bias, **kind)
    x, _, valid = inputs("none", dtype)
    y, stats = layer(x, valid, 0)
    (y.sum() + stats.aux + stats.z).backward()
    assert y.abs().max() == 0
    assert float(stats.aux.detach()) == float(stats.z.detach()) == 0
    assert not stats.load.any()
    for leaf in (x, *layer.parameters()):
        assert leaf.grad.abs().max() == 0


def test_an_empty_micro_batch():
    x = torch.zeros(2, 0, HIDDEN, dtype=torch.float64, requires_grad=True)
    for kind in KINDS:
        y, _ = make(**kind)(x)
        assert y.shape == x.shape


def test_bf16_grouped_path_is_near_fp64():
    exact = make()
    layer = make(torch.bfloat16)
    layer.load_state_dict(exact.state_dict())
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x, upstream, _ = inputs("all", torch.bfloat16)
    x_exact = x.detach().double().requires_grad_()
    y, stats = layer(x)
    y_exact, stats_exact = exact(x_exact)
    assert y.dtype == torch.bfloat16
    assert torch.equal(stats.load, stats_exact.load)
    y.backward(upstream)
    y_exact.backward(upstream.double())
    pairs = [(y, y_exact), (x.grad, x_exact.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters(), strict=True)]
    for got, want in pairs:
        assert (got.double() - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("valid", [None, "padded"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_no_value_is_read_by_the_host(kind, valid):
    """Fake tensors have no values: any wait for the device, forward or backward, would raise here."""
    with FakeTensorMode():
        sizes = MoeSizes(16, 32, 4, 2, add_bias=True, **kind)
        layer = MoeLayer(sizes, dtype=torch.bfloat16)  # the one dtype that grouped_mm traces
        x = torch.empty(3, 7, 16, dtype=torch.bfloat16, requires_grad=True)
        y, stats = layer(x, None if valid is None else torch.empty(3, 7, dtype=torch.bool), 21)
        (y.sum() + stats.aux + stats.z).backward()
        assert x.grad.shape == x.shape


def test_contradictions_are_refused():
    layer = make()
    x, _, valid = inputs("padded")
    with pytest.raises(ValueError, match="valid_tokens"):
        layer(x, valid)
    with pytest.raises(ValueError, match="20"):
        layer(x, None, 20)
    with pytest.raises(ValueError, match="22"):
        layer(x, valid, 22)
    with pytest.raises(ValueError, match="shared_experts is 1"):
        MoeLayer(MoeSizes(8, 16, 4, 2, shared_experts=1))
