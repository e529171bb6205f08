"""Chat templates: Jinja programs, published with a model, that write a conversation as text.

A template is run as transformers runs it, in Jinja's sandbox. This module needs jinja2 only when a
template is compiled.
"""

import datetime
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from rmt_tpu.data.tokenizer import ByteTokenizer, Tokenizer
from rmt_tpu.errors import UsageError, one_line, shown
from rmt_tpu.storage import Folder

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

_GENERATION = re.compile(r"\{%-?\s*generation\b")
# These characters enclose each part of a text that a template marks as the model's answer. Unicode
# reserves them for internal use by programs, so ordinary texts do not contain them.
_BEGIN, _END = "\ufdd0", "\ufdd1"

# This Jinja code writes the start token. The line break belongs to the comment, and is not written.
_WRITE_START = "{{ bos_token }}{# Texts of the training begin with it. #}\n"

_NEEDED = "chat templates need jinja2: pip install 'rmt_tpu[chat]'"
# Variables that name the tokenizer's start and end token if tokenizer_config.json lacks them.
_GUESSED = "bos_token", "eos_token"
# A conversation by which `ChatTemplate.answer_ends` finds what a template puts after an answer.
_QUESTION, _ANSWER = "Which word?", "Answer."
_LONGEST_CONFIG = 2**26  # maximum size of tokenizer_config.json in bytes

# Variables with which a template writes a fixed date wherever it would write today's. Training data
# needs one, or its tokens and the choice of held-out documents would change every day. The date is
# the one that Llama 3.2's template writes in programs without `strftime_now`.
FIXED_DATE = {"strftime_now": datetime.datetime(2024, 7, 26).strftime}


class ChatTemplate:
    """A template that writes a conversation as text, and a tokenizer that encodes the text.

    Args:
      source: the template in Jinja's language.
      tokenizer: the tokenizer of the model.
      names: further variables of the template, such as `bos_token`, the name of the start token.
      starts: whether to add the start token if the text of a conversation does not begin with it.
        (transformers never adds it.)
      where: the file of the template, for error messages.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        names: Mapping[str, str] | None = None,
        starts: bool = False,
        where: str = "the chat template",
    ):
        defaults = dict(zip(_GUESSED, (tokenizer.bos, tokenizer.ends[0]), strict=True))
        self._names = {name: tokenizer.token_name(token) or "" for name, token in defaults.items()}
        self._names |= names or {}
        self._source, self._tokenizer, self._starts = source, tokenizer, starts
        self._where = where

    @staticmethod
    def installed() -> bool:
        """Return whether jinja2, which runs the templates, is installed."""
        return importlib.util.find_spec("jinja2") is not None

    def check(self) -> None:
        """Raise UsageError if the template cannot be compiled, or jinja2 is not installed."""
        _ = self._compiled

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the text of a conversation. A variable may have any name except `messages`.

        Args:
          messages: the messages, each with a `role` and a `content`.
          **variables: further variables, such as `add_generation_prompt`, which is true if the text
            is to end where the model's answer begins.

        Raises:
          UsageError: the template refuses the messages, fails, or cannot be compiled, or jinja2 is
            not installed.
        """
        return "".join(re.split(f"[{_BEGIN}{_END}]", self._rendered(messages, variables)))

    def _rendered(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation, with `_BEGIN` and `_END` around each marked part."""
        template = self._compiled
        given = {"tools": None, "documents": None, **self._names, **variables}
        try:
            return template.render(given, messages=messages)
        except _Refused as error:
            raise UsageError(f"the chat template refuses the messages: {error}") from None
        except Exception as error:  # A template is a program and may raise any error.
            raise UsageError(f"the chat template fails: {one_line(error)}") from None

    @staticmethod
    def from_file(file: str, tokenizer: Tokenizer) -> "ChatTemplate":
        """Return the template in a local file, for a tokenizer that was not loaded from a folder.

        Raises:
          UsageError: the file cannot be read, or is not UTF-8.
        """
        return ChatTemplate(_decoded(_file_bytes(file), file), tokenizer, where=file)

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks the model's answers by the tag `generation`."""
        return _GENERATION.search(self._source) is not None

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], /, **variables: Any
    ) -> list[tuple[str, bool]]:
        """Return the text of a conversation in pieces, each with True if the template marks it.

        Raises:
          UsageError: see `render`.
        """
        rest, pieces = self._rendered(messages, variables), []
        while rest:
            plain, _, rest = rest.partition(_BEGIN)
            marked, _, rest = rest.partition(_END)
            pieces += [(plain, False), (marked, True)]
        return [(text, is_marked) for text, is_marked in pieces if text]

    def answer_ends(self) -> tuple[int, ...]:
        """Return the tokens that end an answer of the model.

        The first is the first special token that the template writes after an answer at the end of
        a conversation. It is left out if the template writes none or refuses the example, or if
        jinja2 is not installed. The second is the template's `eos_token`, if the tokenizer has such
        a token.
        """
        found = [self._token_after_answer(), self._tokenizer.token_id(self._names["eos_token"])]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def _token_after_answer(self) -> int | None:
        """Return the first special token after an answer, or None if there is none."""
        talk = [("user", _QUESTION), ("assistant", _ANSWER)]
        try:
            text = self.render([{"role": role, "content": content} for role, content in talk])
        except UsageError:
            return None
        _, answer, rest = text.rpartition(_ANSWER)
        tokens = self._tokenizer.encode_special(rest if answer else "").tolist()
        return next((t for t in tokens if not self._tokenizer.decode_bytes([t])), None)

    def json(self) -> dict[str, str]:
        """Return the template and its variables as fields of a tokenizer_config.json."""
        return {**self._names, "chat_template": self._source}

    def standalone_json(self) -> dict[str, str]:
        """Return `json` for programs that never add the start token to a conversation.

        If `starts` is set and the template does not write the start token, the returned template
        does. A short conversation shows whether it does; a template that refuses this conversation
        is not changed. Empty names of tokens are left out.

        Raises:
          UsageError: the template cannot be compiled, or jinja2 is not installed.
        """
        source = self._source
        if self._starts and not self._writes_start():
            source = _WRITE_START + source
        names = {name: value for name, value in self._names.items() if value}
        return names | {"chat_template": source}

    def _writes_start(self) -> bool:
        """Return whether conversations begin with the start token; True if it is unknown."""
        self.check()
        try:
            text = self.render([{"role": "user", "content": "a"}], add_generation_prompt=True)
        except UsageError:
            return True
        return self._tokenizer.encode_special(text)[:1].tolist() == [self._tokenizer.bos]

    def save(self, folder: Folder) -> None:
        """Write the template into a folder, from which `read_template` reads it.

        Raises:
          Fault: the file cannot be written.
        """
        folder.write(CONFIG_FILE, (json.dumps(self.json(), indent=2) + "\n").encode())

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of a conversation's text; names of special tokens become these tokens.

        Raises:
          UsageError: the text has an unpaired surrogate, which is not a character.
        """
        tokens = self._tokenizer.encode_special(text)
        if len(tokens) and (not self._starts or tokens[0] == self._tokenizer.bos):
            return tokens
        return self._tokenizer.with_bos(tokens)

    @cached_property
    def _compiled(self) -> Any:
        if not self.installed():
            raise UsageError(_NEEDED)
        import jinja2

        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(
                f"{self._where}:{error.lineno} is not a valid template: {error}"
            ) from None


def without_absent_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its fields that are null or an empty list.

    A template asks whether a field such as `name` or `tool_calls` exists, and would take such a
    field as given. A table has the same fields in all its rows.
    """
    return {name: value for name, value in message.items() if value is not None and value != []}


