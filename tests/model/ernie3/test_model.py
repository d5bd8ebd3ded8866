"""ERNIE 3.0: its table, its branches, and the memory of its segments against a plain double."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.pipeline.stages import Stages
from megapar.data.sampling.samples import RandomPieces
from megapar.data.tasks.build import TaskData, collate_tasks
from megapar.data.tokenizers.tokenizer import MockTokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.model.ernie3.model import BranchLayer, Ernie3, UniversalBlock
from megapar.model.ernie3.recurrence import Branch, BranchContext, generate, understand
from megapar.model.ernie3.sizes import TASKS, Ernie3Sizes
from megapar.model.spec import parameter_counts, table_of
from tests.model.small import initialize, named_tensors, shift_norms

SIZES = Ernie3Sizes(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=48,
    vocab_size=67,
    seq_length=16,
    max_position_embeddings=16,
    task_type_vocab_size=5,
    task_layers=2,
    task_hidden_size=24,
    task_heads=4,
    task_ffn_hidden_size=40,
    segments=2,
    memory=4,
    init_std=0.1,
)
MIXTURE = "knowledge_mlm:1,document_lm:1,sentence_reorder:1,sentence_distance:1,knowledge_text:1"


def build(sizes: Ernie3Sizes = SIZES, dtype: torch.dtype = torch.float64) -> Ernie3:
    model = Ernie3(sizes, mp=Axis.single("mp"), dtype=dtype)
    table = [replace(row, init="normal") for row in table_of(sizes)]
    initialize(model, table, {"mp": (1, 0)}, seed=1, init_std=sizes.init_std)
    shift_norms(model)
    return model


def samples(numbers: list[int], length: int = 16):
    tokenizer = MockTokenizer(67)
    sides = (RandomPieces(tokenizer.ordinary_ids, 7, length - 3, 1, side) for side in ("train", "heldout"))
    train = TaskData(MIXTURE).samples(TrainHeldout(*sides), tokenizer, length, 1, Split.parse("95,5")).train
    return [train[number] for number in numbers]


def batch(numbers: list[int]) -> dict[str, Tensor]:
    return collate_tasks(samples(numbers), TASKS).tensors


@pytest.mark.parametrize("tasks", [TASKS, ("document_lm",), ("knowledge_mlm", "sentence_distance")])
def test_table_equals_the_module_tree(tasks: tuple[str, ...]) -> None:
    sizes = replace(SIZES, tasks=tasks)
    model = build(sizes)
    rows = {row.name: row.shape for row in table_of(sizes)}
    assert rows == {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
    by_unit = {
        id(parameter): unit
        for unit, modules in model.units().items()
        for module in modules
        for parameter in module.parameters()
    }
    named = dict(model.named_parameters())
    assert {row.name: row.unit for row in table_of(sizes)} == {name: by_unit[id(p)] for name, p in named.items()}


def test_published_counts() -> None:
    common = {"vocab_size": 40000, "seq_length": 512, "max_position_embeddings": 512, "task_type_vocab_size": 5}
    small = Ernie3Sizes(num_layers=48, hidden_size=4096, num_attention_heads=64, ffn_hidden_size=16384, **common)
    titan = Ernie3Sizes(num_layers=48, hidden_size=12288, num_attention_heads=192, ffn_hidden_size=196608, **common)
    assert parameter_counts(small)[0] == pytest.approx(10e9, rel=0.02)
    assert parameter_counts(titan)[0] == pytest.approx(260.9e9, rel=0.02)


def test_every_parameter_learns_from_the_mixture_and_nothing_is_asked_of_absent_tasks() -> None:
    model = build()
    terms = model(batch(list(range(10))))
    assert set(terms.sums) == {*TASKS, "sentence_reorder_accuracy", "sentence_distance_accuracy"}
    sum(value for name, value in terms.sums.items() if name in TASKS).backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or float(p.grad.abs().sum()) == 0}
    assert silent == set()

    model.zero_grad()
    words = build()
    alone = [n for n, sample in enumerate(samples(list(range(10)))) if TASKS[int(sample["task"])] == "document_lm"][:1]
    terms = words(batch(alone))
    assert all(float(value) == 0 for name, value in terms.sums.items() if name != "document_lm")
    sum(value for name, value in terms.sums.items() if name in TASKS).backward()
    assert all(p.grad is not None for p in words.parameters())  # zero, so that ranks agree on what they reduce
    assert float(words.layers["2"].understanding.attention.qkv.weight.grad.abs().sum()) == 0
    assert float(words.layers["2"].generation.attention.qkv.weight.grad.abs().sum()) > 0


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    model = build()
    together = model(batch([0, 1, 2, 3, 4, 5, 6])).sums
    apart = [model(batch([number])).sums for number in range(7)]
    for task in TASKS:
        torch.testing.assert_close(together[task], sum(sums[task] for sums in apart), rtol=1e-11, atol=1e-13)


def test_generation_sees_nothing_ahead_and_understanding_everything() -> None:
    model = build()
    data = batch(list(range(10)))
    plain = model._run(data)
    changed = {**data, "tokens": data["tokens"].clone()}
    valid = data["valid"].all(0).nonzero().max().item()
    changed["tokens"][:, valid] = (changed["tokens"][:, valid] + 1) % 67
    moved = (plain != model._run(changed)).any(-1)
    assert not moved[data["generation"], :valid].any()
    assert moved[data["generation"], valid].all()
    assert moved[data["understanding"], 0].all()


def test_memory_is_the_same_layers_last_segment_without_gradient() -> None:
    model = build()
    block = model.layers["0"]
    assert isinstance(block, UniversalBlock)
    x = torch.randn(2, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    valid = torch.ones(2, 16, dtype=torch.bool)
    valid[1, 6:] = False
    rows = torch.arange(2)
    slices = (slice(0, 8), slice(8, 16))
    mask = DeviceMask(AttentionMask(2, 16, causal=False, padded=True), valid)
    context = BranchContext(mask, None, 32, slices=slices, own_slices=slices)
    first, second = x[:, :8].clone().requires_grad_(), x[:, 8:].clone().requires_grad_()
    y = generate(block, torch.cat((first, second), dim=1), Branch.generation(rows, valid, slices, 4), context)

    def attend(queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        weight, bias = block.attention.qkv.weight, block.attention.qkv.bias
        q = torch.einsum("bsh,ndh->bnsd", queries, weight[:, 0]) + bias[:, 0][None, :, None]
        k, v = (torch.einsum("bsh,ndh->bnsd", keys, weight[:, i]) + bias[:, i][None, :, None] for i in (1, 2))
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~seen, -torch.inf)
        return block.attention.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def layer(queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        middle = block.attention_norm(queries + attend(queries, keys, seen))
        return block.mlp_norm(middle + block.mlp(middle))

    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    y0 = layer(first, first, causal)
    memory = y0[:, -4:].detach()
    before = valid[:, 4:8][:, None, None, :].expand(2, 1, 8, 4)
    y1 = layer(second, torch.cat((memory, second), dim=1), torch.cat((before, causal.expand(2, 1, 8, 8)), dim=-1))
    torch.testing.assert_close(y, torch.cat((y0, y1), dim=1), rtol=1e-11, atol=1e-12)
    (gradient,) = torch.autograd.grad(y[:, 8:].sum(), first, allow_unused=True)
    assert gradient is None or float(gradient.abs().max()) == 0
    whole = understand(block, x, Branch.understanding(rows, valid, 16), context)
    torch.testing.assert_close(whole, layer(x, x, valid[:, None, None]), rtol=1e-11, atol=1e-12)


def test_chunks_of_a_pipeline_know_the_branches() -> None:
    model = build()
    stages = Stages.of((0, 2, 3), 4, 3)
    assert [model.width_into(chunk) for chunk in stages.chunks] == [32, 32, 24]
    data, x = batch(list(range(5))), None
    for chunk in stages.chunks:
        x, terms = model.run_chunk(chunk, x, data)
    whole = model(data)
    for task in TASKS:
        assert float(terms.sums[task]) == pytest.approx(float(whole.sums[task]), rel=1e-12)
    assert isinstance(model.layers["3"], BranchLayer)
    assert model.layers["3"].understanding_proj is None


def test_accuracy_counts_right_answers() -> None:
    head = build().heads.get_submodule("sentence_distance")
    pooled = torch.randn(6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = F.linear(pooled, head.weight, head.bias)
    labels = logits.argmax(1)
    labels[:2] = (labels[:2] + 1) % 3
    loss, right = head(pooled, labels)
    assert int(right) == 4
    assert not right.requires_grad
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")))


def test_dropout_grows() -> None:
    model = build(replace(SIZES, hidden_dropout=0.5, attention_dropout=0.5)).train()
    data = batch(list(range(5)))
    still = build()(data).sums["document_lm"]
    model.scale_dropout(0.0)
    torch.testing.assert_close(model(data).sums["document_lm"], still)
    model.scale_dropout(1.0)
    assert float(model(data).sums["document_lm"]) != float(still)
