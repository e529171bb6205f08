"""Functions that read documents from files, or from the source of Python's standard library."""

import io
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from rmt_tpu.data import tables
from rmt_tpu.data.chat import ChatTemplate
from rmt_tpu.data.inputs import (
    COMPRESSED,
    BlockCallback,
    Problem,
    Span,
    files,
    no_callback,
    open_stored,
    open_unpacked,
    read_errors,
    usage_errors,
)
from rmt_tpu.data.marked import USUAL_FIELD, Reading
from rmt_tpu.errors import UsageError

# Maximum sizes in bytes of a line and of a document. A document is in memory several times: as
# bytes, as text and as tokens.
LONGEST_LINE, LONGEST_DOCUMENT = 2**28, 2**30

# Maximum size in bytes of remote files that `documents` reads into memory.
MOST_REMOTE = 8 * 2**30

_USUAL = Reading()

_BOM = b"\xef\xbb\xbf"
_SEPARATOR = b"<|endoftext|>"
# This number of bytes is read at a time while a line is skipped.
SKIP_BYTES = 2**20
# Examples of objects in .jsonl files.
_LIKE = {
    "messages": '{"messages": [{"role": "user", "content": "..."}]}',
    "completion": '{"prompt": "...", "completion": "..."}',
}
SIGN_OF_LIFE = 2**22  # number of decompressed bytes between two reports of progress


def documents(
    source: str,
    flag: str = "data",
    text_field: str = USUAL_FIELD,
    *,
    kind: str = "text",
    template: ChatTemplate | None = None,
) -> list[str]:
    """Return all documents of a corpus in order, except documents with only white space.

    Args:
      source: `stdlib`, which is the source of Python's standard library with one document per
        module, or comma-separated paths and globs, in which `**` matches any depth. A `.txt` file
        is one document, or several documents separated by lines `<|endoftext|>`. A `.jsonl` file
        has one document per line, in the field `text_field`. Both kinds may be compressed, with
        names ending in `.gz` or `.zst`. A `.parquet` or `.arrow` file has one document per row, in
        the column `text_field`. A path may be a `gs://` URL or an fsspec URL. A file that is given
        twice is read once.
      flag: name of the flag that gives the source, for error messages.
      text_field: name of the field or column that has the text.
      kind: the kind of the documents; see `marked.Reading`. Documents of kinds other than "text"
        mark which of their parts have a loss (`marked.Marked`).
      template: the chat template of messages.

    Returns:
      The documents, at least one.

    Raises:
      UsageError: a path matches no file, a file cannot be read as text, there is no text, or remote
        files have more than 8 GiB in total.
      RunError: a file was edited while it was read.
    """
    with usage_errors(flag, source):
        spans = files(source)
        size = sum(span.stop for span in spans if not span.is_local)
        if size > MOST_REMOTE:
            raise Problem(
                f"{size / 2**30:.1f} GiB of remote files would be read at every start and kept in "
                f"memory; legal: at most {MOST_REMOTE / 2**30:.0f} GiB, or a token store made "
                "from them with recipes.prepare_data"
            )
        reading = Reading(text_field, kind)
        found = [
            reading.document(raw, template)
            for span in spans
            for raw in read_span(span, reading=reading)
        ]
    if not found:
        raise UsageError(f"--{flag}={source!r} has no text; legal: at least one non-empty document")
    return found


def divide(span: Span, num_bytes: int) -> Iterator[Span]:
    """Divide a file into spans of whole documents, each with about `num_bytes` or more.

    Raises:
      Problem: the file cannot be read.
    """
    size, start = span.stop, 0
    if size > num_bytes and tables.is_table(span.path):
        yield from tables.divide(span, num_bytes)
        return
    if size <= num_bytes or span.path.lower().endswith((*COMPRESSED, ".py")):
        yield span
        return
    with read_errors(span.path), open_stored(span, look=True) as file:
        while start < size:
            file.seek(start + num_bytes)
            # The position is most likely within a line, so move to the end of that line.
            _skip(file, to_separator=False)
            if _suffix(span.path) != ".jsonl":
                _skip(file, to_separator=True)
            stop = min(file.tell(), size)
            yield span._replace(start=start, stop=stop)
            start = stop


def read_span(
    span: Span, on_block: BlockCallback = no_callback, *, reading: Reading = _USUAL
) -> Iterator[str]:
    """Yield the documents in a span one at a time, except documents with only white space.

    Args:
      span: a span of a file.
      on_block: a function that is called with each block of stored bytes that is read; see
        `BlockCallback`. It is also called with b"" from time to time while a long document is
        decompressed. An error that it raises stops the reading.
      reading: the field or column with the text, and the kind of the documents. Kinds other than
        "text" are yielded as JSON, from which `Reading.document` makes a document.

    Raises:
      Problem: the file cannot be read, is not of the kind that its name states, or has a line of
        more than 256 MiB or a document of more than 1 GiB.
      RunError: the file was edited while it was read.
    """
    suffix = _suffix(span.path)
    if tables.is_table(span.path):
        texts = tables.read_span(span, reading, on_block)
    elif suffix == ".jsonl":
        texts = _json_lines(span, on_block, reading)
    elif reading.has_marks:
        raise Problem(
            f"{span.path!r} has no fields; legal file types for documents of kind {reading.kind}: "
            ".jsonl, .parquet and .arrow"
        )
    elif suffix == ".py":
        texts = _module(span, on_block)
    else:
        texts = _separated(span, on_block)
    return (text for text in texts if text.strip())


def _suffix(path: str) -> str:
    """Return the suffix that states a file's format, such as ".jsonl" for `a.jsonl.gz`."""
    stem, ending = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if ending in COMPRESSED else ending


