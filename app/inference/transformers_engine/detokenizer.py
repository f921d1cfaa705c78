"""Tokens to text, one token at a time.

Invariant: the pieces handed out concatenate to the decoded text up to a stop string, and none of them ends inside
a UTF-8 character. Bytes that never became a character are dropped, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "�"
NUM_CONTEXT_TOKENS = 5
"""Prompt tokens kept before the first generated one, so that tokenizers that strip a leading space do not."""


class Detokenizer:
    """Incremental text of one sequence. `stopped_by` is the stop string that ended it, once one has."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
        self._prefix = 0
        self._read = len(self._ids)
        self._text = ""
        self._num_emitted = 0
        # Text that could be the beginning of a stop string is held back until it is not.
        self._held_back = 0 if include_stop else max((len(s) - 1 for s in stop), default=0)
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> None:
        """Take one generated token; looks for stop strings in the text it completes."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._prefix : self._read])
        extended = self._decode(self._ids[self._prefix :])
        if len(extended) <= len(known) or extended.endswith(REPLACEMENT):
            return
        self._prefix, self._read = self._read, len(self._ids)
        searched_from = max(0, len(self._text) - max((len(s) - 1 for s in self._stop), default=0))
        self._text += extended[len(known) :]
        found = [(self._text.find(s, searched_from), s) for s in self._stop]
        matches = [(position, s) for position, s in found if position >= 0]
        if matches:
            position, self.stopped_by = min(matches)
            self._text = self._text[: position + (len(self.stopped_by) if self._include_stop else 0)]

    def take(self, finished: bool) -> str:
        """The text that has become certain since the last call; all of it once the sequence has finished."""
        end = len(self._text) if finished else max(self._num_emitted, len(self._text) - self._held_back)
        piece = self._text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)
