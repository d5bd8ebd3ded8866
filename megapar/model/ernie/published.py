"""Published classes that the ERNIE encoder implements."""

from __future__ import annotations

from megapar.model.ernie.sizes import ErnieSizes
from megapar.schema.legal_values import COUNT, EPSILON, LAYERS, PROBABILITY, SIZE, anything, text, true_or_false
from megapar.schema.published import Limit, PublishedArchitecture, PublishedForms, Setting, Settings

SETTINGS = (
    Setting("vocab_size", SIZE, "vocab_size"),
    Setting("hidden_size", SIZE, "hidden_size"),
    Setting("num_hidden_layers", LAYERS, "num_layers"),
    Setting("num_attention_heads", SIZE, "num_attention_heads"),
    Setting("intermediate_size", SIZE, "ffn_hidden_size"),
    Setting("hidden_act", text, only="gelu"),
    Setting("hidden_dropout_prob", PROBABILITY, "hidden_dropout"),
    Setting("attention_probs_dropout_prob", PROBABILITY, "attention_dropout"),
    Setting("max_position_embeddings", SIZE, "max_position_embeddings"),
    Setting("type_vocab_size", COUNT, "type_vocab_size"),
    Setting("task_type_vocab_size", COUNT, "task_type_vocab_size", retrained=True),
    Setting("use_task_id", true_or_false, retrained=True, from_flags=lambda settings: True),
    Setting("initializer_range", anything, from_flags=lambda settings: settings["init_std"]),
    Setting("layer_norm_eps", EPSILON, "layernorm_epsilon"),
    Setting("tie_word_embeddings", true_or_false, only=True),
    Setting("is_decoder", true_or_false, only=False, written=False),
    Setting("add_cross_attention", true_or_false, only=False, written=False),
    Setting("dtype", anything, from_flags=lambda settings: settings["dtype"]),
)
DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "task_type_vocab_size": 3,
    "use_task_id": False,
    "layer_norm_eps": 1e-12,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
WITHOUT_TASKS = {"use_task_id": r"\.task_type_embeddings\.weight$"}
TIED = {
    "cls.predictions.decoder.weight": "ernie.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

PRETRAINING = PublishedArchitecture(
    name="ErnieForPreTraining",
    model_type="ernie",
    settings=SETTINGS,
    defaults=DEFAULTS,
    limits=(
        Limit(
            id="hf-sentence-order",
            reads=("sop",),
            within=lambda f: f.sop,
            message="this class has a sentence-order head, but the model has none",
        ),
    ),
    absent_without=WITHOUT_TASKS,
    tied=TIED,
    remark="without `use_task_id` the task types are zero",
)
MASKED_LM = PublishedArchitecture(
    name="ErnieForMaskedLM",
    model_type="ernie",
    settings=SETTINGS,
    defaults=DEFAULTS,
    fixed_sizes={"sop": False},
    limits=(
        Limit(
            id="hf-no-sentence-order",
            reads=("sop",),
            within=lambda f: not f.sop,
            message="this class has no sentence-order head, but the model has one",
        ),
    ),
    absent_without=WITHOUT_TASKS,
    tied=TIED,
    trained_as="ErnieForPreTraining",
    remark="it has no sentence-order head: a run initializes one, and is exported as `ErnieForPreTraining`",
)


def settings_of(sizes: ErnieSizes) -> Settings:
    """Return an encoder's sizes by the names of the flags, and ``sop``, which no flag sets."""
    return vars(sizes)


PUBLISHED = PublishedForms(
    architectures=(PRETRAINING, MASKED_LM),
    settings=settings_of,
    own=lambda settings: (PRETRAINING if settings.get("sop", True) else MASKED_LM).name,
)
