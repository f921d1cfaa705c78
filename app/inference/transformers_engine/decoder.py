"""A batch of sequences that decodes together, its KV cache, and the weights they are sampled with.

    add -> waiting --prefill--> running --one token per step--> finished
              ^                    |
              +---- recompute -----+   (its KV cache is dropped; its tokens are not)

Invariant: a running row's cache holds all of its tokens but the last, in the same order of rows as `_running`.
Rows are padded on the left; `_mask_BL` is 1 on real tokens. Nothing here is thread-safe: one thread owns a decoder.

Shape legend: B sequences, L cached positions, T tokens of one prompt, V vocabulary, H heads, D head width.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from app.inference.checkpoint import load_checked_tensors, read_shapes, with_tied_head
from app.inference.transformers_engine.detokenizer import Detokenizer
from app.inference.transformers_engine.sampling import Sampling, draw, processed_logprobs
from store.types import VersionSpan

MAX_PREFILL_TOKENS = 4096
"""Padded tokens in one prefill, so that a burst of long prompts does not exhaust the memory."""


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One sampled token of one sequence, its log-probability as sampled, and the text that has become certain.

    `top_logprobs` holds (token id, log-probability), most likely first. The last token of a sequence has
    `finish_reason` (`stop` or `length`) and the version spans of all of them.
    """

    sequence_id: str
    token_id: int
    logprob: float
    text: str
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    version_spans: tuple[VersionSpan, ...] | None = None


@dataclass(slots=True)
class _Sequence:
    id: str
    token_ids: list[int]
    sampling: Sampling
    detokenizer: Detokenizer
    generator: torch.Generator | None
    num_generated: int = 0
    version_starts: list[tuple[int, int]] = field(default_factory=list)

    def version_spans(self) -> tuple[VersionSpan, ...]:
        ends = [start for _, start in self.version_starts[1:]] + [self.num_generated]
        return tuple(
            VersionSpan(version, start, end) for (version, start), end in zip(self.version_starts, ends, strict=True)
        )


