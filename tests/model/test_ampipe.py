"""Slices through whole models: the order of launches and waits, gradients on two ranks, hooks, causality, lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.accounts import CommBytes
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.base import Device
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.choice import Interval
from megapar.core.sharding.cut import box_at
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.model.attention.slices import CausalSlices, PrefixBuffer
from megapar.model.layers.context import Context
from megapar.model.spec import table_of
from megapar.moe.slicing import Slicing
from tests.model.small import BIASED_MOE, MOE, batch_for, build, total
from tests.support.lazy import LazyDevice
from tests.support.nodes import axis_by_node
from tests.support.ranks import run_ranks
from tests.support.traffic import RecordedTraffic

TWO = replace(MOE, first_k_dense=0, num_layers=2, moe=replace(MOE.moe, shared_experts=0))


def step_on(ahead, step):
    """What ``step`` makes of a device: the CPU, or one whose host runs ahead, where dispatches are issued late."""
    if not ahead:
        return step(Device())
    with LazyDevice() as device:
        found = step(device)
        device.settle()
    return found


def dispatch_or_combine(x):
    return "D" if x.shape[1] > TWO.hidden_size else "C"


class Diary(RecordedTraffic):
    """Notes D dispatch and C combine, with numbers of layer and slice. back: which way."""

    def __init__(self, slices, layers, device):
        super().__init__(device)
        self.back = False
        self._count, self._all, self._slices = Counter(), slices * layers, slices

    def note(self, what):
        number = self._count[what, self.back]
        self._count[what, self.back] += 1
        number = self._all - 1 - number if self.back else number
        return f"{what}{number // self._slices}.{number % self._slices}"

    def name_of(self, exchange, x):
        return self.note(dispatch_or_combine(x)) if exchange.kind == "all_to_all" else None

    def watch(self, module, name):
        """Note each call of the module, and the arrival of the gradient of what it returned."""

        def called(_, __, output):
            self.events.append(self.note(name))
            output.register_hook(lambda grad: self.events.append(self.note(name)))

        module.register_forward_hook(called)

    def watch_experts(self, experts, name):
        """The same of every slice that the experts compute."""
        compute = experts.compute

        def called(*inputs):
            output = compute(*inputs)
            self.events.append(self.note(name))
            output.register_hook(lambda grad: self.events.append(self.note(name)))
            return output

        experts.compute = called


def drawn(slices, layers, cross, late):
    """The drawing of the program: events of a forward, in program order, or as issued by a host that runs ahead."""
    events = []
    for layer in range(layers):
        for c in range(slices):
            events += [f"C{layer - 1}.{c}v"] if cross and layer else []
            events += [f"attn{layer}.{c}"]
            events += [f"D{layer}.{c}^"] if not late else [f"D{layer}.{c - 1}^"] if c else []
        events += [f"D{layer}.{slices - 1}^"] if late else []
        for c in range(slices):
            events += [f"D{layer}.{c}v", f"exp{layer}.{c}", f"C{layer}.{c}^"]
        if not cross or layer == layers - 1:
            events += [f"C{layer}.{c}v" for c in range(slices)]
    return events


def mirrored(events):
    turned = {"^": "v", "v": "^"}
    return [event[:-1] + turned[event[-1]] if event[-1] in turned else event for event in reversed(events)]


def ep_of(rank, world_size):
    return axis_by_node(rank, world_size, 0)


def recorded(rank, world_size, slicing, ahead, node):
    """(forward, backward, launched, host waits) of a step. node: as ``axis_by_node``."""
    return step_on(ahead, partial(recorded_on, rank, world_size, slicing, node))


def recorded_on(rank, world_size, slicing, node, device):
    diary = Diary(slicing.degree, TWO.num_layers, device)
    ep = axis_by_node(rank, world_size, node)
    model = build(TWO, dtype=torch.float64, ep=ep, execution=Execution(comm=diary), slicing=slicing)
    for block in model.layers.values():
        diary.watch(block.attention.proj, "attn")
        diary.watch_experts(block.moe.experts, "exp")
    loss = total(model, batch_for(TWO, seed=rank))
    forward, diary.events, diary.back = diary.events, [], True
    loss.backward()
    diary.check_settled()
    return forward, diary.events, dict(diary.launched), diary.host_waits


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(("degree", "node"), [(2, 0), (4, 0), (2, 2)])
def test_launches_and_waits_are_those_of_the_drawing(degree, node, cross, ahead):
    """Whatever the host issues when, the backward is the mirror of the program; two hops by node are drawn as one."""
    backend = "late" if ahead else "gloo"  # gloo itself reads what its launch's stream has still to write
    slicing = Slicing(degree, cross_layer=cross)
    for forward, backward, launched, waits in run_ranks(
        2 * (node or 1), recorded, slicing, ahead, node, backend=backend
    ):
        assert forward == drawn(degree, 2, cross, ahead)
        assert backward == mirrored(drawn(degree, 2, cross, False))
        assert launched == {"all_to_all": 4 * degree * 2, "counts": degree * 2}
        assert waits == degree * 2


class Lanes(RecordedTraffic):
    """Notes D dispatch and C combine over ep, g all-gather and r reduce-scatter over mp."""

    def name_of(self, exchange, x):
        names = {"all_to_all": dispatch_or_combine(x), "all_gather": "g", "reduce_scatter": "r"}
        return names.get(exchange.kind)


def hidden_over_mp(rank, world_size, slicing):
    """(forward, backward) of a step where two ranks share positions and heads, and have whole experts."""
    lanes, ranks = Lanes(), tuple(range(world_size))
    axes = {name: Axis(name, world_size, rank, dist.group.WORLD, ranks) for name in ("mp", "ep")}
    execution = Execution(overlap=Overlap(pieces=1), comm=lanes)
    model = build(TWO, dtype=torch.float64, **axes, sequence_parallel=True, execution=execution, slicing=slicing)
    attend = CausalSlices.attend

    def noted(slices, number):
        lanes.events.append(f"attn{number}")
        attend(slices, number)
        slices._attended[number].register_hook(lambda _: lanes.events.append(f"attn{number}"))

    with patch.object(CausalSlices, "attend", noted):
        loss = total(model, batch_for(TWO, seed=0))
        forward, lanes.events = lanes.events, []
        loss.backward()
    lanes.check_settled()
    return " ".join(forward), " ".join(lanes.events)


def drawn_over_mp(slices, layers, cross):
    """The drawing of ``model.ampipe``, forward and backward."""
    forward, backward, last = [], [], slices - 1
    for layer in range(layers):
        here, back = not (cross and layer), []  # back: the layer's backward, the other way round
        for c in range(slices):
            forward += ([] if here or c else ["Cv"]) + (["gv"] if c else ["g^", "gv"]) + (["rv", "D^"] if c else [])
            back += ([] if here or c else ["C^"]) + (["r^", "gv", "g^"] if c else ["rv", "gv", "r^", "g^"])
            back += ["g^", "Dv"] if c else []
            arrives, leaves = (["g^"], ["rv"]) if here else (["Cv", "g^"], ["C^", "rv"])
            arrives, leaves = (arrives, leaves) if c < last else ([], [])
            forward += [*arrives, f"attn{c}"] if here else [f"attn{c}", *arrives]
            back += [*leaves, f"attn{c}"] if here else [f"attn{c}", *leaves]
            forward += ["r^"] if c < last else ["r^", "rv", "D^"]
            back += ["gv"] if c < last else ["gv", "g^", "Dv"]
        together = [] if cross and layer < layers - 1 else ["Cv"] * slices
        forward += ["Dv", "C^"] * slices + together
        back += ["D^", "Cv"] * slices + ["C^"] * len(together)
        backward = back[::-1] + backward
    return " ".join(forward), " ".join(backward)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
def test_what_attention_needs_over_mp_flies_under_other_slices(degree, cross):
    """All but a layer's first all-gather and last reduce-scatter, and the same in the backward."""
    slicing = Slicing(degree, cross_layer=cross, overlap_mp=True)
    for found in run_ranks(2, hidden_over_mp, slicing):
        assert found == drawn_over_mp(degree, 2, cross)


