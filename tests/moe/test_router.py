from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megapar.core.device.compiled import plain
from megapar.core.device.routing import SMALLEST_TOTAL, FanOut
from megapar.moe.router import Router, Routing, gate_weights, move_correction_bias
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import MoeStats, router_sums


def router(dtype=torch.float64, experts=6, topk=2, **more):
    made = Router(MoeSizes(8, 8, experts, topk, **more), dtype=dtype)
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(1))
    return made


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_computes_in_fp32_at_least(dtype, exact):
    made = router(dtype)
    routing = made(torch.randn(5, 8).to(dtype))
    assert made.weight.dtype == made.correction_bias.dtype == routing.probs.dtype == exact
    assert routing.sums.squares.dtype == exact


def test_bias_moves_the_choice_and_not_the_weights():
    made = router()
    x = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = made(x)
    made.correction_bias[3] = 10.0
    biased = made(x)
    assert (biased.experts[:, 0] == 3).all()
    assert not (plain.experts[:, 0] == 3).all()
    torch.testing.assert_close(biased.probs, plain.probs, rtol=0, atol=0)
    weights = gate_weights(biased, None, over_kept=False)
    chosen = plain.probs.gather(1, biased.experts)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True))
    assert not made.correction_bias.requires_grad


def test_a_bias_on_the_logits_moves_choices_and_weights():
    """And the statistics, as logits do. Weights are a softmax of the chosen logits."""
    made, plainly = router(linear_bias=True), router()
    x = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.nn.init.normal_(made.bias, generator=torch.Generator().manual_seed(4))
    found = made(x)
    logits = x @ made.weight.T + made.bias
    values, experts = logits.topk(2)
    assert torch.equal(found.experts, experts)
    torch.testing.assert_close(gate_weights(found, None, over_kept=False), values.softmax(1))
    torch.testing.assert_close(found.probs, logits.softmax(1))
    upstream = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    gradients = (
        torch.autograd.grad((y * upstream).sum(), [made.weight, made.bias]) for y in (found.weights, values.softmax(1))
    )
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(plainly(x).experts, experts)


def given(probs, experts):
    probs, experts = torch.tensor(probs), torch.tensor(experts)
    return Routing(probs, experts, router_sums(probs.log().logsumexp(1), probs, experts, None))


def test_weights_of_one_choice_are_raw_probabilities():
    routing = given([[0.7, 0.3], [0.4, 0.6]], [[0], [1]])
    assert gate_weights(routing, None, over_kept=True).flatten().tolist() == pytest.approx([0.7, 0.6])
    kept = torch.tensor([[True], [False]])
    assert gate_weights(routing, kept, over_kept=True).flatten().tolist() == pytest.approx([0.7, 0.0])


def test_gradients_of_renormalized_weights():
    """Against plain operators; the scores of the last token add up to less than the lower bound."""
    probs = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    probs[3] *= 1e-14
    probs.requires_grad_()
    chosen = probs.topk(3, dim=1).indices
    upstream = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weights = gate_weights(Routing(probs, chosen, None), None, over_kept=False)
    picked = probs.gather(1, chosen)
    plain = picked / picked.sum(1, keepdim=True).clamp(min=SMALLEST_TOTAL)
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    (got,), (want,) = (torch.autograd.grad(y, probs, upstream) for y in (weights, plain))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_weights_over_the_kept_and_over_the_chosen():
    routing = given([[0.5, 0.3, 0.2]] * 3, [[0, 1]] * 3)
    kept = torch.tensor([[True, True], [False, True], [False, False]])
    over_kept = gate_weights(routing, kept, over_kept=True)
    torch.testing.assert_close(over_kept, torch.tensor([[5 / 8, 3 / 8], [0, 1], [0, 0]]))
    over_chosen = gate_weights(routing, kept, over_kept=False)
    torch.testing.assert_close(over_chosen, torch.tensor([[5 / 8, 3 / 8], [0, 3 / 8], [0, 0]]))


