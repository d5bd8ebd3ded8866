"""Fine-tuning on every layout: packs give the numbers of one process that reads each conversation alone, in fp64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.arguments import parse
from megapar.data.conversation_blend import ChatOptions
from megapar.data.corpus import of_conversations
from megapar.data.sampling.samples import order_of
from megapar.launch_environment import ROUND
from tests.equivalence.compare import differences, farthest
from tests.equivalence.run import Trace, trace
from tests.equivalence.table import COMMON, MODELS, WINDOWS
from tests.model.conformance import theirs
from tests.model.conformance.exact import widened
from tests.model.conformance.rows import Row
from tests.support.chat import MARKED, conversations, save_tokenizer, turns
from tests.support.ranks import RanksFailed, run_ranks, side_by_side

S, SEED = 160, 7
NO_BALANCE = ("--moe-aux-loss-coeff", "0", "--moe-z-loss-coeff", "0")
PLAIN = ("--eval-interval", "0", "--split", "100,0", "--dtype", "fp64")
EXACT = 1e-11


class Files:
    """Conversations that make a number of packs that four divides, and what reads them.

    One of them has a single target, a letter.
    """

    def __init__(self, folder: Path) -> None:
        save_tokenizer(folder / "tokenizer", MARKED)
        self.tokenizer, self.path = str(folder / "tokenizer"), folder / "chat.jsonl"
        records: list[Any] = [{"messages": turns("Hi", "x")}, *conversations(40, seed=3, words=5)]
        for count in range(24, 41):
            self.path.write_text("".join(json.dumps(record) + "\n" for record in records[:count]))
            made = whole(self)
            self.conversations, self.packs = count, len(made.train)
            if self.packs % 4 == 0:
                return
        raise AssertionError("no number of conversations makes packs that four divides")

    def flags(self, packing: str, micro_batch: int, loss: str, *more: str, model: str = "moe") -> tuple[str, ...]:
        """A run whose steps are epochs."""
        batch = self.packs if packing == "best_fit" else self.conversations
        data = ("--data-path", str(self.path), "--tokenizer-model", self.tokenizer, "--vocab-size", "400")
        size = ("--seq-length", str(S), "--micro-batch-size", str(micro_batch), "--global-batch-size", str(batch))
        task = ("--task", "sft", "--sft-packing", packing, "--sft-loss", loss)
        shape = (*MODELS[model], *(NO_BALANCE if model == "moe" else ()))
        return (*shape, *COMMON, *PLAIN, *more, *data, *size, *task)


def whole(files: Files) -> Any:
    """All conversations as training samples of best-fit packs."""
    chat, more = ChatOptions(day="2026-07-26"), {"tokenizer_model": files.tokenizer, "vocab_size": 400}
    paths: dict[str, Any] = {"data_path": (str(files.path),), "eval_data_path": (), "split": "100,0"}
    return of_conversations(chat, **paths, **more, seq_length=S, seed=SEED)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("conversations"))


def run(world_size: int, flags: Sequence[str], until: int = 2, kind: str = "moe") -> Trace:
    result = run_ranks(world_size, trace, kind, tuple(flags), until, group=False, timeout=90.0)[0]
    assert isinstance(result, Trace)
    return result


CP = ("--cp-degree", "2")
LAYOUTS: dict[str, tuple[int, int, str, str, tuple[str, ...]]] = {
    "one": (1, 2, "token", "moe", ()),
    "cp ring": (2, 1, "token", "moe", CP),
    "cp ulysses": (2, 1, "conversation", "gpt", (*CP, "--context-parallel-algo", "ulysses_cp_algo")),
    "mp": (2, 1, "conversation", "moe", ("--mp-degree", "2", "--sequence-parallel")),
    "pp": (2, 1, "token", "moe", ("--pp-degree", "2")),
    "ep": (2, 2, "conversation", "moe", ("--ep-degree", "2", "--sharding-stage", "2")),
    "cp ep mtp": (4, 1, "token", "moe", (*CP, "--ep-degree", "2", "--mtp-depth", "1")),
    "cp windows": (2, 1, "token", "moe", (*CP, *WINDOWS[2:])),
    "mp windows": (2, 1, "token", "moe", ("--mp-degree", "2", *WINDOWS[2:])),
}
OF_THE_MODEL = {"--mtp-depth", "--window-size"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("cp ring", "mp") else [pytest.mark.table]) for name in LAYOUTS]
)
def test_packs_on_a_layout_equal_conversations_alone_on_one_process(files: Files, name: str) -> None:
    world_size, micro_batch, loss, model, layout = LAYOUTS[name]
    model_flags = [x for i, f in enumerate(layout) if f in OF_THE_MODEL for x in layout[i : i + 2]]
    got, want = side_by_side(
        world_size,
        lambda: run(world_size, files.flags("best_fit", micro_batch, loss, *layout, model=model)),
        lambda: run(1, files.flags("pad", 1, loss, *model_flags, model=model)),
    )
    assert files.packs < files.conversations / 2
    assert max(farthest(got, want)) < EXACT


def test_a_rank_with_a_single_target_weighs_it_as_any_other(files: Files, tmp_path: Path) -> None:
    """A mean over each rank's own targets would give the letter as much weight as all the others have together."""
    path = tmp_path / "two.jsonl"
    long = turns(
        "Hi", "a river under a mountain of paper", "And?", "The stone walks quickly, and sees the ancient river."
    )
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (turns("Hi", "x"), long)))
    shape = ("--data-path", str(path), "--global-batch-size", "2")
    flags = (*files.flags("pad", 1, "token"), *shape)
    got, want = side_by_side(2, lambda: run(2, flags), lambda: run(1, flags))
    assert differences(got, want) == []


