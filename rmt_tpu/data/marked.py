"""Documents in which only some parts have a loss: conversations, and prompts with completions.

In a conversation, only the model's answers have a loss. In a prompt with a completion, only the
completion has a loss. In a stream of tokens, a token without a loss has the bit `CONTEXT` in its
stored number. `Windows` removes the bit and gives such a target the weight 0.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Integer

from rmt_tpu.data.chat import FIXED_DATE, ChatTemplate, read_template, without_absent_fields
from rmt_tpu.data.inputs import Problem
from rmt_tpu.data.tokenizer import BYTE, Tokenizer
from rmt_tpu.errors import UsageError, about_flag
from rmt_tpu.storage import Folder, open_folder

# The bit that marks a token as excluded from the loss when it is the target.
CONTEXT = 2**30

# Default name of the field or column that has the text.
USUAL_FIELD = "text"
# Default field or column names for kinds of documents other than "text".
_FIELDS = {"messages": "messages"}

# What has a loss, for messages about a text of which no token has one.
ANSWERS = (
    "messages of the role assistant (or parts that the chat template marks by {% generation %}) "
    "and completions that are not empty"
)

# A content that begins like no answer: a character that Unicode reserves for internal use.
_OTHER_CONTENT = "\ufdd2"


class Piece(NamedTuple):
    """A part of a document, and whether its tokens have a loss as targets."""

    text: str
    has_loss: bool


class Marked(str):
    """The text of a document, with marks of the parts that have a loss; slices keep the marks.

    Attributes:
      pieces: the parts, whose texts concatenate to the text.
      special: whether names of special tokens in the text are encoded as these tokens.
    """

    pieces: tuple[Piece, ...]
    special: bool

    def __new__(cls, pieces: Sequence[Piece], *, special: bool) -> "Marked":
        """Create the text by concatenating the pieces."""
        text = super().__new__(cls, "".join(piece.text for piece in pieces))
        text.pieces, text.special = tuple(pieces), special
        return text

    def __getitem__(self, index: slice) -> "Marked":
        """Return the characters of a slice, with their marks."""
        start, stop, step = index.indices(len(self))
        assert step == 1
        found, at = [], 0
        for text, has_loss in self.pieces:
            found.append(Piece(text[max(0, start - at) : max(0, stop - at)], has_loss))
            at += len(text)
        return Marked(found, special=self.special)


class Reading(NamedTuple):
    """The rules by which the documents of a source are read from its files.

    Attributes:
      field: name of the field of .jsonl files, or of the column of tables, that has the document.
        Completions have two fields, `prompt` and `completion`.
      kind: "text"; "messages", a list of objects with a `role` and a `content`; or "completion".
    """

    field: str = USUAL_FIELD
    kind: str = "text"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields or columns that are read."""
        if self.kind == "completion":
            return "prompt", "completion"
        return (_FIELDS.get(self.kind, self.field) if self.field == USUAL_FIELD else self.field,)

    @property
    def has_marks(self) -> bool:
        """Whether only parts of a document have a loss."""
        return self.kind != "text"

    def document(self, raw: str, template: ChatTemplate | None) -> str:
        """Return the document that a value read from a file describes.

        Args:
          raw: the text, or JSON: a list of messages, or a list of the prompt and the completion.
          template: the chat template, for messages.

        Raises:
          Problem: the template cannot render the messages.
        """
        if self.kind == "completion":
            prompt, completion = json.loads(raw)
            return Marked([Piece(prompt, False), Piece(completion, True)], special=False)
        if self.kind == "messages":
            try:
                return Marked(conversation(template, json.loads(raw)), special=True)
            except UsageError as error:
                raise Problem(f"the messages {raw[:80]} cannot be rendered: {error}") from None
        return raw

    def check(self, values: Sequence[object]) -> str | None:
        """Return a description of the field that is missing or has the wrong type, or None."""
        if self.kind != "messages":
            for name, value in zip(self.names, values, strict=True):
                if not isinstance(value, str):
                    return f"no field {json.dumps(name)} that is a string"
            return None
        (messages,) = values
        known = isinstance(messages, list) and all(
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
            for each in messages
        )
        if known and messages:
            return None
        return (
            f"no field {json.dumps(self.names[0])} that is a list of objects with a role and a "
            "content"
        )

    def raw(self, values: Sequence[object]) -> str:
        """Return the values of the fields as one text, the argument `raw` of `document`."""
        if self.kind == "text":
            return values[0]
        if self.kind == "messages":
            messages = [without_absent_fields(message) for message in values[0]]
            return json.dumps(messages, default=_as_text)
        return json.dumps(list(values))


