"""SentencePiece models: trained on a corpus, read from a file, and written in Hugging Face's form."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from megapar.data.lazy_numpy import np
from megapar.data.tokenizers.tokenizer import SpecialTokens, WordMarks
from megapar.errors import DataError

SPACE = "▁"
NEWLINE = "\n"
TRAINING_VERSION = 2  # increased whenever ``train`` makes another model from the same texts

TRAINING_CHARACTERS = 6_000_000  # more text changes a vocabulary little and costs seconds
LONG_TEXT = 50_000  # characters from which a text is checked for repetition
REPEATS = 25  # compression ratio from which such a text counts as repetitive
REPEATED_CHARACTERS = 10_000  # characters of a repetitive text that are trained on
FIRST_PIECE = 8  # after the special ids and the newline
SMALLEST_BYTE_FALLBACK = 1024  # ids; smaller vocabularies cannot spare 256 ids for single bytes
SCORE_STEPS = 64  # scores are multiples of 1/64, see Note [Exact scores]
NEWLINE_SCORE = -2.0

# Note [Exact scores]: sentencepiece adds scores in single precision, Hugging Face's tokenizers in double, and
# both over the whole text. On a long document, or if two ways to cut a word have equal scores, rounding would
# decide differently. Scores that are multiples of 1/64 are added without rounding in both (up to a total of
# 2^18, about 30,000 tokens), so both libraries always cut text at the same places.


class SentencePieceTokenizer:
    """A sentencepiece model of any algorithm."""

    def __init__(self, model: bytes, name: str = "the sentencepiece model") -> None:
        """Load the bytes of a ``.model`` file. ``name`` is for messages. Raises DataError if they are not a model."""
        import sentencepiece

        self.model = model
        self._name = name
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"{name}: not a sentencepiece model ({error}); pass one, a tokenizer.json, or the folder of a Hugging "
                "Face tokenizer"
            ) from error
        if self._processor.get_piece_size() == 0:
            raise DataError(f"{name}: not a sentencepiece model (it has no pieces)")

    @property
    def size(self) -> int:
        return int(self._processor.get_piece_size())

    @cached_property
    def special(self) -> SpecialTokens:
        """See Tokenizer. A model without [CLS] and [SEP] uses its begin and end of sentence for them."""
        sp = self._processor

        def first(*candidates: int | str) -> int | None:
            for candidate in candidates:
                if isinstance(candidate, str):
                    piece = sp.piece_to_id(candidate)
                    candidate = piece if sp.id_to_piece(piece) == candidate else -1
                if candidate >= 0:
                    return int(candidate)
            return None

        bos, eos = first(sp.bos_id(), "<s>"), first(sp.eos_id(), "</s>", "<|endoftext|>")
        return SpecialTokens(
            pad=first(sp.pad_id(), "[PAD]", "<pad>"),
            unk=first(sp.unk_id()),
            bos=bos,
            eos=eos,
            cls=first("[CLS]", "<cls>", *([] if bos is None else [bos])),
            sep=first("[SEP]", "<sep>", *([] if eos is None else [eos])),
            mask=first("[MASK]", "<mask>", "<mask:0>"),
        )

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        sp, special = self._processor, self.special.ids
        ids = [
            i
            for i in range(self.size)
            if i not in special and not (sp.is_control(i) or sp.is_unknown(i) or sp.is_unused(i) or sp.is_byte(i))
        ]
        return np.array(ids, dtype=np.int64)

    @cached_property
    def word_marks(self) -> WordMarks:
        pieces = [self._processor.id_to_piece(i) for i in range(self.size)]
        pieces = [NEWLINE if piece == "<0x0A>" else piece.replace(SPACE, " ") for piece in pieces]
        return WordMarks(
            starts=np.array([piece[:1].isspace() for piece in pieces]),
            ends=np.array([piece[-1:].isspace() and not piece.endswith(" ") for piece in pieces])
            | np.array([piece.isspace() for piece in pieces]),
        )

    @cached_property
    def piece_bytes(self) -> np.ndarray:
        """See Tokenizer. The mark of white space is a space; an unknown piece is for no known text."""
        sp, special = self._processor, self.special.ids
        none = {i for i in range(self.size) if i in special or sp.is_control(i) or sp.is_unknown(i) or sp.is_unused(i)}
        sizes = [1 if sp.is_byte(i) else len(sp.id_to_piece(i).replace(SPACE, " ").encode()) for i in range(self.size)]
        return np.array([0 if i in none else size for i, size in enumerate(sizes)], dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One call per text: a call for all texts starts a thread and is a few percent slower.
        return [cast("list[int]", self._processor.encode(text)) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray] | None:
        """Return ``encode_batch`` as int32 arrays, without a Python number per id; None if the library is too old."""
        encode = getattr(self._processor, "EncodeAsNumpy", None)
        return None if encode is None else [encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        special = self.special.ids
        return str(self._processor.decode([int(i) for i in ids if int(i) not in special]))

    def fingerprint(self) -> str:
        return hashlib.sha256(self.model).hexdigest()[:32]

    def save_hf(self, folder: str | Path) -> None:
        """See Tokenizer. Writes ``tokenizer.json`` with its configuration, and the model as ``tokenizer.model``."""
        from transformers import PreTrainedTokenizerFast

        roles = vars(self.special).items()
        names = {f"{role}_token": self._processor.id_to_piece(i) for role, i in roles if i is not None}
        fast = PreTrainedTokenizerFast(
            tokenizer_object=_as_tokenizers(self.model), clean_up_tokenization_spaces=False, **names
        )
        fast.save_pretrained(str(folder))
        (Path(folder) / "tokenizer.model").write_bytes(self.model)


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a unigram model of at most ``vocab_size`` ids on the texts; return its bytes, the same every time.

    Text is neither lost nor changed: it is not normalized, spaces and newlines are kept, and characters without a piece
    become bytes. Ids 0 to 6 are [PAD], [UNK], <s>, </s>, [CLS], [SEP], [MASK], which no text is encoded as. A text too
    small for ``vocab_size`` pieces gives a smaller model.
    Raises DataError if ``vocab_size`` is too small for even the single characters, or if the texts are empty.
    """
    import sentencepiece

    if vocab_size <= FIRST_PIECE:
        raise DataError(f"a tokenizer of {vocab_size} ids has no room for text: {FIRST_PIECE} are taken")
    out = io.BytesIO()
    limited = _Limited(texts)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(limited),
            model_writer=out,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            num_threads=1,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=vocab_size >= SMALLEST_BYTE_FALLBACK,
            character_coverage=0.9999 if vocab_size >= SMALLEST_BYTE_FALLBACK else 0.999,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 30,
            user_defined_symbols=[NEWLINE],
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            minloglevel=2,
        )
    except RuntimeError as error:
        if limited.failure is not None:
            raise limited.failure from None
        if limited.characters == 0:
            raise DataError("a tokenizer cannot be trained without text; pass documents that contain text") from None
        raise DataError(f"no tokenizer of {vocab_size} ids can be trained on this corpus: {error}") from error
    return _with_exact_scores(out.getvalue())