def test_three_epochs_with_two_resumes_on_other_layouts(files: Files, tmp_path: Path) -> None:
    """Each conversation once an epoch, wherever the run was stopped and whatever read it."""
    save = ("--save", str(tmp_path / "save"))
    base = files.flags("best_fit", 1, "conversation", "--train-epochs", "3")
    at = base.index("--train-iters")
    base = (*base[:at], *base[at + 2 :], "--global-batch-size", "4")
    steps = 3 * files.packs // 4
    assert steps >= 6
    whole = run(1, base, until=steps + 1)
    assert len(whole.losses) == steps
    load = (*save, "--load", str(tmp_path / "save"))
    first = run(2, (*base, *save, "--chat-date", "2024-02-29"), until=1)
    assert parse("moe", (*base, *load), {}).data.chat_date == "2024-02-29"  # that of the first start
    assert parse("moe", (*base, *save), {ROUND: "1"}).data.chat_date == "2024-02-29"  # and of a restarted job
    with pytest.raises(RanksFailed, match="other samples: turns is all there and last here"):
        run(1, (*base, *load, "--sft-turns", "last"), until=3)
    second = run(1, (*base, *load, "--micro-batch-size", "2"), until=3)
    third = run(2, (*base, *load, "--micro-batch-size", "2"), until=steps + 1)
    assert [len(each.losses) for each in (first, second, third)] == [1, 2, steps - 3]
    parts = Trace(
        losses=[*first.losses, *second.losses, *third.losses],
        norms=[*first.norms, *second.norms, *third.norms],
        dropped=[],
        gradients=[*first.gradients, *second.gradients, *third.gradients],
        parameters=third.parameters,
    )
    assert max(farthest(parts, whole)) < 1e-9


def test_a_plain_loop_with_the_published_class_has_the_same_losses(files: Files, tmp_path: Path) -> None:
    """Twenty steps of Llama in true fp64, a conversation at a time, the mean over the targets of the global batch."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    row = Row("Llama", "LlamaForCausalLM", {**shape, "num_key_value_heads": 2, "vocab_size": 400}, ())
    model = theirs.build(row)
    model.save_pretrained(tmp_path)
    data = files.flags("best_fit", 1, "token")
    data = (*PLAIN, *data[data.index("--data-path", data.index("--dtype")) :])
    rate = ("--lr", "1e-3", "--lr-decay-style", "constant", "--weight-decay", "0", "--clip-grad", "0", "--seed", "7")
    flags = ("--load-hf", str(tmp_path), *data, *rate, "--global-batch-size", "4", "--train-iters", "20")
    ours = run(1, flags, until=21)

    published, packs = theirs.exact(row, model), whole(files).conversations.train.sources[0]
    settings = parse("moe", flags, {}).optimizer
    adamw = {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_eps}
    optimizer = torch.optim.AdamW(published.model.parameters(), lr=1e-3, weight_decay=0.0, **adamw)
    order = order_of(packs, 7, "windows")
    for step, loss in enumerate(ours.losses):
        numbers = [int(item) for i in range(4) for item in packs.items(order[4 * step + i])]
        batch = [packs.store.read(number) for number in numbers]
        total = sum(int(targets.sum()) for _, targets in batch)
        mean = 0.0
        optimizer.zero_grad()
        for ids, targets in batch:
            with widened():
                logits = published.model(torch.tensor(ids[None, :-1]), use_cache=False).logits[0]
                nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
                part = nll[torch.tensor(targets[1:])].sum() / total
                part.backward()
            mean += float(part.detach())
        optimizer.step()
        assert loss == pytest.approx(mean, rel=1e-9), step
