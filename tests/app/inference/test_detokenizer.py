"""Pieces of text concatenate to the decoded text and never break a character or show a stop string."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.inference.transformers_engine.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_model_dir)
    return loaded


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    taken = []
    for token_id in token_ids:
        detokenizer.push(token_id)
        stopped = detokenizer.stopped_by is not None
        taken.append(detokenizer.take(finished=stopped))
        if stopped:
            return taken
    return [*taken, detokenizer.take(finished=True)]


@settings(max_examples=60)
@given(text=st.text(max_size=40), prompt=st.text(max_size=10))
def test_pieces_concatenate_to_the_text(tokenizer: PreTrainedTokenizerBase, text: str, prompt: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode(prompt, add_special_tokens=False))
    taken = pieces(detokenizer, token_ids)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    # A text that itself ends in U+FFFD looks like an unfinished character to the last.
    assert "".join(taken) == whole or whole.endswith("�")


def test_piece_waits_for_a_whole_character(tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = tokenizer.encode("a潮b", add_special_tokens=False)
    assert len(token_ids) == 5
    assert pieces(Detokenizer(tokenizer, []), token_ids) == ["a", "", "", "潮", "b", ""]
    assert "".join(pieces(Detokenizer(tokenizer, []), token_ids[:3])) == "a"


@settings(max_examples=60)
@given(
    text=st.text("abc ", min_size=3, max_size=40), stop=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3)
)
def test_no_piece_shows_a_stop_string(tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str]) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [], stop=tuple(stop))
    shown = "".join(pieces(detokenizer, token_ids))
    first = min((text.index(s) for s in stop if s in text), default=None)
    assert (detokenizer.stopped_by is None) == (first is None)
    if first is None:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(s in shown for s in stop)


def test_stop_string_is_kept_when_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = tokenizer.encode("one two three", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [], stop=("two",), include_stop=True)
    assert "".join(pieces(detokenizer, token_ids)) == "one two"
