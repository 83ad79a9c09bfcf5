"""Encoding, and the law that decoding rests on, for every kind of decoder."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.chat.template import ChatTemplate
from text_generation_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.trainers import BpeTrainer

CORPUS = ["Hello world, naïve café!", "日本語のテキスト 😀😀", "def f(x):\n    return x\n\n"] * 3


def byte_level() -> FastTokenizer:
    """GPT-2's and Llama 3's kind: every byte has a character."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("\n\n  ", normalized=False), "ça va"])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def byte_fallback() -> FastTokenizer:
    """Llama 2's kind: sentencepiece with a token for each byte and a stripped first space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghi", "▁a", "▁b", "ab", "▁▁", "é", "�"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "▁")]
    tokenizer = FastTokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> FastTokenizer:
    """T5's kind: sentencepiece without bytes."""
    pieces = ["<unk>", "▁", *"abcdefghi", "▁a", "▁b", "ab", "▁▁"]
    tokenizer = FastTokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> FastTokenizer:
    """BERT's kind: continuations are marked, words are not."""
    pieces = ["[UNK]", "a", "b", "##a", "##b", "ab", ",", "'", "n't", "##!"]
    tokenizer = FastTokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def no_decoder() -> FastTokenizer:
    """Words, joined by spaces."""
    return FastTokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))


FAST = {
    make.__name__: make() for make in (byte_level, byte_fallback, metaspace, word_piece, no_decoder)
}
TOKENIZERS = {name: Tokenizer(fast, {}, num_workers=1) for name, fast in FAST.items()}
BYTE_TOKEN = re.compile(r"<0x(..)>")


def stream(name: str, ids: Sequence[int]) -> str:
    decoder = TOKENIZERS[name].stream_decoder()
    return "".join(map(decoder.step, ids)) + decoder.flush()


def decode(name: str, ids: Sequence[int]) -> str:
    return FAST[name].decode(list(ids), skip_special_tokens=False)


def prompt_of(name: str) -> list[int]:
    """Something to continue, whose text is whole."""
    return FAST[name].encode("ab").ids


@pytest.mark.parametrize("name", sorted(FAST))
@given(data=st.data())
def test_the_stream_is_the_decoding_of_the_whole(name: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, TOKENIZERS[name].vocab_size + 2), max_size=30))
    if name == "byte_fallback":
        ids = [i for i in ids if not BYTE_TOKEN.fullmatch(FAST[name].id_to_token(i) or "")]
    prompt = prompt_of(name)
    assert decode(name, prompt) + stream(name, ids) == decode(name, prompt + ids)


@given(
    text=st.lists(
        st.text(max_size=5) | st.sampled_from(["ça va", "\n\n  ", "<s>", "Hello", "▁", "ab", "😀"]),
        max_size=20,
    ).map("".join),
    name=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_a_text_has_no_fewer_tokens_than_its_bytes_say(text: str, name: str) -> None:
    num_tokens = len(FAST[name].encode(text, add_special_tokens=False).ids)
    assert TOKENIZERS[name].least_tokens(text) <= num_tokens
    assert TOKENIZERS[name].least_tokens("x" * 10_000) > 100


def test_each_id_has_its_own_text() -> None:
    ids = FAST["byte_fallback"].encode(" a€").ids
    texts = TOKENIZERS["byte_fallback"].decode_each([*ids, 10_000])
    assert texts == [" ", " a", "�", "�", "�", ""]
    assert TOKENIZERS["word_piece"].decode_each([1, 3]) == [" a", "a"]


def test_plain_text_is_whole_characters_of_text() -> None:
    for name, tokenizer in TOKENIZERS.items():
        for token_id in range(tokenizer.vocab_size):
            [text] = tokenizer.decode_each([token_id])
            is_plain = not tokenizer.is_special(token_id) and text.encode() == (
                tokenizer.token_bytes(token_id)
            )
            assert tokenizer.plain_text(token_id) == (text if is_plain else None), (name, token_id)


async def test_encode() -> None:
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))]
    )
    fast.enable_truncation(2)
    fast.enable_padding(length=9)
    tokenizer = Tokenizer(fast, {}, num_workers=1)
    encoding = await tokenizer.encode("caf€ 😀 x")
    assert encoding.ids[0] == fast.token_to_id("<s>")
    assert next(encoding.offsets) == (0, 0)
    assert stream("byte_level", encoding.ids[1:]) == "caf€ 😀 x"
    # Offsets count characters, not bytes.
    assert max(end for _, end in encoding.offsets) == len("caf€ 😀 x")
    assert (await tokenizer.encode("caf€ 😀 x", add_special_tokens=False)).ids == encoding.ids[1:]
    assert (await tokenizer.encode("", add_special_tokens=False)).num_bytes == 0


