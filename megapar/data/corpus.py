"""A corpus that is ready for training: training and held-out samples, and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

from megapar.core.status_line import Status, silent
from megapar.data.batches import Collate
from megapar.data.blend import BlendSource, open_blend, open_stores
from megapar.data.cache import hash_parts, make_once
from megapar.data.chat.chat_encoder import chat_tokenizer
from megapar.data.conversation_blend import ChatOptions, PackedBlend, open_conversations
from megapar.data.eval_tasks import EvalTask
from megapar.data.sample_maker import Content, DecoderSampleMaker, ErnieSampleMaker, MadeSamples, Maker, Packing
from megapar.data.sampling.data_phases import PhasedSamples, Phases
from megapar.data.sampling.ernie import SHORTEST_SEQUENCE
from megapar.data.sampling.samples import Samples, TokenPieces
from megapar.data.tasks.build import TaskData
from megapar.data.text.chunks import BadRecords
from megapar.data.text.hf_dataset import open_dataset
from megapar.data.text.source import MOCK, all_documents, sources_hash
from megapar.data.token_bytes import TokenBytes, token_bytes
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.tokenizer import MockTokenizer, NoTokenizer, Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.store import StoreBlend
from megapar.data.tokens.token_cache import TokenCache
from megapar.errors import ConfigError, DataError
from megapar.files.data_files import AUTO, FIELD, LONGEST_LINE, PARAGRAPH, ROW, checked_text
from megapar.files.tokenizer_files import too_large

ERNIE = "ernie"
KINDS = ("moe", ERNIE)
DEFAULT_SPLIT = "95,5"


@dataclass(frozen=True, kw_only=True)
class Corpus(MadeSamples):
    """The data of a trainer.

    Attributes:
        vocab_size: Rows of the embedding, at least tokenizer.size.
        stores: The tokens that samples are cut from; None for random tokens, a streamed dataset, and conversations.
        conversations: The sources of conversations and their packs; None for other data.
        eval_tasks: Tasks that evaluations score.
        notes: Messages for the log, such as records that were skipped.
    """

    tokenizer: Tokenizer
    vocab_size: int
    collate: Collate
    stores: TrainHeldout[StoreBlend] | None = None
    conversations: TrainHeldout[PackedBlend] | None = None
    eval_tasks: tuple[EvalTask, ...] = ()
    notes: tuple[str, ...] = ()

    def chat_facts(self) -> dict[str, str]:
        """Return the facts of conversations that a checkpoint records; {} for other data."""
        return {} if self.conversations is None else dict(self.conversations.train.facts)

    def check_files(self) -> None:
        """Raise DataError if a file that is mapped was overwritten in place since."""
        for blend in () if self.stores is None else (self.stores.train, self.stores.heldout):
            for store in () if blend is None else blend.stores:
                for file in store.files:
                    file.check()
        for packed in () if self.conversations is None else (self.conversations.train, self.conversations.heldout):
            for source in () if packed is None else packed.sources:
                for file in source.store.dataset.files:
                    file.check()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise the DataError of ``check_files``, if there is one, in place of an error: ids may be out of range."""
        try:
            yield
        except Exception:
            self.check_files()
            raise

    @property
    def evaluation_sets(self) -> Mapping[str, Samples]:
        """Held-out samples by the name of their set, "" if the sets have no names; none if nothing is held out."""
        return self.heldout_sets or ({} if self.heldout is None else {"": self.heldout})

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes of text that ids are for; None without a tokenizer of text."""
        return token_bytes(self.tokenizer, self.vocab_size)

    @cached_property
    def source_end(self) -> tuple[int, str] | None:
        """The first sample that its source has given before, and the source; None if the run never repeats one."""
        train = self.train
        found = train.first_repeated() if isinstance(train, PhasedSamples) else None
        if found is None or not isinstance(train, PhasedSamples):
            return None
        phase = next(phase for phase in reversed(train.phases) if found[1] in phase.lanes)
        number = phase.lanes.index(found[1])
        part = number if phase.parts is None else phase.parts[number]
        whole = phase.parts is None and len(phase.lanes) == 1 < len(self.contents)
        return found[0], "the data" if whole else self.contents[part].name

    def in_phases(self, phases: Phases, first: int = -1) -> Corpus:
        """Return this corpus with the training samples of a run whose data changes between phases.

        Those of phases before ``first`` cannot be read. The last phases have the sources of this corpus.
        """
        assert self.phased is not None
        return replace(self, train=self.phased(phases, range(len(phases))[first]))


@dataclass(frozen=True)
class TextOptions:
    """Options of reading text.

    Attributes:
        field: Field or column of records that contains the document.
        per: What a document of text files is, as --document-per says it; None: as for the kind of model.
        skip_bad: Skip broken records and count them in ``Corpus.notes``.
    """

    field: str = FIELD
    per: str | None = None
    skip_bad: bool = False


def build(
    kind: str,
    *,
    data_path: Sequence[str] = ("builtin",),
    eval_data_path: Sequence[str] | None = None,
    split: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int,
    seq_length: int,
    seed: int,
    mlm_probability: float = 0.15,
    packing: Packing | None = None,
    hf_dataset: str | None = None,
    tasks: TaskData | None = None,
    text: TextOptions = TextOptions(),
    status: Status = silent,
) -> Corpus:
    """Open, check, tokenize and cut a corpus. Slow work is done once and kept in the cache folder.

    Any number of processes may call this at once. Raises DataError if the data is broken, and ConfigError if the
    tokenizer has more ids than ``vocab_size``.

    Args:
        data_path: Builtin, mock, or a list of files, folders and prefixes of indexed files, each optionally preceded
            by its weight.
        eval_data_path: Held-out data; without it, ``split`` holds documents out. With (), nothing is evaluated, and a
            small corpus may have no held-out documents.
        split: Shares of training and held-out documents (default DEFAULT_SPLIT); a second share of 0 holds none out.
        tokenizer_model: A sentencepiece model, a tokenizer.json or a Hugging Face folder; without it, a tokenizer of
            ``vocab_size`` ids is trained on the training documents.
        hf_dataset: A ``datasets`` source that is streamed, in place of data_path.
        status: Hears of slow work.
    """
    maker = _make_maker(kind, seq_length, seed, split or DEFAULT_SPLIT, packing or Packing(), mlm_probability, tasks)
    if hf_dataset is not None:
        return _streamed(hf_dataset, text.field, tokenizer_model, vocab_size, maker, status)
    if _is_mock(data_path, eval_data_path):
        return _mock(tokenizer_model, vocab_size, maker)
    skipped: list[str] = []
    per = text.per or (PARAGRAPH if kind == ERNIE else AUTO)
    opened = partial(open_blend, field=text.field, report=skipped.append, per=per)
    train = opened(data_path)
    heldout = opened(eval_data_path) if eval_data_path else None
    data = TrainHeldout(train, heldout)
    evaluates = eval_data_path != ()
    made = _blended(data, tokenizer_model, vocab_size, maker, status, skip_bad=text.skip_bad, evaluates=evaluates)
    return replace(made, notes=tuple(dict.fromkeys((*skipped, *made.notes))))


def of_pieces(
    train: TokenPieces,
    heldout: TokenPieces | None,
    *,
    name: str,
    tokenizer_model: str | None,
    vocab_size: int,
    seq_length: int,
    seed: int,
    packing: Packing,
) -> Corpus:
    """Return a decoder's corpus of the caller's pieces, called ``name`` in the log. See ``build`` for the rest."""
    maker = DecoderSampleMaker(seq_length, seed, Split.parse(DEFAULT_SPLIT), packing)
    tokenizer = load_tokenizer(tokenizer_model) if tokenizer_model else NoTokenizer(vocab_size)
    _check_size(tokenizer, tokenizer_model, vocab_size)
    pieces = TrainHeldout(train, heldout)

    def content(side: TokenPieces) -> tuple[Content, ...]:
        return (Content(name, None, None, len(side)),)

    made = maker.from_pieces(pieces, tokenizer, pieces.map(content))
    return _corpus(made, tokenizer, vocab_size, maker.collate)


def of_conversations(
    chat: ChatOptions,
    *,
    data_path: Sequence[str],
    eval_data_path: Sequence[str] | None = None,
    split: str | None = None,
    tokenizer_model: str,
    vocab_size: int,
    seq_length: int,
    seed: int,
    skip_bad: bool = False,
    status: Status = silent,
) -> Corpus:
    """Open, check, tokenize and pack conversations, as JSONL, parquet or prepared, for fine-tuning a decoder.

    The arguments, the errors and the work that is done once are those of ``build``.
    """
    notes: list[str] = []
    maker = DecoderSampleMaker(seq_length, seed, Split.parse(split or DEFAULT_SPLIT), Packing(conversations=True))
    tokenizer = chat_tokenizer(load_tokenizer(tokenizer_model))
    _check_size(tokenizer, tokenizer_model, vocab_size)
    train = open_blend(data_path, ROW, notes.append)
    data = TrainHeldout(train, open_blend(eval_data_path, ROW, notes.append) if eval_data_path else None)
    cache = TokenCache(tokenizer, Path(tokenizer_model), skip_bad, chat.settings(tokenizer), status)
    packed = open_conversations(chat, cache, maker, data, notes.append)
    if packed.heldout is None and eval_data_path is None:
        raise DataError(
            f"{', '.join(data_path)}: no conversation of some source is held out, and evaluations need one; pass more "
            "conversations, --eval-data-path, another --split, or --split 100,0 with --eval-interval 0"
        )
    contents = packed.map(lambda blend: blend.contents)
    made = maker.from_pieces(packed.map(lambda blend: blend.pieces), tokenizer, contents)
    corpus = _corpus(made, tokenizer, vocab_size, maker.collate)
    return replace(corpus, conversations=packed, notes=tuple(dict.fromkeys(notes)))


def _make_maker(
    kind: str, seq_length: int, seed: int, split: str, packing: Packing, mlm_probability: float, tasks: TaskData | None
) -> Maker:
    """Return the maker of a kind's samples. Raises DataError for a sequence that is too short or a broken split."""
    if kind not in KINDS:
        raise ValueError(f"the kind is {kind!r}, not one of {KINDS}")
    if kind != ERNIE:
        return DecoderSampleMaker(seq_length, seed, Split.parse(split), packing)
    if packing != Packing():
        raise ValueError("packing applies only to a decoder")
    if seq_length < SHORTEST_SEQUENCE:
        raise DataError(f"sentence pairs need a --seq-length of at least {SHORTEST_SEQUENCE}, not {seq_length}")
    return ErnieSampleMaker(seq_length, seed, Split.parse(split), mlm_probability, tasks)


