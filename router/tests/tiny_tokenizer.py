"""The maker of tiny tokenizers: pieces without merges, one for each byte where none are given."""

from collections.abc import Sequence
from pathlib import Path

from text_generation_router.text.tokenizer import Tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

BOS_ID, EOS_ID = 256, 257
VOCAB_SIZE = 258
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny_tokenizer(
    pieces: Sequence[str] = ALPHABET,
    special: Sequence[str] = ("<s>", "</s>"),
    words: Sequence[str] = (),
    *,
    has_bos: bool = False,
) -> FastTokenizer:
    """Ids are places in `pieces`, `special` and `words`, which are ordinary tokens that are found
    in any text. has_bos: `<s>` is put in front of texts."""
    fast = FastTokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(special))
    fast.add_tokens(list(words))
    if has_bos:
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))]
        )
    return fast


def make_tokenizer(fast: FastTokenizer | None = None) -> Tokenizer:
    """The router's tokenizer over `fast`, or over one token per byte with `<s>` and `</s>`."""
    return Tokenizer(tiny_tokenizer() if fast is None else fast, {}, num_workers=1)


def write_tokenizer(directory: Path, words: Sequence[str] = ()) -> None:
    """A file with one token per byte, `<s>` in front."""
    tiny_tokenizer(words=words, has_bos=True).save(str(directory / "tokenizer.json"))


def script_of(text: str) -> list[int]:
    """The ids of the bytes of a text."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = spelled.pre_tokenize_str(text)
    return [ALPHABET.index(character) for characters, _ in found for character in characters]


def ids_of(text: str) -> tuple[int, ...]:
    """The same, as prompts have them."""
    return tuple(script_of(text))