@pytest.mark.parametrize("losses", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("padded", [False, True])
def test_shares_of_the_chosen_and_all_gradients_are_those_of_plain_operators(losses, padded):
    """Also where an expert that a bias chose has no probability to speak of."""
    made = router(topk=3)
    made.weight.data *= 20
    made.correction_bias[2] = 2.0
    x = torch.randn(9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    valid = torch.arange(9) % 4 > 0 if padded else None
    kept = None if valid is None else valid[:, None].expand(9, 3)
    upstream = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    by_expert = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

    def loss(weights, total, squares):
        value = (weights * upstream).sum()
        return value + losses[0] * (total * by_expert).sum() + (0.3 * squares if losses[1] else 0.0)

    routing = made(x, valid)
    assert routing.weights is not None
    weights = gate_weights(routing, kept, over_kept=False)
    got = loss(weights, routing.sums.probs, routing.sums.squares)
    logits = x @ made.weight.T
    probs, share = logits.softmax(1), torch.ones(9).double() if valid is None else valid.double()
    chosen = probs.gather(1, routing.experts)
    plain = chosen / chosen.sum(1, keepdim=True) * share[:, None]
    want = loss(plain, share @ probs, share @ logits.logsumexp(1).square())
    torch.testing.assert_close(weights, plain, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for a, b in zip(*(torch.autograd.grad(y, (x, made.weight)) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 1), (0,), (1, 2), (1,)])
def test_gradients_of_all_readers_are_added_with_the_router_s_unrounded(used):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(8)).bfloat16().requires_grad_()
    parts = FanOut.apply(x, torch.float32, plain)
    assert [part.dtype for part in parts] == [torch.float32, torch.bfloat16, torch.bfloat16]
    random = torch.Generator().manual_seed(9)
    grads = {number: torch.randn(5, 8, generator=random).to(parts[number].dtype) for number in used}
    (got,) = torch.autograd.grad([parts[number] for number in used], x, list(grads.values()))
    narrow = [grads[number] for number in used if number]
    total = sum(narrow[1:], narrow[0]) if narrow else torch.zeros(5, 8).bfloat16()
    torch.testing.assert_close(got, (total.float() + grads.get(0, 0.0)).bfloat16(), rtol=0, atol=0)


def test_only_a_wider_router_passes_its_input_on():
    """With the gradients of all readers: of the router, and of those of what it passes on. Its weights stay wide."""
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert router()(x).passed is None
    made, narrow = router(torch.bfloat16), x.detach().bfloat16().requires_grad_()
    routing = made(narrow)
    assert all(torch.equal(part, narrow) for part in routing.passed)
    upstream = torch.randn(5, 2, generator=torch.Generator().manual_seed(3))
    (got,) = torch.autograd.grad(
        (routing.weights, *routing.passed), narrow, (upstream, narrow.detach(), narrow.detach())
    )
    of_wide = made(wide := narrow.detach().float().requires_grad_())
    torch.testing.assert_close(routing.weights, of_wide.weights, rtol=0, atol=0)
    (own,) = torch.autograd.grad(of_wide.weights, wide, upstream)
    torch.testing.assert_close(got, (2 * narrow.detach().float() + own).bfloat16(), rtol=0, atol=0)
    with torch.no_grad():
        assert made(narrow).passed is None


def test_weights_of_all_choices_have_their_factor():
    made, x = router(topk=3, scaling=2.5), torch.randn(5, 8, dtype=torch.float64)
    routing = made(x)
    weights = gate_weights(routing, None, over_kept=False, scaling=2.5)
    torch.testing.assert_close(weights.sum(1), torch.full((5,), 2.5, dtype=torch.float64))
    raw = gate_weights(routing._replace(weights=None), None, over_kept=False, scaling=2.5)
    torch.testing.assert_close(weights, raw)


def test_without_losses_the_gradient_is_of_the_weights_alone():
    made, x = router(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    routing = made(x)
    assert router(kind="deepspeed_moe")(x).weights is None  # renormalized over the kept choices
    assert router(topk=1)(x).weights is None
    assert router(score="sigmoid")(x).weights is None
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        gate_weights(routing, None, over_kept=False)[:, 0].sum().backward()
    called = Counter(event.key for event in seen.key_averages())
    assert called["aten::scatter_add_"] == 1
    assert not called["aten::_log_softmax_backward_data"]


def test_a_token_that_lost_all_its_choices_has_a_finite_gradient():
    probs = torch.tensor([[0.5, 0.3, 0.2]], requires_grad=True)
    routing = Routing(probs, torch.tensor([[0, 1]]), None)
    gate_weights(routing, torch.tensor([[False, False]]), over_kept=True).sum().backward()
    assert probs.grad.abs().max() == 0


def test_a_bias_that_is_0_is_not_read():
    made = router(biased=False)
    x = torch.randn(5, 8, dtype=torch.float64)
    chosen = made(x).experts
    made.correction_bias.fill_(float("nan"))
    assert torch.equal(made(x).experts, chosen)


def test_correction_bias_moves_against_the_load():
    bias = torch.tensor([0.0, 0.5, 0.0])
    move_correction_bias(bias, torch.tensor([9, 3, 6]), 0.1)
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.6, 0.0]))
    move_correction_bias(bias, torch.tensor([12, 3, 3]), 0.1)  # moves that do not add up to 0
    torch.testing.assert_close(bias, torch.tensor([-0.2, 0.7, 0.1]))


