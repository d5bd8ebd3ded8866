import torch

from megapar.moe.stats import add_sums, count_pairs, router_losses, router_sums


def drawn(tokens=12, experts=5, topk=3, seed=0):
    logits = torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    probs = logits.softmax(1)
    return logits, probs, probs.topk(topk, dim=1).indices


def test_counts_are_per_choice_and_expert():
    experts = torch.tensor([[0, 2], [2, 1], [2, 0]])
    assert count_pairs(experts, None, 4).tolist() == [[1, 0, 2, 0], [1, 1, 1, 0]]
    assert count_pairs(experts, torch.tensor([[True], [False], [True]]), 4).tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]
    assert count_pairs(experts, torch.tensor([[True, False]] * 3), 4).tolist() == [[1, 0, 2, 0], [0, 0, 0, 0]]


def test_sums_of_slices_give_the_loss_and_the_gradient_of_the_whole():
    valid = torch.tensor([True, False] + [True] * 8 + [False, True])
    results = []
    for cuts in ([12], [5, 0, 7], [1] * 12):
        logits, probs, experts = drawn()
        pieces = zip(*(t.split(cuts) for t in (logits, probs, experts, valid)), strict=True)
        aux, z = router_losses(add_sums([router_sums(*piece) for piece in pieces]), 10)
        (gradient,) = torch.autograd.grad(aux + 0.1 * z, logits)
        results.append((aux.detach(), z.detach(), gradient))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert results[0][2][1].abs().max() == 0  # padding


def test_even_load_gives_one_and_all_on_one_expert_gives_the_number_of_experts():
    even = torch.full((8, 4), 0.25)
    spread = torch.arange(8).remainder(4)[:, None]
    assert router_losses(router_sums(even.log(), even, spread, None), 8)[0] == 1.0
    single = torch.eye(4)[torch.zeros(8, dtype=torch.long)]
    aux, _ = router_losses(router_sums(single, single, torch.zeros(8, 1, dtype=torch.long), None), 8)
    assert aux == 4.0


def test_first_choices_only():
    logits, probs, experts = drawn()
    sums = router_sums(logits, probs, experts, None)
    aux, _ = router_losses(sums, 12, first_choices_only=True)
    first = torch.bincount(experts[:, 0], minlength=5).double() / 12
    torch.testing.assert_close(aux, 5 * (probs.mean(0) * first).sum(), rtol=1e-12, atol=0)


def test_no_valid_token_gives_zero_and_zero_gradient():
    logits, probs, experts = drawn()
    aux, z = router_losses(router_sums(logits, probs, experts, torch.zeros(12, dtype=torch.bool)), 0)
    assert aux == 0
    assert z == 0
    (gradient,) = torch.autograd.grad(aux + z, logits)
    assert gradient.abs().max() == 0