class Unnumbered(Diary):
    """Writes down what travels, without numbers: a slice's rows go to the experts again in a recomputation."""

    def note(self, what):
        return what

    def launch(self, exchange, x, aside=False):
        flight = super().launch(exchange, x, aside)
        if flight.work is None and id(flight) in self._names:  # a combine that is not sent again
            del self._names[id(flight)]
            self.events.pop()
        return flight


def recomputed(rank, world_size, slicing, layers, ahead):
    """(gradients, what a backward launches and waits for, launched, host waits) with so many layers in a unit."""
    return step_on(ahead, partial(recomputed_on, rank, world_size, slicing, layers))


def recomputed_on(rank, world_size, slicing, layers, device):
    diary = Unnumbered(slicing.degree, TWO.num_layers, device)
    model = build(
        TWO, dtype=torch.float64, ep=ep_of(rank, world_size), execution=Execution(comm=diary), slicing=slicing
    )
    model.recompute = Recompute(Interval(layers), diary, CommBytes()) if layers else None
    loss = total(model, batch_for(TWO, seed=rank))
    diary.events = []
    loss.backward()
    diary.check_settled()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, " ".join(diary.events), dict(diary.launched), diary.host_waits


# A unit of one layer and two slices: gradients of combines leave, the unit runs again while they travel (its slices go
# to the experts, but not back), then its backward.
AGAIN = "C^ C^ D^ D^ Dv Dv Cv D^ Cv D^ Dv Dv"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("layers", "sent"), [(1, (5, 5)), (2, (6, 5))])
@pytest.mark.parametrize("cross", [False, True])
def test_a_recomputed_unit_sends_no_counts_and_not_its_last_combine(cross, layers, sent, ahead):
    """All-to-alls per slice: 5 in a unit's last layer, 6 in the others; the host waits in the forward only."""
    for degree in (2, 4):
        slicing = Slicing(degree, cross_layer=cross)
        kept = run_ranks(2, recomputed, slicing, 0, ahead, backend="late")
        results = run_ranks(2, recomputed, slicing, layers, ahead, backend="late")
        for (grads, events, launched, waits), (want, *_) in zip(results, kept, strict=True):
            assert launched == {"all_to_all": sum(sent) * degree, "counts": degree * 2}
            assert waits == degree * 2
            assert all(torch.equal(grads[name], grad) for name, grad in want.items())
            if degree == 2 and not cross and layers == 1:
                assert events == f"{AGAIN} {AGAIN}"


