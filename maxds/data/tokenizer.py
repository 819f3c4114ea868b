"""Text to token ids and back: bytes, Hugging Face tokenizers, SentencePiece."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxds.data.error import DataError

# Tried in this order where no tokenizer_config.json names the token.
_USUAL_EOS = ("<｜end▁of▁sentence｜>", "<|endoftext|>", "<eos>", "</s>")  # noqa: RUF001

_PART = "\ufffd"  # in the text of a token: it is a part of a character, or none


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back; safe to share between threads.

    `encode` takes str or UTF-8 bytes and returns int32 [tokens], without `eos`, but with what begins every text where
    tokenizer_config.json has `add_bos_token`; bytes that are not UTF-8 raise UnicodeDecodeError, except from the bytes
    tokenizer, which takes any. `decode` leaves out special tokens and ids that the tokenizer does not know.
    """

    vocab_size: int  # one more than the largest id
    eos: int  # ends every document
    digest: str  # of everything that decides the ids
    encode: Callable[[str | bytes], np.ndarray]
    decode: Callable[[Iterable[int]], str]
    spell: Callable[[int], tuple[str, str]]  # one token, special ones too: its text, which may not be whole; its name


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer `name`: `bytes`, or the path of a tokenizer.json or SentencePiece .model.

    `bytes` has 257 ids: 0 to 255 for the bytes of UTF-8, 256 for the end of a document.

    Raises:
        DataError: there is no such file, it is of another kind, or it has no end-of-document token.
    """
    if name == "bytes":
        return _bytes()
    path = Path(name).expanduser()
    loaders = {".json": _hugging_face, ".model": _sentencepiece}
    if path.suffix not in loaders:
        raise DataError(
            f"data.tokenizer={name} is of an unknown kind; use `bytes`, or the path of a Hugging Face tokenizer.json "
            f"or of a SentencePiece .model"
        )
    if not path.is_file():
        raise DataError(f"data.tokenizer={name} is not a file; correct the path, or use `bytes`")
    return loaders[path.suffix](path)


def classes(name: str, tokenizer: Tokenizer, vocab_size: int, expected: int) -> np.ndarray:
    """What each token counts as in the n-grams of an Engram, int32 [vocab_size] (arXiv 2601.07372, section 2.2).

    Tokens whose texts differ in case, accents, width or blanks only are of one class; a token that is no text by itself
    is of its own. Ids that the tokenizer does not know, and which no text has, are of class 0.

    Raises:
        DataError: there are not as many classes as expected.
    """
    from tokenizers import Regex, normalizers

    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    plain, strip = normalizers.Sequence([*steps, normalizers.Replace(Regex(r"[ \t\r\n]+"), " ")]), normalizers.Strip()

    def key(token: int) -> str:
        text, own = tokenizer.spell(token)
        if _PART in text:
            return own
        found = plain.normalize_str(text)
        return (found if found == " " else strip.normalize_str(found)) or text

    seen: dict[str, int] = {}
    found = [seen.setdefault(key(token), len(seen)) for token in range(tokenizer.vocab_size)]
    if len(seen) != expected:
        raise DataError(
            f"model.engram_compressed_vocab_size={expected}, but data.tokenizer={name} has tokens of {len(seen)} "
            f"classes; set it to {len(seen)}, or to null to leave tokens as they are"
        )
    return np.array((found + [0] * vocab_size)[:vocab_size], np.int32)


def _text(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _file_digest(path: Path, eos: int, bos: Sequence[int] = ()) -> str:
    named = "".join([f"eos={eos}", *(f" bos={token}" for token in bos)])
    return hashlib.sha256(path.read_bytes() + named.encode()).hexdigest()


def _bytes() -> Tokenizer:
    eos = 256

    def encode(text: str | bytes) -> np.ndarray:
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, np.uint8).astype(np.int32)

    def decode(ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < eos).decode(errors="replace")

    def spell(token: int) -> tuple[str, str]:
        return bytes([token] if token < eos else []).decode(errors="replace") or _PART, f"<{token}>"

    return Tokenizer(eos + 1, eos, "bytes", encode, decode, spell)


def _hugging_face(path: Path) -> Tokenizer:
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"data.tokenizer={path} is not a Hugging Face tokenizer.json: {error}") from error
    # A file keeps what its last user cut and padded texts to.
    model.no_truncation()
    model.no_padding()
    bos, eos = _hugging_face_ends(model, path)

    def encode(text: str | bytes) -> np.ndarray:
        # Unlike `encode`, this lets other threads run meanwhile.
        (encoded,) = model.encode_batch_fast([_text(text)], add_special_tokens=False)
        return np.array([*bos, *encoded.ids], np.int32)

    def decode(ids: Iterable[int]) -> str:
        return model.decode([int(i) for i in ids])

    def spell(token: int) -> tuple[str, str]:
        return model.decode([token], skip_special_tokens=False), model.id_to_token(token) or ""

    # Ids may have holes, so that the number of tokens is not a bound.
    vocab_size = max(model.get_vocab().values()) + 1
    if vocab_size > 2**31:
        raise DataError(f"data.tokenizer={path} has ids up to {vocab_size - 1}, beyond 2^31 - 1; make it anew")
    return Tokenizer(vocab_size, eos, _file_digest(path, eos, bos), encode, decode, spell)


def _hugging_face_ends(model, path: Path) -> tuple[list[int], int]:
    """Returns the ids of what begins a document, if anything does, and of what ends it.

    They are what tokenizer_config.json names; without a name for the end, a usual one.
    """
    settings = path.with_name("tokenizer_config.json")
    found = _read_settings(settings) if settings.is_file() else {}
    begin = _named("bos_token", found, settings) if found.get("add_bos_token") is True else None
    if begin is not None and model.token_to_id(begin) is None:
        raise DataError(f"{settings} has bos_token {begin!a}, which {path.name} has not; name one of its tokens")
    bos = [] if begin is None else [model.token_to_id(begin)]
    end = _named("eos_token", found, settings)
    names = _USUAL_EOS if end is None else (end,)
    for name in names:
        if (eos := model.token_to_id(name)) is not None:
            return bos, eos
    raise DataError(
        f"data.tokenizer={path} has no end-of-document token {' or '.join(names)}; name one of its tokens as "
        f"`eos_token` in {settings.name} beside it"
    )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again, or remove it") from error
    return found if isinstance(found, dict) else {}


def _named(key: str, found: dict[str, Any], settings: Path) -> str | None:
    named = found.get(key)
    text = named.get("content") if isinstance(named, dict) else named
    # JSON can spell halves of characters, which no token has.
    if (
        not isinstance(text, str | None)
        or (text is None) != (named is None)
        or re.search("[\ud800-\udfff]", text or "")
    ):
        raise DataError(f"{settings} has {key} {named!a}; name one of the tokens")
    return text


def _sentencepiece(path: Path) -> Tokenizer:
    import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except RuntimeError as error:
        raise DataError(f"data.tokenizer={path} is not a SentencePiece model: {error}") from error
    vocab_size, eos = model.vocab_size(), model.eos_id()
    if eos < 0:
        raise DataError(f"data.tokenizer={path} has no end-of-document token; train it with an eos_id")
    try:
        model.id_to_piece(list(range(vocab_size)))
    except UnicodeDecodeError as error:
        raise DataError(f"data.tokenizer={path} has a token that is not UTF-8 ({error}); fetch it again") from error

    def encode(text: str | bytes) -> np.ndarray:
        return np.array(model.encode(_text(text)), np.int32)

    def decode(ids: Iterable[int]) -> str:
        return model.decode([int(i) for i in ids if i < vocab_size])

    def spell(token: int) -> tuple[str, str]:
        return model.decode([token]) or _PART, model.id_to_piece(token)

    return Tokenizer(vocab_size, eos, _file_digest(path, eos), encode, decode, spell)
