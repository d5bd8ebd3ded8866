"""Parameter table of ERNIE 3.0."""

from __future__ import annotations

from megapar.model.ernie.table import embedding_rows, layer_rows, word_head_rows
from megapar.model.ernie3.sizes import BRANCHES, CLASSES, Ernie3Sizes
from megapar.model.parameter import ParameterSpec, bias_row, linear_rows, weight_row


def ernie3_table(sizes: Ernie3Sizes) -> tuple[ParameterSpec, ...]:
    """Return the table of ERNIE 3.0, which has no Hugging Face form."""
    H, h, rows = sizes.hidden_size, sizes.task_hidden_size, embedding_rows(sizes)
    for layer in range(sizes.num_blocks):
        unit = f"layers.{layer}"
        if layer < sizes.num_layers:
            rows += layer_rows(sizes, unit, unit, unit)
            continue
        for branch in BRANCHES:
            if layer == sizes.num_layers:
                name = f"{unit}.{branch}_proj"
                rows.append(weight_row(f"{name}.weight", (h, H), "", unit, mp_partial="sp"))
                rows.append(bias_row(f"{name}.bias", (h,), "", unit, mp_partial="sp"))
            rows += layer_rows(sizes.branch, f"{unit}.{branch}", f"{unit}.{branch}", unit)
    for branch in sizes.word_branches:
        rows += word_head_rows(f"heads.{branch}", (H, h), sizes.vocab_size, f"heads.{branch}")
    classifications = [task for task in CLASSES if task in sizes.tasks]
    if classifications:
        rows += linear_rows("heads.pooler", (h, h), "heads.pooler")
    for task in classifications:
        rows += linear_rows(f"heads.{task}", (sizes.classes(task), h), f"heads.{task}")
    return tuple(rows)
