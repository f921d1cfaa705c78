"""What a chat request may hold: OpenAI's parameters, checked, and those that only the engine knows, by name.

Invariant: every parameter is either checked here, or known to vLLM, or refused by name. The checked model decides;
the request that reaches the engine is the client's own JSON.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from store.types import JsonObject

ENGINE_PARAMETERS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "length_penalty",
        "min_p",
        "min_tokens",
        "parallel_tool_calls",
        "priority",
        "reasoning_effort",
        "repetition_detection",
        "repetition_penalty",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "structured_outputs",
        "thinking_token_budget",
        "top_k",
        "truncate_prompt_tokens",
        "truncation_side",
        "vllm_xargs",
        "watermarking",
    }
)
"""Parameters beyond OpenAI's that vLLM 0.32 takes in a chat request and that mean something in Tideline's answer.

Left out, so refused: those that change the form of vLLM's own answer (echo, prompt_logprobs, return_token_ids, ...),
those of several engines (kv_transfer_params, ...), of images (mm_*), and beam search, which samples nothing.
"""

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]


def _as_text_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class TextPart(BaseModel):
    """One text part of a message's content; images and sound are refused."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One message of the conversation; further fields (`name`, `tool_calls`, ...) reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[list[TextPart] | None, BeforeValidator(_as_text_parts)] = None
    tool_calls: list[JsonObject] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Flag | None = None


class ChatRequest(BaseModel):
    """Body of POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], Field(min_length=1)]
    model: Text | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    n: Annotated[Integer, Field(ge=1, le=128)] | None = None
    stop: Annotated[list[Annotated[Text, Field(min_length=1)]] | None, BeforeValidator(_as_list)] = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    response_format: JsonObject | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    metadata: JsonObject | None = None
    store: Flag | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        unknown = sorted((self.model_extra or {}).keys() - ENGINE_PARAMETERS)
        if unknown:
            raise ValueError(f"{unknown[0]} is an unknown parameter")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self

    @property
    def parses_tools(self) -> bool:
        """True when the answer may hold tool calls, so that it has to be parsed as a whole."""
        return bool(self.tools) and self.tool_choice != "none"
