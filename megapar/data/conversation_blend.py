"""The conversations that ``--data-path`` names, encoded, split and placed in packs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice

from megapar.data.blend import BlendSource, groups_of, open_blend
from megapar.data.cache import hash_parts
from megapar.data.chat.chat_encoder import ChatSettings, chat_tokenizer
from megapar.data.chat.chat_template import dated, template_of
from megapar.data.chat.spans import ALL
from megapar.data.sample_maker import CONVERSATIONS, Content, DecoderSampleMaker
from megapar.data.sampling.mixture import Blend
from megapar.data.sampling.packs import BEST_FIT, TOKEN, Packs, plan_of
from megapar.data.sampling.samples import TokenPieces
from megapar.data.text.chunks import LineNumbers
from megapar.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.conversations import HELD_OUT, STOP, ConversationStore, conversation_stores
from megapar.data.tokens.indexed import without_suffix
from megapar.data.tokens.prepared import check_chat
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.token_cache import TokenCache
from megapar.errors import DataError


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The options of a fine-tuning run's samples.

    Attributes:
        template: File of the chat template; None for that of the tokenizer.
        day: The day that the template sees, YYYY-MM-DD.
        turns: See ``chat.spans``.
        packing: See ``sampling.packs``, also for ``loss``.
        overlong: See ``tokens.conversations``.
    """

    template: str | None = None
    day: str
    turns: str = ALL
    packing: str = BEST_FIT
    overlong: str = STOP
    loss: str = TOKEN

    def settings(self, tokenizer: HuggingFaceTokenizer) -> ChatSettings | None:
        """Return what decides the tokens of conversations; None without a template, for prepared data.

        The tokenizer gets the template of the file. Raises DataError if the file cannot be read.
        """
        if self.template is not None:
            tokenizer.chat_template = template_of(self.template)
        text = tokenizer.chat_template
        return None if text is None else ChatSettings(text, self.day if dated(text) else None, self.turns)

    def settings_of(self, tokenizer_model: str) -> ChatSettings:
        """Return the settings for the tokenizer in a folder. Raises DataError if there is no template."""
        settings = self.settings(chat_tokenizer(load_tokenizer(tokenizer_model)))
        if settings is None:
            raise DataError(no_template(tokenizer_model))
        return settings

    def compare(self, prefixes: Iterable[str], settings: ChatSettings | None, tokenizer: Tokenizer) -> list[str]:
        """Return notes about prepared conversations. Raises DataError if others than the settings encoded them."""
        facts = (settings or ChatSettings("", None, self.turns)).facts(tokenizer)
        facts = facts if settings else {name: facts[name] for name in ("tokenizer", "turns")}
        return [note for prefix in prefixes if (note := check_chat(prefix, facts))]

    def facts(self, settings: ChatSettings | None) -> dict[str, str]:
        """Return what is known of these options before the data is read, for checkpoints."""
        flags = {"turns": self.turns, "packing": self.packing, "overlong": self.overlong}
        template = "none" if settings is None else hash_parts(settings.template)[:16]
        return {"template": template, "day": (settings and settings.day) or self.day, **flags}


def no_template(tokenizer: str) -> str:
    """Return the message about a tokenizer without a chat template."""
    return f"the tokenizer {tokenizer} has no chat template; pass one as --chat-template FILE"


@dataclass(frozen=True)
class PackedBlend:
    """Sources in order.

    Attributes:
        weights: Those of a mixture, else None.
        facts: What decides the samples, for checkpoints. ``packs`` alone is the hash of all of it.
    """

    sources: tuple[Packs, ...]
    weights: tuple[Fraction, ...] | None
    facts: Mapping[str, str]

    @property
    def pieces(self) -> TokenPieces:
        """The packs of all sources."""
        return self.sources[0] if len(self.sources) == 1 else Blend(self.sources, self.weights)

    @property
    def contents(self) -> tuple[Content, ...]:
        """Counts of each source, whose samples are packs."""
        weights = self.weights or (None,) * len(self.sources)
        counts = [(len(one.store.numbers), int(one.store.lengths.sum()), len(one)) for one in self.sources]
        names = [one.store.name for one in self.sources]
        return tuple(
            Content(name, *count, weight, CONVERSATIONS)
            for name, count, weight in zip(names, counts, weights, strict=True)
        )


