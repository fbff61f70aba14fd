"""Special tokens around prompts, truncation as transformers does it, and fill-in-the-middle."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from heedful.text import Tokenizer
from heedful.text.prompt import encode_fill_in_the_middle, special_affixes, tokenize_prompt, truncate_prompt


def words(template: str = "<s> $A", *special: str) -> Tokenizer:
    names = ["<s>", "</s>", *special]
    vocab = {word: i for i, word in enumerate([*names, *"abcdefghij"])}
    backend = Backend(WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens(names)
    backend.post_processor = TemplateProcessing(template, special_tokens=[(n, vocab[n]) for n in names])
    return Tokenizer(backend, roles={"bos": "<s>", "eos": "</s>"})


@pytest.mark.parametrize("template", ["<s> $A", "$A </s>", "<s> $A </s>", "$A"])
@pytest.mark.parametrize("n", [3, 5, 10, 11, 12, 13, 50])
def test_truncation_is_that_of_transformers_on_the_left(template, n):
    from transformers import PreTrainedTokenizerFast

    ours, text = words(template), "a b c d e f g h i j"
    theirs = PreTrainedTokenizerFast(tokenizer_object=words(template).backend, truncation_side="left")
    expected = theirs(text, truncation=True, max_length=n)["input_ids"]
    assert truncate_prompt(ours, ours.encode(text, add_special=True), n) == expected
    assert tokenize_prompt(ours, text, {"truncate_prompt_tokens": n}) == expected


def test_no_room_for_a_text():
    tokenizer = words("<s> $A </s>")
    assert special_affixes(tokenizer) == ([0], [1])
    with pytest.raises(ValueError, match="no room"):
        truncate_prompt(tokenizer, tokenizer.encode("a b c", add_special=True), 2)


def test_special_tokens_around_a_prompt_are_an_option():
    tokenizer = words()
    assert tokenize_prompt(tokenizer, "a b", {}) == [0, 2, 3]
    assert tokenize_prompt(tokenizer, "a b", {"add_special_tokens": False}) == [2, 3]
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert tokenize_prompt(tokenizer, "a b", {"chat": True}) == [2, 3]
    assert tokenize_prompt(tokenizer, "a b", {"chat": True, "add_special_tokens": True}) == [0, 2, 3]
    with pytest.raises(ValueError, match="chat=True"):
        tokenize_prompt(tokenizer, "a b", {"continue_final_message": True})


def test_special_tokens_in_a_prompt_are_text_unless_allowed():
    tokenizer = words("$A </s>", "<extra_id_0>")
    sentinel = tokenizer.id("<extra_id_0>")
    assert sentinel not in tokenize_prompt(tokenizer, "a <extra_id_0> b", {})
    assert tokenize_prompt(tokenizer, "a <extra_id_0> b", {"allow_special": True}) == [3, sentinel, 4, 1]
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert sentinel not in tokenize_prompt(tokenizer, "a <extra_id_0> b", {"chat": True})
    with pytest.raises(ValueError, match="from its template alone"):
        tokenize_prompt(tokenizer, "a", {"chat": True, "allow_special": True})


def test_fill_in_the_middle_puts_prefix_and_suffix_before_the_middle():
    tokenizer = words("<s> $A", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>")
    ids, end = encode_fill_in_the_middle(tokenizer, "a b", "c <fim_middle>")
    named = [tokenizer.token(i) for i in ids]
    assert named[:7] == ["<s>", "<fim_prefix>", "a", "b", "<fim_suffix>", "c", *named[6:7]]
    assert named.count("<fim_middle>") == 1 and named[-1] == "<fim_middle>"  # what a user types is text
    assert end == tokenizer.id("<|endoftext|>")
    with pytest.raises(ValueError, match="fill in the middle"):
        encode_fill_in_the_middle(words(), "a", "b")