def test_sigmoid_scores_are_not_normalised_but_their_sums_are():
    made = router(score="sigmoid")
    x = torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    routing = made(x)
    scores = (x @ made.weight.T).sigmoid()
    torch.testing.assert_close(routing.probs, scores)
    torch.testing.assert_close(routing.sums.probs, (scores / scores.sum(1, keepdim=True)).sum(0))
    assert routing.sums.probs.sum().item() == pytest.approx(7)
    chosen = scores.gather(1, routing.experts)
    weights = gate_weights(routing, None, over_kept=False, scaling=2.5)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(1, keepdim=True))


def test_choices_stay_in_the_best_groups():
    made = router(experts=8, topk=2, groups=4, group_topk=1)
    # Groups (0 1) (2 3) (4 5) (6 7): the best expert is 7, the best pair is (2, 3).
    scores = torch.tensor([[0.1, 0.1, 0.5, 0.6, 0.3, 0.3, 0.0, 0.9]], dtype=torch.float64)
    assert made.choose(scores).tolist() == [[3, 2]]
    two = router(experts=8, topk=2, groups=4, group_topk=2)
    assert two.choose(scores).tolist() == [[7, 3]]
    two.correction_bias[4] = 1.0
    assert two.choose(scores).tolist() == [[4, 7]]


def test_orthogonal_loss_by_hand_and_its_gradient_shared_by_copies():
    made = router(experts=3, orthogonal=True)
    with torch.no_grad():
        made.weight.zero_()
        made.weight[0, 0], made.weight[1, 0], made.weight[2, 5] = 2.0, 3.0, -1.0
    # Rows 0 and 1 are parallel, row 2 is orthogonal to both: two of nine entries are 1 off.
    assert made(torch.zeros(1, 8, dtype=torch.float64)).orthogonal.item() == pytest.approx(2 / 9)
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(1))
    (whole,) = torch.autograd.grad(made.orthogonal_loss(), made.weight)
    made.copies = 3
    value = made.orthogonal_loss()
    (part,) = torch.autograd.grad(value, made.weight)
    torch.testing.assert_close(3 * part, whole)
    made.copies = 1
    torch.testing.assert_close(value, made.orthogonal_loss())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_logits_of_30_are_routed_and_counted_as_in_fp64(score, padded, dtype):
    """Unit vectors, whose products are exact. The sigmoids of the second token add up to less than the lower bound."""
    made = Router(MoeSizes(8, 8, 6, 2, score=score, sequence_aux=True, scaling=2.5), dtype=dtype)
    logits = 60 * torch.rand(8, 6, generator=torch.Generator().manual_seed(1)) - 30
    logits[0], logits[1] = torch.tensor([30.0, -30, 29, -29, 0, 1]), torch.tensor([-30.0, -31, -29, -33, -32, -34])
    made.weight = torch.nn.Parameter(logits.t().contiguous())
    valid = torch.arange(8) % 4 < 3 if padded else None
    routing = made(torch.eye(8, dtype=dtype), valid, samples=2)
    weights = gate_weights(routing, None, over_kept=False, scaling=2.5)
    share = torch.ones(8).double() if valid is None else valid.double()
    stats = MoeStats.of(routing.sums, int(share.sum()), 2)

    exact = logits.double().requires_grad_()
    lse = (exact - exact.amax(1, keepdim=True)).exp().sum(1).log() + exact.amax(1)
    scores = (exact - lse[:, None]).exp() if score == "softmax" else 1 / (1 + (-exact).exp())
    chosen = scores.gather(1, routing.experts)
    torch.testing.assert_close(chosen, scores.topk(2).values, rtol=1e-12, atol=0)
    want = 2.5 * chosen / chosen.sum(1, keepdim=True).clamp(min=1e-12)
    shares = scores / scores.sum(1, keepdim=True).clamp(min=1e-12) * share[:, None]
    pairs = torch.zeros(8, 6).double().scatter_(1, routing.experts, 1.0) * share[:, None]
    of_samples = [
        6 / 2 * (s.sum(0) * p.sum(0)).sum() / n.sum() ** 2
        for s, p, n in zip(shares.split(4), pairs.split(4), share.split(4), strict=True)
    ]
    aux = 6 / 2 * (shares.sum(0) * pairs.sum(0)).sum() / share.sum() ** 2
    losses = (aux, (lse.square() * share).sum() / share.sum(), sum(of_samples))
    up = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
    found = (weights * up, stats.aux, stats.z, stats.sequence)
    for got, wanted in zip(found, (want * up, *losses), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=3e-6, atol=1e-8)
        (into,) = torch.autograd.grad(got.sum(), made.weight, retain_graph=True)
        (expected,) = torch.autograd.grad(wanted.sum(), exact, retain_graph=True)
        torch.testing.assert_close(into.t().double(), expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))