def stepped(rank, world_size, sizes, slicing, ahead, padded):
    """Gradients of the sum over both ranks' batches, how often each parameter's hook fired, logits of an evaluation."""
    return step_on(ahead, partial(stepped_on, rank, world_size, sizes, slicing, padded))


def stepped_on(rank, world_size, sizes, slicing, padded, device):
    comm = CommContext(device=device)
    model = build(
        sizes, dtype=torch.float64, ep=ep_of(rank, world_size), execution=Execution(comm=comm), slicing=slicing
    )
    fired = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    total(model, batch_for(sizes, seed=rank, padded=padded)).backward()
    comm.check_settled()
    model.eval()
    with torch.no_grad():
        logits = model.logits(batch_for(sizes, seed=rank, padded=padded))
    comm.check_settled()
    grads = {}
    for row in table_of(sizes):
        if row.trainable:
            grads[row.name] = model.get_parameter(row.name).grad
            if not row.expert:
                dist.all_reduce(grads[row.name])
    return grads, set(fired.values()), logits


CASES = {
    "d 2": (MOE, Slicing(2), False, False),
    "d 3, cross-layer, ahead, padding": (MOE, Slicing(3, cross_layer=True), True, True),
    "d 4, balanced, biases": (BIASED_MOE, Slicing(4, balanced=True), False, True),
    "d 2, pieces, ahead": (MOE, Slicing(2, expert_pieces=2), True, False),
}


def backends(case):
    """A host that runs ahead needs the late backend, which knows of streams."""
    return ("late",) if case[2] else ("gloo", "late")


@pytest.mark.parametrize(("name", "backend"), [(name, each) for name, case in CASES.items() for each in backends(case)])
def test_two_ranks_equal_one_and_hooks_fire_once(name, backend):
    sizes, slicing, ahead, padded = CASES[name]
    model = build(sizes, dtype=torch.float64)
    batches = [batch_for(sizes, seed=rank, padded=padded) for rank in range(2)]
    sum(total(model, batch) for batch in batches).backward()
    model.eval()
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    results = run_ranks(2, stepped, sizes, slicing, ahead, padded, backend=backend)
    for rank, (grads, fired, logits) in enumerate(results):
        assert fired == {1}
        with torch.no_grad():
            assert torch.allclose(logits, model.logits(batches[rank]), rtol=0, atol=1e-12)
        for row in table_of(sizes):
            if row.trainable:
                expected = model.get_parameter(row.name).grad[box_at(row, {"ep": (2, rank)}).slices]
                difference = float((grads[row.name] - expected).abs().max())
                assert difference <= 1e-9 * max(float(expected.abs().max()), 1e-6 * largest), row.name


@pytest.mark.parametrize("cross", [False, True])
def test_no_position_sees_a_later_one(cross):
    """Dropless: nothing but attention connects positions."""
    model = build(MOE, dtype=torch.float64, slicing=Slicing(3, cross_layer=cross))
    batch = batch_for(MOE)
    before = model.logits(batch).detach()
    for position in (0, 5, 6, 15):
        changed = {**batch, "tokens": batch["tokens"].clone()}
        changed["tokens"][:, position] = (changed["tokens"][:, position] + 1) % MOE.vocab_size
        after = model.logits(changed).detach()
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


def test_a_second_length_and_an_evaluation_in_one_process():
    whole, sliced = build(MOE, dtype=torch.float64), build(MOE, dtype=torch.float64, slicing=Slicing(4))
    batch = batch_for(MOE)
    for length in (16, 11, 4, 16):
        short = {name: tensor[:, :length] for name, tensor in batch.items()}
        a, b = total(whole, short), total(sliced, short)
        assert float((a - b).detach().abs()) < 1e-10
        sliced.eval()
        with torch.no_grad():
            assert float((total(sliced, short) - a).detach().abs()) < 1e-10
        sliced.train()
    with pytest.raises(ValueError, match="3 positions on 1 ranks cannot be cut into 4 slices"):
        total(sliced, {name: tensor[:, :3] for name, tensor in batch.items()})