def _blended(
    data: TrainHeldout[tuple[BlendSource, ...]],
    tokenizer_model: str | None,
    vocab_size: int,
    maker: Maker,
    status: Status,
    *,
    skip_bad: bool,
    evaluates: bool,
) -> Corpus:
    """Return the corpus of text and indexed files, tokenised into stores."""
    tokenizer, path = (
        (load_tokenizer(tokenizer_model), Path(tokenizer_model))
        if tokenizer_model
        else _own_tokenizer(data, maker.split, vocab_size, skip_bad, status)
    )
    _check_size(tokenizer, tokenizer_model, vocab_size)
    ids = tokenizer.size if tokenizer_model else vocab_size  # indexed files were not made by a tokenizer trained here
    cache = TokenCache(tokenizer, path, skip_bad, status=status)
    stores = open_stores(data, maker.split, cache, ids, evaluates=evaluates)
    corpus = _corpus(maker.blended(stores, data, tokenizer), tokenizer, vocab_size, maker.collate)
    notes = (*stores.train.notes, *(stores.heldout.notes if stores.heldout else ()))
    return replace(corpus, stores=stores, notes=notes)


def _mock(tokenizer_model: str | None, vocab_size: int, maker: Maker) -> Corpus:
    """Return a corpus of random tokens."""
    tokenizer = load_tokenizer(tokenizer_model) if tokenizer_model else MockTokenizer(vocab_size)
    _check_size(tokenizer, tokenizer_model, vocab_size)
    return _corpus(maker.mock(tokenizer), tokenizer, vocab_size, maker.collate)