async def test_text_that_is_not_unicode_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        await TOKENIZERS["byte_level"].encode("a\ud800b")


# ---- Loading ----


def save(fast: FastTokenizer, directory: Path, **files: object) -> Path:
    fast.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_special_tokens_come_from_all_three_files(tmp_path: Path) -> None:
    fast = byte_level()
    fast.add_tokens(["<config>", "<map>", "<extra>", "<named>", "<id>", "<plain>"])
    tokenizer = Tokenizer.load(
        save(
            fast,
            tmp_path,
            tokenizer_config={
                "bos_token": {"content": "<config>", "lstrip": False},
                "eos_token": None,
                "additional_special_tokens": ["<extra>", "<not in the vocabulary>", 7],
                "extra_special_tokens": {"image_token": "<named>"},
                "added_tokens_decoder": {
                    str(fast.token_to_id("<id>")): {"content": "<id>", "special": True},
                    str(fast.token_to_id("<plain>")): {"content": "<plain>", "special": False},
                },
            },
            special_tokens_map={"unk_token": "<map>"},
        )
    )
    special = [t for t, i in fast.get_vocab().items() if tokenizer.is_special(i)]
    assert sorted(special) == ["</s>", "<config>", "<extra>", "<id>", "<map>", "<named>", "<s>"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<config>", None)
    assert tokenizer.vocab_size == fast.get_vocab_size()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": "{}"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": FastTokenizer(models.BPE()).to_str()}, "tokenizer.json has no tokens"),
        ({"tokenizer_config.json": "{", "tokenizer.json": None}, "config.json is not valid JSON"),
        ({"tokenizer_config.json": "[]", "tokenizer.json": None}, "must hold a JSON object"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_says_why(
    tmp_path: Path, files: dict[str, str | None], sentence: str
) -> None:
    save(byte_level(), tmp_path)
    if "tokenizer.json" not in files:
        (tmp_path / "tokenizer.json").unlink()
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({}, (["<s>"], [])),
        ({"add_bos_token": True, "add_eos_token": True}, (["<s>"], ["</s>"])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": False, "add_eos_token": True}, ([], ["</s>"])),
        ({"add_bos_token": None, "tokenizer_class": "LlamaTokenizer"}, (["<s>"], [])),
        # Without such a token, and for other classes, tokenizer.json decides.
        ({"bos_token": None}, (["</s>"], [])),
        ({"bos_token": "<not a token>"}, (["</s>"], [])),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, (["</s>"], [])),
        ({"tokenizer_class": ["LlamaTokenizer"]}, (["</s>"], [])),
    ],
)
async def test_a_llama_tokenizer_adds_what_its_settings_say(
    settings: dict[str, object], added: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """As TGI's router does."""
    fast = byte_level()
    plain = fast.encode("ab").ids
    fast.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", fast.token_to_id("</s>"))]
    )
    given = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer.load(save(fast, tmp_path, tokenizer_config=given | settings))
    before, behind = ([fast.token_to_id(token) for token in tokens] for tokens in added)
    assert list((await tokenizer.encode("ab")).ids) == [*before, *plain, *behind]
    assert list((await tokenizer.encode("ab", add_special_tokens=False)).ids) == plain


@pytest.mark.parametrize("value", [None, ["x"], {"x": {"special": True}}, -1], ids=repr)
def test_wrong_settings_work_or_are_one_sentence(value: object, tmp_path: Path) -> None:
    for name in ("bos_token", "added_tokens_decoder", "extra_special_tokens", "chat_template"):
        given = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", name: value}
        save(byte_level(), tmp_path, tokenizer_config=given)
        try:
            Tokenizer.load(tmp_path)
            ChatTemplate.load(tmp_path, None)
        except ValueError as error:
            assert name in str(error) and "\n" not in str(error)
