import torch

from megapar.core.device.routing import choose, score
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import MoeStats, count_pairs, over_choices, router_sums


def drawn(tokens=12, experts=5, topk=3, seed=0):
    logits = torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    probs = logits.softmax(1)
    return logits, probs, probs.topk(topk, dim=1).indices


def sums_of(logits, *rest, **more):
    return router_sums(logits.logsumexp(1), *rest, **more)


def test_z_of_a_softmax_is_that_of_the_logits():
    """Also where probabilities vanish, and for gradients of every token."""
    logits = 40 * drawn()[0].detach()
    logits.requires_grad_()
    upstream, weights = torch.randn((), dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    probs = logits.softmax(1)
    chosen = probs.topk(2, dim=1).indices
    for valid in (None, torch.arange(12) % 3 > 0):
        found = []
        for form in (lambda x: score(x, MoeSizes(8, 8, 5, 2)), lambda x: (x.softmax(1),) * 2 + (x.logsumexp(1),)):
            probs, _, lse = form(logits)
            z = router_sums(lse, probs, chosen, valid).squares
            both = z * upstream + (probs * weights).sum()
            found.append([z, probs, *torch.autograd.grad(z * upstream, logits, retain_graph=True)])
            found[-1] += torch.autograd.grad(both, logits)
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_counts_are_per_choice_and_expert():
    experts = torch.tensor([[0, 2], [2, 1], [2, 0]])
    assert count_pairs(experts, None, 4).tolist() == [[1, 0, 2, 0], [1, 1, 1, 0]]
    assert count_pairs(experts, torch.tensor([[True], [False], [True]]), 4).tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]
    assert over_choices(count_pairs(experts, None, 4)).tolist() == [2, 1, 3, 0]
    assert over_choices(count_pairs(experts, None, 4, by_choice=False)).tolist() == [2, 1, 3, 0]
    second = torch.tensor([[True], [False], [True]])
    assert count_pairs(experts, second, 4, by_choice=False).tolist() == [[2, 0, 2, 0]]
    assert count_pairs(experts, torch.tensor([[True, False]] * 3), 4).tolist() == [[1, 0, 2, 0], [0, 0, 0, 0]]


def test_losses_count_the_best_experts_by_score_where_biases_and_groups_chose_others():
    """As Megatron, ERNIE 4.5's own code and transformers do; transformers' sum is over k choices, without 1/k."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    sizes = MoeSizes(8, 8, num_experts=6, topk=2, groups=3, group_topk=1, sequence_aux=True)
    logits = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0, 0.3, 0.0], dtype=torch.float64)
    for kind, shares in (("softmax", logits.softmax(1)), ("sigmoid", logits.sigmoid())):
        shares = shares / shares.sum(1, keepdim=True)
        chosen = choose(logits.softmax(1) if kind == "softmax" else logits.sigmoid(), bias, sizes)
        sums = sums_of(logits, shares, chosen, None, 4, sizes.loss_choices)
        stats = MoeStats.of(sums, 40, 2)
        aux = stats.aux
        best = torch.zeros(6).double().scatter_add_(0, shares.topk(2).indices.flatten(), torch.ones(80).double())
        torch.testing.assert_close(aux, 6 / 2 * (shares.mean(0) * best / 40).sum(), rtol=1e-12, atol=0)
        assert sums.counts.sum(0).tolist() == torch.bincount(chosen.flatten(), minlength=6).tolist()
        by_sample = [MoeStats.of(sums_of(*(t[i : i + 10] for t in (logits, shares, chosen)), None, 0, 2), 10, 2).aux
                     for i in range(0, 40, 10)]  # fmt: skip
        torch.testing.assert_close(stats.sequence, torch.stack(by_sample).sum(), rtol=1e-12, atol=0)
        if kind == "softmax":
            theirs = load_balancing_loss_func((logits,), num_experts=6, top_k=2)
            torch.testing.assert_close(aux, theirs.double() / 2, rtol=1e-6, atol=0)


def test_without_biases_and_groups_nothing_is_counted_twice():
    assert MoeSizes(8, 8, num_experts=6, topk=2, biased=False).loss_choices == 0
    assert MoeSizes(8, 8, num_experts=6, topk=2).loss_choices == 2
    assert MoeSizes(8, 8, num_experts=6, topk=2, kind="deepspeed_moe", drop_policy="choice").loss_choices == 1
    assert MoeSizes(8, 8, num_experts=6, topk=2, groups=2, biased=False).loss_choices == 2
