"""Whether SAO can learn from an answer, decided by how it was sampled (SAO.md section 2). Pure.

Invariant: a trajectory is trainable only if its behaviour log-probabilities belong to the whole distribution of the
policy at the sampling temperature. Anything that cuts, bends or masks that distribution makes it untrainable.
"""

from __future__ import annotations

from typing import Any

from store.types import JsonObject

NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "structured_outputs": (None, {}),
    "thinking_token_budget": (None,),
    "watermarking": (None, False),
    "vllm_xargs": (None, {}),
    "extra_args": (None, {}),
}
"""Sampling parameters that change the distribution, each with the values that do not. vLLM leaves defaults out."""


def untrainable_reason(request: JsonObject, sampling: JsonObject) -> str | None:
    """Return why an answer to `request`, sampled with the engine's resolved `sampling`, cannot be trained, or None.

    Both are looked at: a model's own generation config may cut the distribution without the client's asking, and a
    grammar may be gone from the resolved parameters.
    """
    if sampling.get("temperature", 1.0) == 0:
        return "temperature is 0: nothing was sampled"
    for name, neutral in NEUTRAL_SAMPLING.items():
        for source in (sampling, request):
            if source.get(name) not in neutral:
                return f"{name} changes the distribution that was sampled from"
    if (request.get("response_format") or {}).get("type", "text") != "text":
        return "response_format puts a grammar on the answer"
    if request.get("tools") and request.get("tool_choice") not in (None, "none", "auto"):
        return "tool_choice puts a grammar on the answer"
    return None
