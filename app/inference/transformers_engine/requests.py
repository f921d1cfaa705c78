"""What a request to this engine may hold, checked field by field.

Invariant: a field this engine cannot honour is refused by name; none is silently ignored. The accepted names and the
error messages' form are vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.inference.transformers_engine.sampling import Sampling
from store.types import JsonObject, TidelineError

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True)]
WireModel = TypeVar("WireModel", bound=BaseModel)


class BadRequestError(TidelineError, ValueError):
    """A request that is refused; `param` names the field at fault if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class TextPart(_Wire):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; further fields reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None


class SamplingFields(_Wire):
    """`sampling_params` of a generate request, named as vLLM's."""

    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1)] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=0)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: Annotated[Integer, Field(ge=1, le=1)] = 1
    presence_penalty: Annotated[Number, Field(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=0, le=0)] = 0.0
    repetition_penalty: Annotated[Number, Field(ge=1, le=1)] = 1.0


class GenerateRequest(_Wire):
    """Body of /inference/v1/generate."""

    token_ids: Annotated[list[Annotated[Integer, Field(ge=0)]], Field(min_length=1)]
    sampling_params: SamplingFields = SamplingFields()
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    cache_salt: str | None = None


class ChatRequest(_Wire):
    """Body of /v1/chat/completions/render."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Any = 1.0
    top_p: Any = 1.0
    top_k: Any = 0
    min_p: Any = 0.0
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = False
    include_stop_str_in_output: Any = False
    skip_special_tokens: Any = True
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0
    repetition_penalty: Any = 1.0
    n: Any = 1
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: JsonObject | None = None
    user: str | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=0)] | None = None
    tools: Annotated[list[JsonObject], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool = True

    def conversation(self) -> list[JsonObject]:
        """Messages as a chat template takes them; text parts are joined by line breaks, as vLLM joins them."""
        conversation = []
        for message in self.messages:
            fields = message.model_dump(exclude_none=True)
            if isinstance(message.content, list):
                fields["content"] = "\n".join(part.text for part in message.content)
            fields.setdefault("content", "")
            conversation.append(fields)
        return conversation

    def sampling_fields(self, max_tokens: int) -> JsonObject:
        """The `sampling_params` of the generate request that this chat request becomes."""
        names = SamplingFields.model_fields.keys() & ChatRequest.model_fields.keys() - {"logprobs", "max_tokens"}
        fields = {name: getattr(self, name) for name in names}
        fields = {name: value for name, value in fields.items() if value is not None}
        fields["max_tokens"] = max_tokens
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return fields


def parse(model: type[WireModel], body: Any) -> WireModel:
    """Validate `body`. Raises BadRequestError with the first problem and its field's name."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"]).removeprefix("sampling_params.") or None
        message = first["msg"]
        if first["type"] == "extra_forbidden":
            message = "the transformers engine does not know this field"
        raise BadRequestError(f"{param}: {message}" if param else message, param) from error


def check_length(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Return how many tokens may be generated. Raises BadRequestError naming both lengths if there is no room."""
    if num_prompt_tokens >= max_model_len:
        raise BadRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{num_prompt_tokens} input tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    room = max_model_len - num_prompt_tokens
    if max_tokens is not None and max_tokens > room:
        raise BadRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} "
            f"output tokens and your prompt contains {num_prompt_tokens} input tokens. Please reduce one of them.",
            "max_tokens",
        )
    return room if max_tokens is None else max_tokens


def sampling_of(fields: SamplingFields, max_tokens: int) -> Sampling:
    """The decoder's sampling parameters. Raises BadRequestError for an empty stop string."""
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if "" in stop:
        raise BadRequestError("stop: a stop string cannot be empty", "stop")
    return Sampling(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(0, fields.top_k),
        min_p=fields.min_p,
        seed=fields.seed,
        stop=tuple(stop),
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        ignore_eos=fields.ignore_eos,
        num_logprobs=fields.logprobs or 0,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
    )
