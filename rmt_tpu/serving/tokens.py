"""Requests to /tokenize and /detokenize, which convert between text and tokens as in vLLM."""

from typing import Any

import numpy as np

from rmt_tpu.errors import UsageError, shown
from rmt_tpu.serving.chat import check_template, conversation
from rmt_tpu.serving.fields import Refusal, field, is_a, read_object
from rmt_tpu.serving.protocol import ServedModel, check_model, check_tokens

_TEXT = ("prompt", "add_special_tokens")
_CHAT = ("messages", "add_generation_prompt", "chat_template_kwargs")
_TOKENIZE = ("model", *_TEXT, *_CHAT)
_DETOKENIZE = ("model", "tokens")


def tokenize(body: bytes, served: ServedModel) -> dict[str, Any]:
    """Return the response to a request to /tokenize, with the tokens of a text or a chat.

    The tokens are those that the model reads for this prompt or for these messages. If
    `add_special_tokens` is false, a prompt gets no start token.

    Raises:
      Refusal: the request is not legal.
    """
    values = read_object(body, _TOKENIZE)
    check_model(values, served)
    if "messages" in values:
        if both := [name for name in _TEXT if name in values]:
            raise Refusal(f"messages and {both[0]} are both set; legal: only one of them", both[0])
        tokens = conversation(values, check_template(served), served).tokens
        return _counted(tokens, served)
    if chat := [name for name in _CHAT if name in values]:
        raise Refusal(f"{chat[0]} needs messages; legal: both, or neither of them", chat[0])
    with_start = field(values, "add_special_tokens", True, is_a(bool), "true or false")
    text = values.get("prompt")
    if not isinstance(text, str):
        raise Refusal(f"prompt={shown(text)} must be text", "prompt")
    try:
        tokens = served.tokenizer.encode(text)
    except UsageError as error:
        raise Refusal(f"prompt is not legal: {error}", "prompt") from None
    return _counted(served.tokenizer.with_bos(tokens) if with_start else tokens, served)


def detokenize(body: bytes, served: ServedModel) -> dict[str, Any]:
    """Return the response to a request to /detokenize, with the text of a list of tokens.

    Raises:
      Refusal: the request is not legal.
    """
    values = read_object(body, _DETOKENIZE)
    check_model(values, served)
    tokens = values.get("tokens")
    if not isinstance(tokens, list) or not all(map(is_a(int), tokens)):
        raise Refusal(f"tokens={shown(tokens)} must be a list of tokens", "tokens")
    check_tokens("tokens", tokens, served)
    return {"prompt": served.tokenizer.decode(tokens)}


def _counted(tokens: np.ndarray, served: ServedModel) -> dict[str, Any]:
    return {"count": len(tokens), "max_model_len": served.max_length, "tokens": tokens.tolist()}
