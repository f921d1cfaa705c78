"""Which answers SAO may learn from."""

from __future__ import annotations

from typing import Any

import pytest

from app.services.trainability import untrainable_reason


@pytest.mark.parametrize(
    ("request_fields", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7, "seed": 1, "max_tokens": 5, "stop": ["x"], "ignore_eos": True}),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0}, {"top_p": 1.0, "top_k": 0, "presence_penalty": 0.0}),
        ({"logit_bias": None, "response_format": {"type": "text"}}, {"min_tokens": 0}),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, {}),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, {}),
    ],
)
def test_whole_distribution_is_trainable(request_fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert untrainable_reason(request_fields, sampling) is None


@pytest.mark.parametrize(
    ("request_fields", "sampling", "word"),
    [
        ({"temperature": 0}, {"temperature": 0.0}, "temperature"),
        ({}, {"top_p": 0.99}, "top_p"),
        ({}, {"top_k": 50}, "top_k"),
        ({}, {"min_p": 0.1}, "min_p"),
        ({}, {"presence_penalty": 0.1}, "presence_penalty"),
        ({}, {"frequency_penalty": -0.1}, "frequency_penalty"),
        ({}, {"repetition_penalty": 1.1}, "repetition_penalty"),
        ({}, {"min_tokens": 5}, "min_tokens"),
        ({"logit_bias": {"5": 1}}, {}, "logit_bias"),
        ({}, {"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({}, {"bad_words": ["x"]}, "bad_words"),
        ({}, {"structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, {}, "response_format"),
        ({"tools": [{}], "tool_choice": "required"}, {}, "tool_choice"),
        ({"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}}, {}, "tool_choice"),
    ],
)
def test_changed_distribution_is_not_trainable(
    request_fields: dict[str, Any], sampling: dict[str, Any], word: str
) -> None:
    reason = untrainable_reason(request_fields, sampling)
    assert reason is not None
    assert word in reason