class Decoder:
    """Continuous batching over a transformers causal LM. `version` labels the weights; tokens are stamped with it."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        max_num_seqs: int = 32,
        max_model_len: int = 1024,
        version: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
        self.max_model_len = max_model_len
        self.version = version
        self._max_num_seqs = max_num_seqs
        self._tied = bool(self.model.config.tie_word_embeddings)
        self._expected = with_tied_head(read_shapes(directory), self._tied)
        self._eos_ids = _eos_ids(self.model.generation_config, self.tokenizer)
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._cache = DynamicCache()
        self._mask_BL = torch.zeros(0, 0, dtype=torch.long)

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queue a sequence. Its prompt must leave room for a token below `max_model_len`."""
        own = None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        detokenizer = Detokenizer(
            self.tokenizer,
            prompt_ids,
            sampling.stop,
            sampling.include_stop_str_in_output,
            sampling.skip_special_tokens,
        )
        self._waiting.append(_Sequence(sequence_id, list(prompt_ids), sampling, detokenizer, own))

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence; one that is not there is not an error."""
        self._waiting = deque(s for s in self._waiting if s.id != sequence_id)
        self._keep([row for row, sequence in enumerate(self._running) if sequence.id != sequence_id])

    @torch.no_grad()
    def step(self) -> list[DecodedToken]:
        """Sample one token for the sequences that join, or else for all that run."""
        joining = self._admit()
        if joining:
            logits_BV = self._prefill(joining)
            offset = len(self._running) - len(joining)
        elif self._running:
            logits_BV = self._decode()
            offset = 0
        else:
            return []
        tokens = self._sample(self._running[offset:], logits_BV)
        finished = {token.sequence_id for token in tokens if token.finish_reason is not None}
        if finished:
            self._keep([row for row, sequence in enumerate(self._running) if sequence.id not in finished])
        return tokens

    @torch.no_grad()
    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probability at temperature 1 of each token after the first, given those before it."""
        logits_TV = self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, :-1].float()
        picked_T = torch.tensor(token_ids[1:])
        scores: list[float] = logits_TV.log_softmax(-1).gather(1, picked_T[:, None])[:, 0].tolist()
        return scores

    @torch.no_grad()
    def load_weights(self, directory: Path) -> None:
        """Put the weights of a policy directory into the model; running sequences go on with them.

        Raises checkpoint.WeightsRefusedError, with the model untouched, for a file that must not be served.
        """
        self.model.load_state_dict(load_checked_tensors(directory, self._expected, self._tied))

    def recompute_running(self) -> None:
        """Drop the KV cache: running sequences are prefilled again, under the weights of that moment."""
        self._waiting.extendleft(reversed(self._running))
        self._keep([])

    def _admit(self) -> list[_Sequence]:
        admitted: list[_Sequence] = []
        longest = 0
        while self._waiting and len(self._running) + len(admitted) < self._max_num_seqs:
            longest = max(longest, len(self._waiting[0].token_ids))
            if admitted and longest * (len(admitted) + 1) > MAX_PREFILL_TOKENS:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, joining: list[_Sequence]) -> torch.Tensor:
        """Run the joining sequences' tokens and add their rows to the batch. Returns logits [B joining, V]."""
        longest = max(len(sequence.token_ids) for sequence in joining)
        ids_BL = torch.zeros(len(joining), longest, dtype=torch.long)
        mask_BL = torch.zeros_like(ids_BL)
        for row, sequence in enumerate(joining):
            ids_BL[row, longest - len(sequence.token_ids) :] = torch.tensor(sequence.token_ids)
            mask_BL[row, longest - len(sequence.token_ids) :] = 1
        cache = DynamicCache()
        logits_BV = self._forward(ids_BL, mask_BL, (mask_BL.cumsum(1) - 1).clamp_min(0), cache)
        if self._running:
            width = max(longest, self._mask_BL.shape[1])
            for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
                mine.keys = torch.cat([_pad_left(mine.keys, width), _pad_left(theirs.keys, width)])
                mine.values = torch.cat([_pad_left(mine.values, width), _pad_left(theirs.values, width)])
            self._mask_BL = torch.cat([_pad_mask(self._mask_BL, width), _pad_mask(mask_BL, width)])
        else:
            self._cache, self._mask_BL = cache, mask_BL
        self._running.extend(joining)
        return logits_BV

    def _decode(self) -> torch.Tensor:
        """Run every row's last token. Returns logits [B, V]."""
        ids_B1 = torch.tensor([[sequence.token_ids[-1]] for sequence in self._running])
        self._mask_BL = torch.cat([self._mask_BL, torch.ones_like(ids_B1)], dim=1)
        return self._forward(ids_B1, self._mask_BL, self._mask_BL.sum(1, keepdim=True) - 1, self._cache)

    def _forward(
        self, ids_BT: torch.Tensor, mask_BL: torch.Tensor, positions_BT: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        output = self.model(
            input_ids=ids_BT,
            attention_mask=mask_BL,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _sample(self, sequences: list[_Sequence], logits_BV: torch.Tensor) -> list[DecodedToken]:
        samplings = [sequence.sampling for sequence in sequences]
        logprobs_BV = processed_logprobs(logits_BV, samplings)
        picked_B = draw(logprobs_BV, samplings, [sequence.generator for sequence in sequences], self._generator)
        picked_logprobs_B = logprobs_BV.gather(1, picked_B[:, None])[:, 0].tolist()
        tokens = []
        for row, (sequence, token_id, logprob) in enumerate(
            zip(sequences, picked_B.tolist(), picked_logprobs_B, strict=True)
        ):
            top: tuple[tuple[int, float], ...] = ()
            if sequence.sampling.num_logprobs:
                best = logprobs_BV[row].topk(min(sequence.sampling.num_logprobs, logprobs_BV.shape[1]))
                top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            tokens.append(self._accept(sequence, token_id, logprob, top))
        return tokens

    def _accept(
        self, sequence: _Sequence, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]
    ) -> DecodedToken:
        """Append a sampled token to its sequence and decide whether it was the last."""
        version = -1 if self.version is None else self.version
        if not sequence.version_starts or sequence.version_starts[-1][0] != version:
            sequence.version_starts.append((version, sequence.num_generated))
        sequence.token_ids.append(token_id)
        sequence.num_generated += 1
        finish_reason, stop_reason = self._stop_check(sequence, token_id)
        return DecodedToken(
            sequence_id=sequence.id,
            token_id=token_id,
            logprob=logprob,
            text=sequence.detokenizer.take(finish_reason is not None),
            top_logprobs=top,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            version_spans=sequence.version_spans() if finish_reason is not None else None,
        )

    def _stop_check(self, sequence: _Sequence, token_id: int) -> tuple[str | None, int | str | None]:
        sampling = sequence.sampling
        if token_id in self._eos_ids and not sampling.ignore_eos:
            return "stop", None
        # A token that ends the sequence adds no text, as in vLLM.
        if token_id in sampling.stop_token_ids:
            return "stop", token_id
        sequence.detokenizer.push(token_id)
        if sequence.detokenizer.stopped_by is not None:
            return "stop", sequence.detokenizer.stopped_by
        if sequence.num_generated >= sampling.max_tokens or len(sequence.token_ids) >= self.max_model_len:
            return "length", None
        return None, None

    def _keep(self, rows: list[int]) -> None:
        """Keep only these rows of the batch, and no more padding than they need."""
        if len(rows) == len(self._running):
            return
        self._running = [self._running[row] for row in rows]
        if not rows:
            self._cache, self._mask_BL = DynamicCache(), torch.zeros(0, 0, dtype=torch.long)
            return
        index = torch.tensor(rows)
        self._mask_BL = self._mask_BL[index]
        padding = int(self._mask_BL.any(0).long().argmax())
        self._mask_BL = self._mask_BL[:, padding:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[index, :, padding:]
            layer.values = layer.values[index, :, padding:]


def _pad_left(states_BHLD: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(states_BHLD, (0, 0, width - states_BHLD.shape[2], 0))


def _pad_mask(mask_BL: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(mask_BL, (width - mask_BL.shape[1], 0))


def _eos_ids(generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = None if generation_config is None else generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(token_id for token_id in [*listed, tokenizer.eos_token_id] if token_id is not None)