def read_template(
    folder: Folder, tokenizer: Tokenizer, *, file: str | None = None, starts: bool = False
) -> ChatTemplate | None:
    """Return the chat template of a model, or None if the model has no template.

    The file `chat_template.jinja` takes precedence over the field `chat_template` of
    tokenizer_config.json.

    Args:
      folder: the folder of the model.
      tokenizer: the tokenizer of the model.
      file: the path of a local file whose template replaces that of the folder.
      starts: see `ChatTemplate`.

    Raises:
      UsageError: a file is damaged, or tokenizer_config.json has several templates, but none is
        named "default".
    """
    config = f"{folder.url}/{CONFIG_FILE}"
    found = folder.read(CONFIG_FILE, limit=_LONGEST_CONFIG)
    try:
        values = json.loads(found.data) if found else {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{config} is not a JSON object; legal: a JSON object, or no file")
    where = f"{folder.url}/{TEMPLATE_FILE}" if file is None else file
    data = _template_bytes(folder, file)
    if data is None:
        source, where = _default_template(values.get("chat_template"), config), config
        if source is None:
            return None
    else:
        source = _decoded(data, where)
    contents = {name: v["content"] if _is_added(v) else v for name, v in values.items()}
    # Null says that the model has no such token, and not that it is to be guessed.
    contents |= {name: "" for name in _GUESSED if name in values and values[name] is None}
    names = {n: v for n, v in contents.items() if n.endswith("_token") and isinstance(v, str)}
    if isinstance(tokenizer, ByteTokenizer):
        # This tokenizer encodes the name of a token as ordinary text, so that no template can write
        # the start token.
        names, starts = {}, tokenizer.starts
    return ChatTemplate(source, tokenizer, names=names, starts=starts, where=where)


def _template_bytes(folder: Folder, file: str | None) -> bytes | None:
    if file is None:
        found = folder.read(TEMPLATE_FILE)
        return None if found is None else found.data
    return _file_bytes(file)


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8: {error.reason}") from None


def _file_bytes(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}; legal: a file with a chat template"
        ) from None


def _default_template(value: Any, config: str) -> str | None:
    """Return the template in the field `chat_template`, which may be a list of named templates."""
    if value is None or isinstance(value, str):
        return value
    try:
        return {each["name"]: each["template"] for each in value}["default"]
    except (TypeError, KeyError):
        raise UsageError(
            f"{config}: chat_template={shown(value)} must be text, or a list of objects with a "
            'name and a template, one of them with the name "default"'
        ) from None


def _is_added(value: Any) -> bool:
    """Return whether a value of tokenizer_config.json is an object that describes a token."""
    return isinstance(value, dict) and isinstance(value.get("content"), str)


class _Refused(Exception):
    """The error that is raised when a template calls `raise_exception`."""


def _refuse(message: object) -> None:
    raise _Refused(" ".join(str(message).split()))


def _environment() -> Any:
    """Return the sandbox in which templates run, with the extensions that transformers adds."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The Jinja tag `generation`, which encloses the model's answers in marker characters."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (
                nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END)
            )
            return [begin, *body, end]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON, without the HTML escapes that Jinja's own filter adds."""
    return json.dumps(value, **{"ensure_ascii": False, **options})
