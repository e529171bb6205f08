"""Parsing and checking of requests to OpenAI's /v1/completions, and of fields that chats share."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from rmt_tpu.data import ChatTemplate, Tokenizer
from rmt_tpu.errors import UsageError, shown, unknown
from rmt_tpu.generation import RANKS, Adjustment, Request, Sampling
from rmt_tpu.serving.fields import Refusal, field, is_a, read_object, whole_number

_MAX_STOPS, _LONGEST_STOP = 4, 256
_MAX_STOP_TOKENS, _MAX_BIAS = 64, 100
_DEFAULT_TOKENS = 16  # This is the default of max_tokens in OpenAI's API.


@dataclass(frozen=True)
class ServedModel:
    """The model that the server runs, with the limits that requests must respect.

    Attributes:
      name: the name by which clients call the model.
      tokenizer: the tokenizer of the model.
      max_length: the maximum number of tokens that the model reads for one text: the start token,
        the prompt and the new tokens except the last.
      max_tokens: the maximum number of new tokens per text.
      max_texts: the maximum number of texts that are queued or being generated, over all clients.
      vocab_size: the vocabulary size of the model; None means the vocabulary size of the tokenizer.
      template: the chat template of the model; None if the model has no template.
    """

    name: str
    tokenizer: Tokenizer
    max_length: int
    max_tokens: int
    max_texts: int
    vocab_size: int | None = None
    template: ChatTemplate | None = None

    @property
    def with_start(self) -> str:
        """The text in error messages, after a token count, that mentions a counted start token."""
        return " (with the start token)" if self.tokenizer.starts else ""

    @property
    def legal_tokens(self) -> int:
        """The exclusive upper bound of legal token ids, which have an embedding and a text."""
        size = self.tokenizer.vocab_size
        return size if self.vocab_size is None else min(size, self.vocab_size)


class Prompt(NamedTuple):
    """A prompt for which a text is generated.

    Attributes:
      tokens: the prompt's tokens, after a start token if the tokenizer uses one.
      client_tokens: how many of the tokens, counted from the end, come from the client. A start
        token that the server added does not count.
      text: the text of the client's tokens.
    """

    tokens: np.ndarray
    client_tokens: int
    text: str


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request, all of whose values are legal.

    Attributes:
      prompts: the prompts, at least one.
      n: the number of texts per prompt.
      sampling: the sampling settings of the first text. Each further text has the next higher seed.
      adjustment: changes to the logits, and the stop tokens that the client names.
      stop: stop strings; a text ends before the first stop string in it.
      logprobs: the number of likeliest tokens that are reported per position; None reports no
        log-probabilities at all.
      echo: whether each text begins with its prompt.
      silent: whether no new tokens are sent, because the request has max_tokens=0.
      stream: whether to send pieces of text while they are generated.
      include_usage: whether a stream ends with a chunk that reports the numbers of tokens.
      chat: whether the response has the format of /v1/chat/completions.
    """

    prompts: list[Prompt]
    n: int
    sampling: Sampling
    adjustment: Adjustment
    stop: list[str]
    logprobs: int | None
    echo: bool
    silent: bool
    stream: bool
    include_usage: bool
    chat: bool = False

    def requests(self) -> list[Request]:
        """Return one request per text, grouped by prompt and in prompt order."""
        ranked, scored = bool(self.logprobs), self.echo and self.logprobs is not None
        return [
            Request(
                self.prompts[index // self.n].tokens,
                self._with_seed(index),
                ranked,
                scored,
                self.adjustment,
            )
            for index in range(len(self.prompts) * self.n)
        ]

    def _with_seed(self, index: int) -> Sampling:
        return replace(self.sampling, seed=(self.sampling.seed + index) % 2**32)


# OpenAI's fields that are accepted only if absent or equal to the neutral value given here.
_NEUTRAL = {"suffix": ""}
_SAMPLING = tuple(setting.name for setting in fields(Sampling))
# The fields that completions and chats have in common.
SETTINGS = (
    *("model", "n", "stop", "stop_token_ids", "stream", "stream_options", "user", *_SAMPLING),
    *("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"),
)
_FIELDS = ("prompt", "best_of", "logprobs", "echo", *SETTINGS, *_NEUTRAL)


def parse(body: bytes, served: ServedModel, fresh_seed: int) -> CompletionRequest:
    """Parse and check the body of a request.

    Args:
      body: the body, in JSON.
      served: the model.
      fresh_seed: the seed of the random draws if the request sets none.

    Raises:
      Refusal: the request is not legal.
    """
    values = read_object(body, _FIELDS, _NEUTRAL)
    check_model(values, served)
    n = whole_number(values, "n", 1, 1, served.max_texts)
    whole_number(values, "best_of", n, n, n)
    return continuation(
        values,
        served,
        _prompts(values, n, served),
        fresh_seed,
        logprobs=whole_number(values, "logprobs", None, 0, RANKS),
        echo=field(values, "echo", False, is_a(bool), "true or false"),
        default_tokens=_DEFAULT_TOKENS,
    )


def continuation(
    values: Mapping[str, Any],
    served: ServedModel,
    prompts: list[Prompt],
    fresh_seed: int,
    *,
    logprobs: int | None,
    default_tokens: int,
    echo: bool = False,
    chat: bool = False,
    limit: str = "max_tokens",
) -> CompletionRequest:
    """Return a request that continues prompts, from the fields that completions and chats share.

    Args:
      values: the fields of the request.
      served: the model.
      prompts: the prompts, at least one.
      fresh_seed: the seed of the random draws if the request sets none.
      logprobs: see `CompletionRequest`.
      default_tokens: the maximum number of new tokens if the request sets none.
      echo: see `CompletionRequest`.
      chat: see `CompletionRequest`.
      limit: the name of the field that has the maximum number of new tokens.

    Raises:
      Refusal: a field is not legal, or the new tokens do not fit after a prompt.
    """
    n = whole_number(values, "n", 1, 1, served.max_texts)
    stream = field(values, "stream", False, is_a(bool), "true or false")
    # A limit of 0 is legal only if the prompt is echoed; otherwise the text would be empty.
    default, least = min(default_tokens, served.max_tokens), 0 if echo else 1
    more = "" if echo or chat else ", or 0 with echo"
    max_tokens = whole_number(values, limit, default, least, served.max_tokens, more)
    name = "messages" if chat else "prompt"
    rooms = [_room_after(number, prompts, served, name) for number in range(len(prompts))]
    if limit not in values:
        max_tokens = min(max_tokens, *rooms)
    elif max_tokens > min(rooms):
        tokens = max(len(prompt.tokens) for prompt in prompts)
        raise Refusal(
            f"{limit}={max_tokens} is too many after a prompt of {tokens} tokens"
            f"{served.with_start}; legal: at most {min(rooms)}",
            limit,
            code="context_length_exceeded",
        )
    return CompletionRequest(
        prompts=prompts,
        n=n,
        sampling=replace(_sampling(values, fresh_seed), max_tokens=max(max_tokens, 1)),
        adjustment=_adjustment(values, served, max_tokens),
        stop=_stop(values),
        logprobs=logprobs,
        echo=echo,
        silent=max_tokens == 0,
        stream=stream,
        include_usage=_include_usage(values, stream),
        chat=chat,
    )


def check_model(values: Mapping[str, Any], served: ServedModel) -> None:
    """Raise Refusal if a request names a model other than the one that is served."""
    if values.get("model", served.name) != served.name:
        message = unknown("model", values["model"], [served.name])
        raise Refusal(message, "model", status=404, code="model_not_found")


def _sampling(values: Mapping[str, Any], fresh_seed: int) -> Sampling:
    """Return the sampling settings, without the request's maximum number of new tokens."""
    settings = {name: values[name] for name in _SAMPLING if name in values}
    for name, value in settings.items():
        integral = isinstance(getattr(Sampling, name), int)
        words = "a whole number" if integral else "a number"
        field(values, name, None, is_a(int) if integral else is_a(int, float), words)
        settings[name] = value if integral else _as_float(value)
    if "seed" in settings:
        settings["seed"] = _seed(values)
    # With top_p=0, only the likeliest token can be sampled.
    if settings.get("top_p") == 0:
        settings |= {"top_p": 1.0, "temperature": 0.0}
    try:
        return Sampling(**{"seed": fresh_seed, **settings, "max_tokens": 1})
    except UsageError as error:
        message = str(error).removeprefix("Sampling.")
        raise Refusal(message, message.partition("=")[0]) from None


def _adjustment(values: Mapping[str, Any], served: ServedModel, max_tokens: int) -> Adjustment:
    """Return the changes to the logits, with the stop tokens."""
    numbers = {}
    for name in ("presence_penalty", "frequency_penalty"):
        legal = lambda value: is_a(int, float)(value) and -2 <= value <= 2
        numbers[name] = float(field(values, name, 0.0, legal, "a number from -2 to 2"))
    stop = field(values, "stop_token_ids", [], _is_stop_tokens, "a list of at most 64 tokens")
    check_tokens("stop_token_ids", stop, served)
    return Adjustment(
        **numbers,
        logit_bias=_logit_bias(values, served),
        stop_tokens=tuple(stop),
        min_tokens=whole_number(values, "min_tokens", 0, 0, max_tokens),
    )


def _is_stop_tokens(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_STOP_TOKENS and all(map(is_a(int), value))


def _logit_bias(values: Mapping[str, Any], served: ServedModel) -> dict[int, float]:
    """Return the bias of each token; in the client's field, token ids are written as text."""
    legal = lambda value: is_a(int, float)(value) and -_MAX_BIAS <= value <= _MAX_BIAS
    bias = field(values, "logit_bias", {}, is_a(dict), 'an object, like {"50": -100}')
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10) or not legal(value):
            raise Refusal(
                f"logit_bias has {shown(token)}: {shown(value)}; legal: the number of a token, and "
                f"a bias from -{_MAX_BIAS} to {_MAX_BIAS}",
                "logit_bias",
            )
    biased = {int(token): float(value) for token, value in bias.items()}
    check_tokens("logit_bias", biased, served)
    return biased


def _seed(values: Mapping[str, Any]) -> int:
    """Return the seed of a request, reduced to the 32 bits that the random draws use.

    A client's seed from 0 to 2^32 - 1 is used as it is. All other 64-bit seeds are hashed.
    """
    low, high = -(2**63), 2**63 - 1
    seed = whole_number(values, "seed", None, low, high)
    if 0 <= seed < 2**32:
        return seed
    content = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little")


def _as_float(value: int | float) -> float:
    """Return a number as a float, or infinity for an integer that exceeds all floats."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _prompts(values: Mapping[str, Any], n: int, served: ServedModel) -> list[Prompt]:
    """Return the prompts of a request.

    The field may contain a text, a list of tokens, or a list of texts or of token lists. If the
    field is absent, the prompt is an empty text.
    """
    prompts = values.get("prompt", "")
    several = isinstance(prompts, list) and not all(map(is_a(int), prompts))
    prompts = prompts if several else [prompts]
    if (texts := len(prompts) * n) > served.max_texts:
        raise Refusal(
            f"prompt has {len(prompts)} prompts, which with n={n} make {texts} texts; legal: at "
            f"most {served.max_texts} texts",
            "prompt",
        )
    return [_prompt(prompt, served) for prompt in prompts]


def _prompt(prompt: Any, served: ServedModel) -> Prompt:
    tokenizer = served.tokenizer
    if isinstance(prompt, str):
        try:
            tokens = tokenizer.encode(prompt)
        except UsageError as error:
            raise Refusal(f"prompt is not legal: {error}", "prompt") from None
        if len(tokens) and (largest := int(tokens.max())) >= served.legal_tokens:
            legal = f"legal: 0 to {served.legal_tokens - 1}"
            raise Refusal(f"prompt has token {largest}; {legal}", "prompt")
        return Prompt(tokenizer.with_bos(tokens), len(tokens), prompt)
    if not isinstance(prompt, list) or not prompt or not all(map(is_a(int), prompt)):
        raise Refusal(
            f"prompt={shown(prompt)} must be text, a list of tokens, a list of texts, or a list of "
            "lists of tokens",
            "prompt",
        )
    check_tokens("prompt", prompt, served)
    tokens = np.array(prompt, np.int64)
    # Do not add a start token if the client's prompt begins with one: as in training, a text begins
    # with exactly one start token.
    with_start = tokens if tokens[0] == tokenizer.bos else tokenizer.with_bos(tokens)
    return Prompt(with_start, len(tokens), tokenizer.decode(tokens))


def check_tokens(name: str, tokens: Iterable[int], served: ServedModel) -> None:
    """Raise Refusal if the field `name` has a token that has no embedding or no text."""
    gaps = served.tokenizer.gaps
    for token in tokens:
        if not 0 <= token < served.legal_tokens or token in gaps:
            legal = f"legal: 0 to {served.legal_tokens - 1}"
            legal += ", except ids that the tokenizer does not use" if gaps else ""
            raise Refusal(f"{name} has token {shown(token)}; {legal}", name)


def _room_after(number: int, prompts: list[Prompt], served: ServedModel, name: str) -> int:
    """Return how many new tokens fit after prompt number `number`.

    The model never reads the last new token, so that token does not count towards `max_length`.
    """
    tokens = len(prompts[number].tokens)
    room = served.max_length + 1 - tokens
    if room < 1:
        label = name if len(prompts) == 1 else f"{name} number {number + 1}"
        verb = "have" if name == "messages" else "has"
        raise Refusal(
            f"{label} {verb} {tokens} tokens{served.with_start}; legal: at most "
            f"{served.max_length}",
            name,
            code="context_length_exceeded",
        )
    return room


def _stop(values: Mapping[str, Any]) -> list[str]:
    value = values.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    legal = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not legal or not all(isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in stops):
        raise Refusal(
            f"stop={shown(value)} must be text, or a list of at most {_MAX_STOPS} texts, each of 1 "
            f"to {_LONGEST_STOP} characters",
            "stop",
        )
    return stops


def _include_usage(values: Mapping[str, Any], stream: bool) -> bool:
    options = values.get("stream_options", {})
    legal = isinstance(options, dict) and options.keys() <= {"include_usage"}
    if not legal or not isinstance(options.get("include_usage", False), bool):
        words = '{"include_usage": true} or {"include_usage": false}'
        raise Refusal(f"stream_options={shown(options)} must be {words}", "stream_options")
    if options and not stream:
        raise Refusal(f"stream_options={shown(options)} needs stream=true", "stream_options")
    return options.get("include_usage", False)
