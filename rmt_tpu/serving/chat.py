"""Parsing and checking of requests to OpenAI's /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any

from rmt_tpu.data import ChatTemplate
from rmt_tpu.data.chat import without_absent_fields
from rmt_tpu.errors import UsageError, shown, unknown
from rmt_tpu.generation import RANKS
from rmt_tpu.serving.fields import Refusal, field, is_a, read_object, whole_number
from rmt_tpu.serving.protocol import (
    SETTINGS,
    CompletionRequest,
    Prompt,
    ServedModel,
    check_model,
    check_tokens,
    continuation,
)

# OpenAI's fields that are accepted only if absent or equal to the neutral value given here.
_NEUTRAL = {
    "functions": [],
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "store": False,
    "tools": [],
}
# These fields of OpenAI's API are accepted with any value, and have no effect on the text.
_IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
)
_FIELDS = (
    *("messages", "max_completion_tokens", "logprobs", "top_logprobs", "tool_choice"),
    *("add_generation_prompt", "chat_template_kwargs"),
    *(*SETTINGS, *_NEUTRAL, *_IGNORED),
)
# The fields of a message, besides its role, that a chat template may read.
_OF_MESSAGE = ("content", "name", "reasoning_content")


def parse_chat(body: bytes, served: ServedModel, fresh_seed: int) -> CompletionRequest:
    """Parse and check the body of a request, and turn its messages into a prompt.

    Args:
      body: the body, in JSON.
      served: the model.
      fresh_seed: the seed of the random draws if the request sets none.

    Raises:
      Refusal: the request is not legal, the model has no chat template, or its template refuses
        the messages.
    """
    values = read_object(body, _FIELDS, _NEUTRAL)
    check_model(values, served)
    template = check_template(served)
    field(values, "tool_choice", "none", lambda v: v in ("none", "auto"), '"none" or "auto"')
    prompt = conversation(values, template, served)
    return continuation(
        values,
        served,
        [prompt],
        fresh_seed,
        logprobs=_logprobs(values),
        default_tokens=served.max_tokens,
        chat=True,
        limit=_limit(values),
    )


def check_template(served: ServedModel) -> ChatTemplate:
    """Return the chat template of the model.

    Raises:
      Refusal: the model has no template, or jinja2 is not installed.
    """
    if served.template is None:
        raise Refusal(
            "the model has no chat template; legal: /v1/completions, or a folder with "
            "chat_template.jinja, or with chat_template in tokenizer_config.json",
            code="no_chat_template",
        )
    if not served.template.installed():
        raise Refusal(
            "chats need jinja2 on the server: pip install 'rmt_tpu[chat]'",
            status=501,
            code="not_installed",
        )
    return served.template


def conversation(values: Mapping[str, Any], template: ChatTemplate, served: ServedModel) -> Prompt:
    """Apply the chat template to the messages of a request, and return the resulting prompt.

    Raises:
      Refusal: the messages are not legal, or the template refuses them.
    """
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(
            f"messages={shown(messages)} must be a list with at least one message", "messages"
        )
    messages = [_message(f"messages[{number}]", m) for number, m in enumerate(messages)]
    asks = field(values, "add_generation_prompt", True, is_a(bool), "true or false")
    more = field(values, "chat_template_kwargs", {}, is_a(dict), "a JSON object")
    if reserved := {"messages", "add_generation_prompt"} & more.keys():
        raise Refusal(
            f"chat_template_kwargs sets {min(reserved)}, which is a field of the request; legal: "
            "other names",
            "chat_template_kwargs",
        )
    try:
        text = template.render(messages, add_generation_prompt=asks, **more)
        tokens = template.encode(text)
    except UsageError as error:
        raise Refusal(str(error), "messages") from None
    check_tokens("messages", tokens.tolist(), served)
    return Prompt(tokens, len(tokens), text)


def _message(name: str, message: Any) -> dict[str, Any]:
    """Return a message with its content as one text, and without fields that are null or empty."""
    if not isinstance(message, dict):
        raise Refusal(f'{name}={shown(message)} must be an object with "role"', "messages")
    role, more = message.get("role"), {}
    if not isinstance(role, str) or not role:
        raise Refusal(f"{name}.role={shown(role)} must be text, like user", "messages")
    for key, value in without_absent_fields(message).items():
        if key == "role":
            continue
        if key not in _OF_MESSAGE:
            raise Refusal(unknown(f"field of {name}", key, ["role", *_OF_MESSAGE]), "messages")
        more[key] = _joined(f"{name}.{key}", value) if key == "content" else value
        if not isinstance(more[key], str):
            raise Refusal(f"{name}.{key}={shown(value)} must be text", "messages")
    if "content" not in more:
        content = message.get("content")
        raise Refusal(f"{name}.content={shown(content)} must be text", "messages")
    return {"role": role, **more}


def _joined(name: str, content: Any) -> Any:
    """Return a message's content as one text; the content may be a list of text parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        legal = isinstance(part, dict) and part.get("type") == "text"
        if not legal or not isinstance(part.get("text"), str):
            legal_part = '{"type": "text", "text": "..."}'
            raise Refusal(f"{name} has part {shown(part)}; legal: {legal_part}", "messages")
    return "\n".join(part["text"] for part in content)


def _limit(values: Mapping[str, Any]) -> str:
    """Return the name of the field that limits new tokens: max_completion_tokens or max_tokens."""
    old, new = "max_tokens", "max_completion_tokens"
    if new in values and old in values and values[old] != values[new]:
        raise Refusal(
            f"{new}={shown(values[new])} and {old}={shown(values[old])} differ; legal: only one "
            "of them",
            new,
        )
    return new if new in values else old


def _logprobs(values: Mapping[str, Any]) -> int | None:
    """Return the number of likeliest tokens to report, or None to report no log-probabilities."""
    wanted = field(values, "logprobs", False, is_a(bool), "true or false")
    ranks = whole_number(values, "top_logprobs", 0, 0, RANKS)
    if "top_logprobs" in values and not wanted:
        raise Refusal(f"top_logprobs={ranks} needs logprobs=true", "top_logprobs")
    return ranks if wanted else None