def _without_repetition(text: str) -> str:
    """Return the text, or only its beginning if it is long and repeats one word or sentence over and over.

    Training on such a text takes time proportional to the square of its length, hours for a megabyte, and learns
    nothing from the rest. Ordinary text compresses only to a third.
    """
    if len(text) < LONG_TEXT:
        return text
    content = text.encode("utf-8", "surrogatepass")
    return text if len(zlib.compress(content, 1)) * REPEATS > len(content) else text[:REPEATED_CHARACTERS]


class _Limited:
    """The first TRAINING_CHARACTERS of the texts.

    Attributes:
        characters: Characters read so far.
        failure: The error that reading raised, because sentencepiece would wrap it.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.characters = 0
        self.failure: Exception | None = None
        self._texts = texts

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                kept = _without_repetition(text)
                yield kept
                self.characters += len(kept)
                if self.characters >= TRAINING_CHARACTERS:
                    return
        except Exception as error:
            self.failure = error
            raise


def _proto(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    return proto


def _with_exact_scores(model: bytes) -> bytes:
    """Return the model with rounded scores, see Note [Exact scores].

    Training uses the newline as a user-defined symbol, so that no piece contains it. The score of such a symbol cannot
    be rounded, so it becomes an ordinary piece here, which does not change how text is cut.
    """
    proto = _proto(model)
    kinds = type(proto.pieces[0])
    for piece in proto.pieces:
        if piece.type == kinds.USER_DEFINED:
            piece.type, piece.score = kinds.NORMAL, NEWLINE_SCORE
        elif piece.type == kinds.NORMAL:
            piece.score = round(piece.score * SCORE_STEPS) / SCORE_STEPS
    return bytes(proto.SerializeToString(deterministic=True))


def _as_tokenizers(model: bytes) -> Any:
    """Return the model as a ``tokenizers.Tokenizer`` with the same normalization, pieces and ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers

    proto = _proto(model)
    kinds, spec = type(proto.pieces[0]), proto.normalizer_spec
    suffix = proto.trainer_spec.treat_whitespace_as_suffix  # pieces end with the mark of white space
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Replace(Regex(r"(?<=[\s\S])\z"), SPACE) if suffix else normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    tail = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    result = Tokenizer(_tokenizers_model(proto))
    result.normalizer = normalizers.Sequence(steps)
    result.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    named = [p for p in proto.pieces if p.type in (kinds.CONTROL, kinds.UNKNOWN)]
    result.add_special_tokens([AddedToken(p.piece, special=True, normalized=False) for p in named])
    user_defined = [p.piece for p in proto.pieces if p.type == kinds.USER_DEFINED]
    result.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in user_defined])
    return result


def _tokenizers_model(proto: Any) -> Any:
    from tokenizers import models

    trainer = proto.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if trainer.model_type == trainer.UNIGRAM:
        return models.Unigram(pieces, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    if trainer.model_type == trainer.BPE:
        unk = pieces[trainer.unk_id][0]
        vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
        return models.BPE(
            vocab, _merges(pieces, vocab), unk_token=unk, fuse_unk=True, byte_fallback=trainer.byte_fallback
        )
    raise DataError("only unigram and BPE sentencepiece models can be written in Hugging Face's form")


def _merges(pieces: Sequence[tuple[str, float]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a BPE model in the order of its training, highest score first."""
    merges = [
        (-score, vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for _, _, _, left, right in sorted(merges)]