def _streamed(
    name: str, field: str, tokenizer_model: str | None, vocab_size: int, maker: Maker, status: Status
) -> Corpus:
    """Return the corpus of a dataset whose rows are tokenised when samples need them."""
    if tokenizer_model:
        tokenizer = load_tokenizer(tokenizer_model)
    else:
        rows = open_dataset(name, field=field)
        first = maker.split.cuts(len(rows))[0]
        documents = ((i, rows[i][field]) for i in range(first))
        read_as = () if field == FIELD else (field,)
        texts = (checked_text(text, {field: text}, f"{name}, row {i}", field) for i, text in documents if text)
        key = (str(rows._fingerprint), repr(maker.split.train), *read_as)
        tokenizer, _ = _trained(texts, vocab_size, name, status, *key)
    _check_size(tokenizer, tokenizer_model, vocab_size)
    return _corpus(maker.streamed(name, field, tokenizer), tokenizer, vocab_size, maker.collate)


def _corpus(made: MadeSamples, tokenizer: Tokenizer, vocab_size: int, collate: Collate) -> Corpus:
    return Corpus(**vars(made), tokenizer=tokenizer, vocab_size=vocab_size, collate=collate)


def _is_mock(data_path: Sequence[str], eval_data_path: Sequence[str] | None) -> bool:
    if list(data_path) != [MOCK]:
        return False
    if eval_data_path and list(eval_data_path) != [MOCK]:
        raise DataError("--data-path mock holds out random tokens itself; leave --eval-data-path out")
    return True