def _skip(file: io.BufferedIOBase, *, to_separator: bool) -> None:
    """Skip the rest of the current line, or everything up to the end of the next separator line."""
    begins = True
    while piece := file.readline(SKIP_BYTES):
        if to_separator and begins and _is_separator(piece):
            return
        begins = piece.endswith(b"\n")
        if begins and not to_separator:
            return


class _Line(NamedTuple):
    """A line of a file.

    Attributes:
      content: the bytes of the line, including its newline.
      offset: position of the line in the decompressed file, in bytes.
    """

    content: bytes
    offset: int


def _lines(span: Span, on_block: BlockCallback) -> Iterator[_Line]:
    """Yield the lines in a span, without the byte order mark that a file may start with."""
    packed = span.path.lower().endswith(COMPRESSED)
    with read_errors(span.path), open_unpacked(span, on_block) as file:
        offset = reported = span.start
        if offset:
            file.seek(offset)
        while (packed or offset < span.stop) and (content := file.readline(LONGEST_LINE + 1)):
            if len(content) > LONGEST_LINE:
                raise Problem(
                    f"{span.path!r} line {_line_number(span, offset)} is longer than "
                    f"{LONGEST_LINE} bytes; legal: shorter lines"
                )
            begin, offset = offset, offset + len(content)
            if not packed:
                on_block(content)
            elif offset - reported >= SIGN_OF_LIFE:
                reported = offset
                on_block(b"")
            if begin == 0 and content.startswith(_BOM):
                content, begin = content[len(_BOM) :], len(_BOM)
            yield _Line(content, begin)


def _separated(span: Span, on_block: BlockCallback) -> Iterator[str]:
    """Yield the documents in a span of a .txt file."""
    document, begin = bytearray(), 0
    for line in _lines(span, on_block):
        if _is_separator(line.content):
            yield _decode(document, span, begin)
            document.clear()
        else:
            begin = begin if document else line.offset
            document += line.content
            if len(document) > LONGEST_DOCUMENT:
                raise Problem(
                    f"{span.path!r} has a document of more than {LONGEST_DOCUMENT} bytes, which "
                    f"starts in line {_line_number(span, begin)}; legal: shorter documents, "
                    f"separated by lines {_SEPARATOR.decode()}"
                )
    yield _decode(document, span, begin)


def _is_separator(line: bytes) -> bool:
    return line.startswith(_SEPARATOR) and line[len(_SEPARATOR) :] in (b"\n", b"\r\n", b"", b"\r")


def _json_lines(span: Span, on_block: BlockCallback, reading: Reading) -> Iterator[str]:
    # Lines are split as bytes, because str.splitlines would also split at characters such as
    # U+2028, which JSON strings may contain.
    for line in _lines(span, on_block):
        text = _decode(line.content, span, line.offset)
        if text.strip():
            try:
                yield _json_text(text, reading)
            except Problem as problem:
                number = _line_number(span, line.offset)
                raise Problem(f"{span.path!r} line {number}: {problem}") from None


def objects(span: Span) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, for each line of a .jsonl file, the text "file line number" and the JSON object.

    Raises:
      Problem: the file cannot be read, or a line is not a JSON object.
    """
    for number, line in enumerate(_lines(span, no_callback), 1):
        text, where = _decode(line.content, span, line.offset), f"{span.path!r} line {number}"
        if text.strip():
            try:
                value = _json_object(text, "{...}")
            except Problem as problem:
                raise Problem(f"{where}: {problem}") from None
            yield where, value


def _module(span: Span, on_block: BlockCallback) -> Iterator[str]:
    """Yield the source of a module in the standard library.

    A module that is not UTF-8 is skipped, because the user cannot be expected to correct it.
    """
    with read_errors(span.path), open_stored(span) as file:
        content = file.read()
    on_block(content)
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
    """Return the line number, from 1, of the byte at `offset` in the decompressed file."""
    number = 1
    with open_unpacked(span) as file:
        while offset > 0 and (block := file.read(min(offset, 2**20))):
            number += block.count(b"\n")
            offset -= len(block)
    return number


def _json_text(line: str, reading: Reading) -> str:
    """Return the document in a line of a .jsonl file, in the form that `Reading.raw` returns."""
    like = _LIKE.get(reading.kind) or f'{{{json.dumps(reading.names[0])}: "..."}}'
    value, legal = _json_object(line, like), f"legal: an object like {like}"
    values = [value.get(name) for name in reading.names]
    if (missing := reading.check(values)) is not None:
        shown = [f"{name[:40]!r} ({type(v).__name__})" for name, v in list(value.items())[:8]]
        fields = ", ".join(shown + ["..."] * (len(value) > 8)) or "none"
        raise Problem(f"the object has {missing}; its fields: {fields}; {legal}")
    for name, text in zip(reading.names, values, strict=True):
        if (character := _surrogate(text)) is not None:
            where = f"at character {character} of " if isinstance(text, str) else "in "
            raise Problem(
                f"the object has an unpaired surrogate {where}{json.dumps(name)}; "
                "legal: Unicode text"
            )
    return reading.raw(values)


def _surrogate(value: Any) -> int | None:
    """Return the position of the first unpaired surrogate in a text or in JSON, or None."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def _json_object(line: str, like: str) -> dict[str, Any]:
    """Return the JSON object on a line of a .jsonl file; error messages show the example `like`."""
    legal = f"legal: an object like {like}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Problem(f"the line is not JSON ({error}); {legal}") from None
    if not isinstance(value, dict):
        raise Problem(f"the line is a JSON {type(value).__name__}, not an object; {legal}")
    return value
