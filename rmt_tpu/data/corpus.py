"""Text to train on, as documents: files, or the source of Python's standard library."""

import io
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from rmt_tpu.data.inputs import (
    COMPRESSED,
    Problem,
    Seen,
    Span,
    files,
    opened,
    problems,
    readable,
    unpacked,
)
from rmt_tpu.errors import UsageError

# In bytes. Each is several times in memory: as bytes, as text, and as tokens.
_LONGEST_LINE, _LONGEST_DOCUMENT = 2**28, 2**30

_BOM = b"\xef\xbb\xbf"
_SEPARATOR = b"<|endoftext|>"
_PIECE = 2**20  # bytes of a line that is passed over
_SIGN_OF_LIFE = 2**22  # bytes that are unpacked


def documents(source: str, flag: str = "data") -> list[str]:
    """All documents of a corpus, in order; documents of nothing but white space are left out.

    Args:
      source: `stdlib` (the modules of the running Python's standard library, one document each),
        or paths and globs (`**` is any depth) with commas between. A `.txt` file is one document,
        or several with lines `<|endoftext|>` between; a `.jsonl` file has one on each line, in
        the field "text". Both may end in `.gz` or `.zst`. A file given twice is read once.
      flag: that names it, for messages.

    Returns:
      At least one document.

    Raises:
      UsageError: a path has no file, or a file cannot be read as text, or there is no text.
      RunError: a file was edited meanwhile.
    """
    with problems(flag, source):
        found = [text for span in files(source) for text in read_span(span)]
    if not found:
        raise UsageError(
            f"--{flag}={source!r} has no text: legal is at least one non-empty document"
        )
    return found


def divide(span: Span, num_bytes: int) -> Iterator[Span]:
    """A whole file in spans of about `num_bytes` or more, cut where a document ends.

    Raises:
      Problem: it cannot be read.
    """
    size, start = span.stop, 0
    if size <= num_bytes or span.path.lower().endswith((*COMPRESSED, ".py")):
        yield span
        return
    with readable(span.path), opened(span, look=True) as file:
        while start < size:
            file.seek(start + num_bytes)
            _pass(file, to_separator=False)  # most likely half a line
            if _kind(span.path) != ".jsonl":
                _pass(file, to_separator=True)
            stop = min(file.tell(), size)
            yield span._replace(start=start, stop=stop)
            start = stop


def read_span(span: Span, seen: Seen = lambda block: None) -> Iterator[str]:
    """Documents that are not only white space. One at a time is in memory.

    Args:
      span: of a file.
      seen: told of the bytes of the span as they lie there, in order and each once, and of none
        now and then while a long document is unpacked; what it raises ends the reading.

    Raises:
      Problem: the file cannot be read, or is not what its name says, or has a line of more than
        256 MiB or a document of more than 1 GiB.
      RunError: it was edited meanwhile.
    """
    kind = _kind(span.path)
    if kind == ".py":
        texts = _module(span, seen)
    elif kind == ".jsonl":
        texts = _json_lines(span, seen)
    else:
        texts = _separated(span, seen)
    return (text for text in texts if text.strip())


def _kind(path: str) -> str:
    """The ending of a name, without that of its compression."""
    stem, ending = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if ending in COMPRESSED else ending


def _pass(file: io.BufferedIOBase, *, to_separator: bool) -> None:
    """Reads to the end of the line, or to that of the next separator."""
    begins = True
    while piece := file.readline(_PIECE):
        if to_separator and begins and _is_separator(piece):
            return
        begins = piece.endswith(b"\n")
        if begins and not to_separator:
            return


class _Line(NamedTuple):
    content: bytes  # with its end
    offset: int  # in the unpacked file


def _lines(span: Span, seen: Seen) -> Iterator[_Line]:
    """The lines of a span, without a byte order mark."""
    packed = span.path.lower().endswith(COMPRESSED)
    with readable(span.path), unpacked(span, seen) as file:
        offset = told = span.start
        if offset:
            file.seek(offset)
        while (packed or offset < span.stop) and (content := file.readline(_LONGEST_LINE + 1)):
            if len(content) > _LONGEST_LINE:
                raise Problem(
                    f"{span.path!r} line {_line_number(span, offset)} is longer than "
                    f"{_LONGEST_LINE} bytes; legal: shorter lines"
                )
            begin, offset = offset, offset + len(content)
            if not packed:
                seen(content)
            elif offset - told >= _SIGN_OF_LIFE:
                told = offset
                seen(b"")
            if begin == 0 and content.startswith(_BOM):
                content, begin = content[len(_BOM) :], len(_BOM)
            yield _Line(content, begin)


