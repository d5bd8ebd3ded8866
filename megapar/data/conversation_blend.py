"""The conversations that ``--data-path`` names, encoded, split and placed in packs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megapar.data.blend import BlendSource
from megapar.data.cache import hash_parts
from megapar.data.chat.chat_encoder import ChatSettings, chat_tokenizer
from megapar.data.chat.chat_template import dated, template_of
from megapar.data.chat.spans import ALL
from megapar.data.sample_maker import CONVERSATIONS, Content, DecoderSampleMaker
from megapar.data.sampling.mixture import Blend
from megapar.data.sampling.packs import BEST_FIT, TOKEN, Packs, plan_of
from megapar.data.sampling.samples import TokenPieces
from megapar.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokens.conversations import STOP, ConversationStore, conversation_stores
from megapar.data.tokens.prepared import index_hash
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

    def facts(self, settings: ChatSettings | None) -> dict[str, str]:
        """Return what is known of these options before the data is read, for checkpoints."""
        flags = {"turns": self.turns, "packing": self.packing, "overlong": self.overlong}
        template = "none" if settings is None else hash_parts(settings.template)[:16]
        return {"template": template, "day": (settings and settings.day) or self.day, **flags}


def no_template(tokenizer: str) -> str:
    """Return the message about a tokenizer without a chat template."""
    return f"the tokenizer {tokenizer} has no chat template; pass one as --chat-template FILE"


@dataclass(frozen=True)
class PackedSource:
    """The conversations of one source on one side, with their packs, and the hash of both."""

    name: str
    store: ConversationStore
    packs: Packs
    digest: str


@dataclass(frozen=True)
class PackedBlend:
    """Sources in order.

    Attributes:
        weights: Those of a mixture, else None.
        facts: What decides the samples, for checkpoints. ``packs`` alone is the hash of all of it.
    """

    sources: tuple[PackedSource, ...]
    weights: tuple[Fraction, ...] | None
    facts: Mapping[str, str]

    @property
    def pieces(self) -> TokenPieces:
        """The packs of all sources."""
        packs = [source.packs for source in self.sources]
        return packs[0] if len(packs) == 1 else Blend(packs, self.weights)

    @property
    def contents(self) -> tuple[Content, ...]:
        """Counts of each source, whose samples are packs."""
        weights = self.weights or (None,) * len(self.sources)
        rows = []
        for one, weight in zip(self.sources, weights, strict=True):
            counts = len(one.store.numbers), int(one.store.lengths.sum()), len(one.packs)
            rows.append(Content(one.name, *counts, weight, CONVERSATIONS))
        return tuple(rows)


@dataclass(frozen=True)
class ConversationOpener:
    """Encodes, splits and packs conversations.

    Attributes:
        cache: Encodes text; its ``chat`` is that of ``options``.
        maker: Makes samples; its seed is that of the plans of training packs, those of held-out ones have none.
        report: Called with messages for the log.
    """

    options: ChatOptions
    cache: TokenCache
    maker: DecoderSampleMaker
    report: Callable[[str], object]

    def open(self, data: TrainHeldout[tuple[BlendSource, ...]]) -> TrainHeldout[PackedBlend]:
        """Return the packs of sources; without held-out ones, the maker's split holds conversations of each out.

        Raises DataError if conversations are broken, or none are for training.
        """
        if data.heldout is not None:
            apart = data.map(lambda sources: [self._stores(source, None).train for source in sources])
            held = self._packed(data.heldout, apart.heldout or [], 0)
            return TrainHeldout(self._packed(data.train, apart.train, self.maker.seed), held)
        stores = [self._stores(source, self.maker.split) for source in data.train]
        heldout = [store.heldout for store in stores if store.heldout is not None]
        train = self._packed(data.train, [store.train for store in stores], self.maker.seed)
        return TrainHeldout(train, self._packed(data.train, heldout, 0) if len(heldout) == len(stores) else None)

    def _stores(self, source: BlendSource, split: Split | None) -> TrainHeldout[ConversationStore]:
        dataset = source.indexed
        if dataset is not None:
            dataset.check_ids(self.cache.tokenizer.size)
        elif self.cache.chat is None:
            raise DataError(no_template(str(self.cache.path)))
        else:
            dataset, notes = self.cache.open(source.sources)
            for note in notes:
                self.report(note)
        stores = conversation_stores(dataset, split)
        if not len(stores.train.numbers):
            raise DataError(f"{source.name}: the split leaves none of {dataset.documents} conversations for training")
        return stores

    def _packed(self, sources: Sequence[BlendSource], stores: Sequence[ConversationStore], seed: int) -> PackedBlend:
        packed, options, longest = [], self.options, self.maker.seq_length + 1
        for source, whole in zip(sources, stores, strict=True):
            store, note = whole.fitted(longest, options.overlong, source.name)
            if note:
                self.report(note)
            content = hash_parts(index_hash(store.dataset.prefix), store.numbers.tobytes(), store.lengths.tobytes())
            plan = plan_of(store, options.packing, longest, seed, content)
            digest = hash_parts(content, plan.digest())
            packed.append(PackedSource(source.name, store, Packs(store, plan, options.loss), digest))
        weights = tuple(source.weight for source in sources if source.weight is not None)
        facts = {**options.facts(self.cache.chat), "packs": hash_parts(*(one.digest for one in packed))[:16]}
        return PackedBlend(tuple(packed), weights if len(weights) > 1 else None, facts)