def open_conversations(
    options: ChatOptions,
    cache: TokenCache,
    maker: DecoderSampleMaker,
    data: TrainHeldout[tuple[BlendSource, ...]],
    report: Callable[[str], object],
) -> TrainHeldout[PackedBlend]:
    """Return the packs of sources, after encoding them; without held-out ones, a split holds conversations of each out.

    Raises DataError if conversations are broken, or none are for training.

    Args:
        cache: Its ``chat`` is that of ``options``.
        maker: Has the split and the length of samples; its seed is that of the plans of training packs, those of
            held-out ones have none.
        report: Called with messages for the log.
    """

    def opened(source: BlendSource, split: Split | None) -> TrainHeldout[ConversationStore]:
        dataset = source.indexed
        if dataset is not None:
            for note in options.compare([dataset.prefix], cache.chat, cache.tokenizer):
                report(note)
            dataset.check_ids(cache.tokenizer.size)
        elif cache.chat is None:
            raise DataError(no_template(str(cache.path)))
        else:
            dataset, notes = cache.open(source.sources)
            for note in notes:
                report(note)
        stores = conversation_stores(source.name, dataset, split)
        known = source.indexed is None and not cache.skip_bad  # otherwise no line is known
        return stores.map(lambda store: replace(store, place=partial(_line, source))) if known else stores

    def packed(sources: Sequence[BlendSource], stores: Sequence[ConversationStore], seed: int) -> PackedBlend:
        packs = tuple(packs_of(store, options, maker.seq_length, seed, report) for store in stores)
        weights = tuple(source.weight for source in sources if source.weight is not None)
        facts = {**options.facts(cache.chat), "packs": hash_parts(*(one.digest() for one in packs))[:16]}
        return PackedBlend(packs, weights if len(weights) > 1 else None, facts)

    pairs = [opened(source, maker.split if data.heldout is None else None) for source in data.train]
    held = [pair.heldout for pair in pairs if pair.heldout is not None]
    if data.heldout is not None:
        held = [replace(opened(source, None).train, side=HELD_OUT) for source in data.heldout]
    sources = data.heldout or data.train
    train = packed(data.train, [pair.train for pair in pairs], maker.seed)
    return TrainHeldout(train, packed(sources, held, 0) if len(held) == len(sources) else None)


def _line(source: BlendSource, number: int) -> str:
    """Return the file and the line or row, from 1, of a conversation of a source without broken records."""
    chunks, numbers = (chunk for one in source.sources for chunk in one.chunks()), LineNumbers()
    records = (pair for chunk in chunks for pair in chunk.records(numbers))
    full = (placed for record, placed in records if isinstance(record, dict) or (record and record.strip()))
    return str(next(islice(full, number, None))(DataError("")))


def packs_of(
    store: ConversationStore, options: ChatOptions, seq_length: int, seed: int, report: Callable[[str], object]
) -> Packs:
    """Return the packs of a store, for samples of ``seq_length`` + 1 tokens. Raises DataError, see ``fitted``."""
    store, note = store.fitted(seq_length + 1, options.overlong)
    if note:
        report(note)
    return Packs(store, plan_of(store, options.packing, seq_length + 1, seed), options.loss)


def compared(data_path: Sequence[str], options: ChatOptions, tokenizer_model: str) -> list[str]:
    """Return the notes of ``ChatOptions.compare`` about the prepared conversations among some paths, or its error."""
    prefixes = [without_suffix(group.paths[0]) for group in groups_of(data_path) if group.indexed]
    tokenizer = chat_tokenizer(load_tokenizer(tokenizer_model)) if prefixes else None
    return [] if tokenizer is None else options.compare(prefixes, options.settings(tokenizer), tokenizer)


def prepared_packs(
    data_path: Sequence[str], options: ChatOptions, split: Split | None, seq_length: int, seed: int
) -> int | None:
    """Return the number of packs of an epoch, without a tokenizer; None if some conversations are not prepared.

    Raises DataError if a run would.
    """
    if not all(group.indexed for group in groups_of(data_path)):
        return None
    datasets = [(source.name, source.indexed) for source in open_blend(data_path) if source.indexed is not None]
    stores = [conversation_stores(name, dataset, split).train for name, dataset in datasets]
    return sum(len(packs_of(store, options, seq_length, seed, str)) for store in stores)