def _separated(span: Span, seen: Seen) -> Iterator[str]:
    """The documents of a .txt file."""
    document, begin = bytearray(), 0
    for line in _lines(span, seen):
        if _is_separator(line.content):
            yield _decode(document, span, begin)
            document.clear()
        else:
            begin = begin if document else line.offset
            document += line.content
            if len(document) > _LONGEST_DOCUMENT:
                raise Problem(
                    f"{span.path!r} has in line {_line_number(span, begin)} the beginning of a "
                    f"document of more than {_LONGEST_DOCUMENT} bytes; legal: shorter ones, with "
                    f"lines {_SEPARATOR.decode()} between"
                )
    yield _decode(document, span, begin)


def _is_separator(line: bytes) -> bool:
    return line.startswith(_SEPARATOR) and line[len(_SEPARATOR) :] in (b"\n", b"\r\n", b"", b"\r")


def _json_lines(span: Span, seen: Seen) -> Iterator[str]:
    # By bytes: JSON strings may hold U+2028 and others that str.splitlines takes for an end.
    for line in _lines(span, seen):
        text = _decode(line.content, span, line.offset)
        if text.strip():
            try:
                yield _json_text(text)
            except Problem as problem:
                number = _line_number(span, line.offset)
                raise Problem(f"{span.path!r} line {number} {problem}") from None


def objects(span: Span) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a whole .jsonl file, each with the words for where it is.

    Raises:
      Problem: the file cannot be read, or a line is no object.
    """
    for number, line in enumerate(_lines(span, lambda block: None), 1):
        text, where = _decode(line.content, span, line.offset), f"{span.path!r} line {number}"
        if text.strip():
            try:
                value = _json_object(text, "{...}")
            except Problem as problem:
                raise Problem(f"{where} {problem}") from None
            yield where, value


def _module(span: Span, seen: Seen) -> Iterator[str]:
    """A module of the standard library: of the installation, so nothing for a person to correct."""
    with readable(span.path), opened(span) as file:
        content = file.read()
    seen(content)
    try:
        yield content.decode("utf-8")
    except UnicodeDecodeError:
        return


def _decode(content: bytes | bytearray, span: Span, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = offset + error.start
        raise Problem(
            f"{span.path!r} is not UTF-8 at byte {byte}, in line {_line_number(span, byte)} "
            f"({error.reason}); legal: UTF-8 text"
        ) from None


def _line_number(span: Span, offset: int) -> int:
    """From 1, of the line of the unpacked file that the byte at `offset` is in."""
    number = 1
    with unpacked(span) as file:
        while offset > 0 and (block := file.read(min(offset, 2**20))):
            number += block.count(b"\n")
            offset -= len(block)
    return number


def _json_text(line: str) -> str:
    """The "text" of one line of a .jsonl file."""
    like = '{"text": "..."}'
    value, legal = _json_object(line, like), f"legal: an object like {like}"
    if not isinstance(value.get("text"), str):
        shown = [f"{name[:40]!r} ({type(v).__name__})" for name, v in list(value.items())[:8]]
        fields = ", ".join(shown + ["..."] * (len(value) > 8)) or "none"
        raise Problem(f'has no field "text" that is a string; fields: {fields}; {legal}')
    try:
        value["text"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise Problem(
            f'has half a surrogate pair at character {error.start} of "text"; legal: Unicode text'
        ) from None
    return value["text"]


def _json_object(line: str, like: str) -> dict[str, Any]:
    """What one line of a .jsonl file says."""
    legal = f"legal: an object like {like}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Problem(f"is not JSON ({error}); {legal}") from None
    if not isinstance(value, dict):
        raise Problem(f"is a JSON {type(value).__name__}, not an object; {legal}")
    return value
