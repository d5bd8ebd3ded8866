"""A row of the table at work: the class, the folder that it wrote, and what both sides make of the same batches."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.model.conformance import theirs
from tests.model.conformance.answer import Answer, Batch, batches
from tests.model.conformance.exact import NarrowMade
from tests.model.conformance.ours import Ours
from tests.model.conformance.rows import Row

BATCHES = 4
# rms errors of bf16 are over so many, because how two roundings of one gradient compare is chance: the ratio over four
# batches is off by up to a quarter.
ROUNDED = 16


class Case:
    """What the checks of a row share, each made when the first one needs it.

    Attributes:
        row: The row.
        root: An empty folder.
    """

    def __init__(self, row: Row, root: Path) -> None:
        self.row, self.root = row, root

    @cached_property
    def model(self) -> Any:
        """The class in fp32."""
        return theirs.build(self.row)

    @cached_property
    def folder(self) -> Path:
        """What the class saved, in several files."""
        self.model.save_pretrained(self.root / "fp32", max_shard_size="60KB")
        return self.root / "fp32"

    @cached_property
    def half_folder(self) -> Path:
        """What the class saved in bf16."""
        theirs.untouched(self.row, self.folder, torch.bfloat16).model.save_pretrained(self.root / "bf16")
        return self.root / "bf16"

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches of the checks in fp64."""
        return self.rounded_batches[:BATCHES]

    @cached_property
    def rounded_batches(self) -> list[Batch]:
        """The batches of the check in bf16: those and more."""
        return batches(ROUNDED, self.model.config.vocab_size)

    def exact(self) -> theirs.Published:
        """The class in true fp64."""
        return theirs.exact(self.row, self.model)

    @cached_property
    def narrow(self) -> NarrowMade:
        """What neither side may make in its answers: fp32."""
        return NarrowMade()

    @cached_property
    def exact_answers(self) -> list[Answer]:
        """Those of the class in true fp64."""
        model = self.exact()
        return [model.answer(batch, self.narrow) for batch in self.batches]

    @cached_property
    def ours(self) -> Ours:
        """megapar's model in fp64. It has answered every batch, so that it knows every route."""
        model = Ours(self.row, self.folder, "fp64")
        self._our_answers = [model.answer(number, batch, self.narrow) for number, batch in enumerate(self.batches)]
        return model

    @cached_property
    def rounded_against(self) -> list[Answer]:
        """Those of the class in true fp64 to the batches of the check in bf16."""
        model = self.exact()
        return self.exact_answers + [model.answer(batch) for batch in self.rounded_batches[BATCHES:]]

    @property
    def our_answers(self) -> list[Answer]:
        """Those of megapar in fp64."""
        assert self.ours
        return self._our_answers