def _as_text(value: object) -> str:
    """Return a value that JSON does not have, such as a time or bytes of a table, as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def conversation(template: ChatTemplate, messages: list[dict]) -> list[Piece]:
    """Return the text of a conversation in pieces; the messages of the assistant have a loss.

    If the template marks answers by the tag `generation`, the marked parts have a loss. Otherwise
    each answer is found by two more renderings. The first has the messages before the answer, with
    `add_generation_prompt`; the answer begins where this rendering stops matching the whole text.
    The second also has the answer, which ends where this rendering ends.

    No message precedes an answer that begins the conversation, and many templates fail without any.
    Such an answer begins where its content does: a rendering with other content shows where.

    If the template asks for today's date, it gets `FIXED_DATE`.

    Raises:
      UsageError: the template fails, or the text up to an answer is not the beginning of the whole
        text.
    """
    if template.marks_answers:
        return [Piece(*each) for each in template.render_marked(messages, **FIXED_DATE)]
    render = partial(template.render, **FIXED_DATE)
    whole, at, pieces = render(messages), 0, []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:number]) if number else ""
        if number:
            asked = render(messages[:number], add_generation_prompt=True)
        else:
            asked = render([{**message, "content": _OTHER_CONTENT}])
        until = render(messages[: number + 1])
        begin = len(os.path.commonprefix([asked, whole]))
        if begin < len(before) or not whole.startswith(until) or begin > len(until):
            raise UsageError(
                "the chat template changes earlier messages as the conversation continues; legal: "
                "a template that marks answers with {% generation %}"
            )
        pieces += [Piece(whole[at:begin], False), Piece(whole[begin : len(until)], True)]
        at = len(until)
    return [*pieces, Piece(whole[at:], False)]


def encode_all(
    documents: Sequence[str], tokenizer: Tokenizer
) -> Iterator[Int32[np.ndarray, " tokens"]]:
    """Yield the tokens of each document without BOS; tokens without a loss have the bit CONTEXT.

    Each piece of a document is encoded separately, like a prompt that a model answers. A tokenizer
    that puts a space before each text puts it only before the first piece.
    """
    for is_marked, group in groupby(documents, key=lambda text: isinstance(text, Marked)):
        if is_marked:
            yield from (_encode(document, tokenizer) for document in group)
        else:
            yield from tokenizer.encode_all(list(group))


def _encode(document: Marked, tokenizer: Tokenizer) -> Int32[np.ndarray, " tokens"]:
    encode_first = tokenizer.encode_special if document.special else tokenizer.encode
    encode_after = partial(tokenizer.encode_after, special=document.special)
    pieces = [piece for piece in document.pieces if piece.text]
    found = [np.empty(0, np.int32)]
    for number, (text, has_loss) in enumerate(pieces):
        encode = encode_after if number else encode_first
        found.append(encode(text) | (0 if has_loss else CONTEXT))
    tokens = np.concatenate(found)
    # Remove the BOS that a template writes, because the stream already has a BOS before each
    # document.
    return tokens[1:] if len(tokens) and tokens[0] & ~CONTEXT == tokenizer.bos else tokens


def first_token(tokenizer: Tokenizer, kind: str) -> int:
    """Return BOS, the token before each document; a model ends a document by predicting it.

    BOS has a loss, except for conversations, in which the template itself ends each answer.
    """
    return tokenizer.bos | CONTEXT if kind == "messages" else tokenizer.bos


def without_marks(tokens: Integer[np.ndarray, "*shape"]) -> Int32[np.ndarray, "*shape"]:
    """Return tokens of a stream without the bit CONTEXT."""
    return (tokens & ~CONTEXT).astype(np.int32)


def have_loss(tokens: Integer[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    """Return for each token of a stream whether it has a loss as a target."""
    return tokens & CONTEXT == 0


def find_template(kind: str, tokenizer: Tokenizer, file: str, flag: str) -> ChatTemplate | None:
    """Return the chat template for conversations, or None for other kinds of documents.

    Args:
      kind: the kind of the documents.
      tokenizer: the tokenizer, in whose folder the template is.
      file: the path of a template that replaces the tokenizer's, or "".
      flag: name of the flag that sets the kind, for error messages.

    Raises:
      UsageError: there is no template, it is damaged, or jinja2 is not installed.
    """
    if kind != "messages":
        return None
    folder = _folder_of(tokenizer)
    with about_flag("chat_template", file or "\0"):
        template = folder and read_template(folder, tokenizer, file=file or None)
        if template is None and file:
            template = ChatTemplate.from_file(file, tokenizer)
    if template is None:
        raise UsageError(
            f"--{flag}=messages: the tokenizer {tokenizer.name} has no chat template; legal: a "
            "tokenizer with chat_template.jinja or a chat_template in its tokenizer_config.json, "
            "or --chat_template=FILE"
        )
    template.check()
    return template


def _folder_of(tokenizer: Tokenizer) -> Folder | None:
    """Return the folder of a tokenizer's files, or None if the tokenizer has no files."""
    if tokenizer.name == BYTE:
        return None
    folder = open_folder(tokenizer.name)
    local = folder.local_path
    return open_folder(local.parent) if local is not None and os.path.isfile(local) else folder