def test_dropout_trains_and_repeats():
    """Masks belong to slices; the same seed gives the same numbers, another one others."""
    sizes = replace(MOE, attention_dropout=0.3, hidden_dropout=0.2)
    model = build(sizes, dtype=torch.float64, slicing=Slicing(2, cross_layer=True))
    batch, losses = batch_for(sizes), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(total(model, batch).detach()))
    assert losses[0] == losses[1] != losses[2]
    model.eval()
    assert float(total(model, batch).detach()) == pytest.approx(
        float(total(build(MOE, dtype=torch.float64).eval(), batch).detach()), rel=1e-12
    )


def test_masks_are_those_of_a_place():
    """Pieces of one slice draw what the whole draws, and slices the same whether or not they pass between layers."""
    sizes, batch = replace(MOE, attention_dropout=0.3, hidden_dropout=0.2), batch_for(MOE)
    losses = []
    for slicing in (Slicing(), Slicing(expert_pieces=2), Slicing(2), Slicing(2, cross_layer=True)):
        model = build(sizes, dtype=torch.float64, slicing=slicing)
        torch.manual_seed(1)
        losses.append(float(total(model, batch).detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[3] == pytest.approx(losses[2], rel=1e-12)
    assert losses[2] != pytest.approx(losses[0], rel=1e-6)


def test_nothing_of_a_slice_is_copied_for_the_keys_of_later_ones():
    """Under cross-layer slicing keys grow in one buffer: what all slices keep of it shares one storage."""
    slices = Slicing(4).cut(16)
    model = build(replace(MOE, position_embedding_type="learned"), dtype=torch.float64)
    context = Context(
        DeviceMask(AttentionMask(2, 16, causal=True)), None, 32, slices=slices, own_slices=slices, whole_slices=slices
    )
    run = CausalSlices(model.layers["0"].attention, context)
    x = torch.randn(2, 16, MOE.hidden_size, dtype=torch.float64)
    storages = set()
    for number, place in enumerate(slices):
        run.enter(x[:, place])
        run.project(number)
        run.attend(number)
        run.leave(number)
        run.finish(number)
        storages.update(seen._buffer.untyped_storage().data_ptr() for seen in (run._keys, run._values))
    assert len(storages) == 2


def test_what_slices_add_to_keys_and_values_is_rounded_once():
    """In bf16 the gradients of keys, seen by every later slice, are as good as one sum in fp32 makes them."""
    slices = Slicing(8).cut(64)
    keys = torch.randn(1, 64, 1, 4, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    for growing in (PrefixBuffer(keys.data), PrefixBuffer()):
        pieces, keys.grad = keys.split(8, dim=1), None
        seen = [growing.add(piece, place, 64) for piece, place in zip(pieces, slices, strict=True)]
        assert all(torch.equal(own, keys[:, : place.stop]) for own, place in zip(seen, slices, strict=True))
        generator = torch.Generator().manual_seed(2)
        factors = [torch.randn(own.shape, generator=generator).bfloat16() for own in seen]
        sum((own * factor).float().sum() for own, factor in zip(seen, factors, strict=True)).backward()
        exact = torch.zeros(keys.shape, dtype=torch.float64)
        for factor in factors:
            exact[:, : factor.shape[1]] += factor.double()
        assert torch.equal(keys.grad, exact.bfloat16())


WIDER = replace(TWO, num_layers=4, hidden_size=64, head_dim=16, moe=replace(MOE.moe, hidden_size=64, shared_experts=0))


def kept_bytes(rank, world_size, slicing):
    """Bytes of the distinct storages, parameters aside, that a forward keeps for its backward."""
    model = build(WIDER, ep=ep_of(rank, world_size), slicing=slicing)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage, storage.nbytes())  # held, so that no other takes its address
        return tensor

    tokens = torch.randint(WIDER.vocab_size, (1, 256), generator=torch.Generator().manual_seed(rank))
    batch = {"tokens": tokens, "labels": tokens, "positions": torch.arange(256).unsqueeze(0)}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = total(model, batch)
    loss.backward()
    return sum(size for _, size in kept.values())


def test_slices_keep_no_more_than_the_whole():
    whole = run_ranks(2, kept_bytes, Slicing())
    for slicing in (Slicing(2), Slicing(4), Slicing(4, cross_layer=True)):
        for sliced, unsliced in zip(run_ranks(2, kept_bytes, slicing), whole, strict=True):
            assert sliced <= 1.02 * unsliced, f"{slicing}: {sliced} bytes instead of {unsliced}"