def _own_tokenizer(
    data: TrainHeldout[tuple[BlendSource, ...]], split: Split, vocab_size: int, skip_bad: bool, status: Status
) -> tuple[Tokenizer, Path | None]:
    """Train a tokenizer of ``vocab_size`` ids on the training documents, once; return it and its file.

    Without text, returns NoTokenizer and None. Raises DataError if text is mixed with indexed files.
    """
    everything = (*data.train, *(data.heldout or ()))
    indexed = [source.name for source in everything if source.indexed]
    if indexed and any(source.sources for source in everything):
        raise DataError(
            f"{indexed[0]} contains tokens of an existing tokenizer, and the text next to it must be tokenized with "
            "the same one; set --tokenizer-model to that tokenizer"
        )
    if indexed:
        return NoTokenizer(vocab_size), None
    sources = tuple(text for source in data.train for text in source.sources)
    apart = "apart" if data.heldout else repr(split.train)
    names = ", ".join(source.name for source in sources)
    documents = all_documents(sources, BadRecords(stops=not skip_bad))
    if not data.heldout:
        documents = (text for text in documents if split.side(text) == 0)
    return _trained(documents, vocab_size, names, status, sources_hash(sources), apart, str(LONGEST_LINE))


def _trained(
    documents: Iterator[str], vocab_size: int, names: str, status: Status, *key: str
) -> tuple[Tokenizer, Path]:
    """Return the tokenizer trained on these documents, from the cache if it is there, and its file."""
    import sentencepiece

    from megapar.data.tokenizers.sentencepiece_tokenizer import TRAINING_VERSION, SentencePieceTokenizer, train

    content, *more = key
    entry = hash_parts(str(TRAINING_VERSION), sentencepiece.__version__, content, str(vocab_size), *more)

    def make(path: Path) -> None:
        status(f"training a tokenizer of {vocab_size:,} ids", 0, 0, "")
        first = next(documents, None)
        if first is None:
            raise DataError(f"{names}: the corpus contains no documents to train on")
        path.write_bytes(train(chain([first], documents), vocab_size))

    path = make_once(f"tokenizers/{entry}.model", make, status)
    return SentencePieceTokenizer(path.read_bytes(), name=str(path)), path


def _check_size(tokenizer: Tokenizer, name: str | None, vocab_size: int) -> None:
    if tokenizer.size > vocab_size:
        raise ConfigError([too_large(name, tokenizer.size, vocab_size)])
