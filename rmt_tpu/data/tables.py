"""Documents in a column of Parquet and Arrow files.

A table can be divided only between its groups, which are the row groups of a Parquet file or the
record batches of an Arrow file. By convention, group i of n is the range of bytes from `size * i //
n` to `size * (i + 1) // n` in the file. A span (a range of bytes) contains the groups that begin
within it. An Arrow stream, which has no list of its record batches, cannot be divided.

Only the text column is read. A few hundred rows of a Parquet file, or one record batch of an Arrow
file, are in memory at a time.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from rmt_tpu.data.inputs import BlockCallback, Problem, Span, open_stored, read_errors
from rmt_tpu.data.marked import Reading
from rmt_tpu.data.remote import EXTRA

TABLES = (".parquet", ".arrow")

# The first bytes of an Arrow file. An Arrow stream begins with other bytes.
_ARROW_FILE = b"ARROW1"
# This number of rows of a Parquet file is decoded at a time.
_ROWS = 256
# This number of bytes of a Parquet file is read at a time.
_BUFFER = 2**20
# Maximum size of a document in characters.
LONGEST_DOCUMENT = 2**30
_SHOWN_COLUMNS = 12


def is_table(path: str) -> bool:
    """Return whether a file name has the suffix of a Parquet or an Arrow file."""
    return path.lower().endswith(TABLES)


def divide(span: Span, num_bytes: int) -> Iterator[Span]:
    """Divide a table between its groups into spans of about `num_bytes` or more.

    Raises:
      Problem: the file cannot be read.
    """
    with _opened(span, look=True) as file:
        count = _num_groups(span, file)
    start = span.start
    for group in range(1, count):
        stop = _begin(span, group, count)
        if stop - start >= num_bytes:
            yield span._replace(start=start, stop=stop)
            start = stop
    yield span._replace(start=start)


def read_span(span: Span, reading: Reading, on_block: BlockCallback) -> Iterator[str]:
    """Yield the documents in the groups of a span, in order; rows with a null are skipped.

    Args:
      span: a span of a table.
      reading: the columns that a document is read from.
      on_block: a function that is called with the encoded texts, and with the number of bytes in
        the file that they account for; see `BlockCallback`.

    Raises:
      Problem: the file cannot be read, a column is missing or has the wrong type, or a document is
        too long or not UTF-8.
      RunError: the file was edited while it was read.
    """
    at = span.start
    with _opened(span) as file:
        read = _parquet if span.path.lower().endswith(".parquet") else _arrow
        for stop, texts in read(span, file, reading):
            on_block(b"".join(map(_encoded, texts)), stop - at)
            at = stop
            for text in texts:
                if text is not None:
                    if len(text) > LONGEST_DOCUMENT:
                        raise Problem(
                            f"{span.path!r} has a document of more than {LONGEST_DOCUMENT} "
                            "characters; legal: shorter documents"
                        )
                    yield text
    on_block(b"", span.stop - at)


def _encoded(text: str | None) -> bytes:
    """Encode a text with its length, so that a digest of texts depends on their bounds."""
    if text is None:
        return b"null\n"
    content = text.encode()
    return b"%d\n%b" % (len(content), content)


@contextlib.contextmanager
def _opened(span: Span, *, look: bool = False) -> Iterator[io.BufferedIOBase]:
    """Open a table, and turn errors of pyarrow in the `with` body into a Problem."""
    try:
        import pyarrow
    except ImportError:
        raise Problem(f"{span.path!r} needs pyarrow: {EXTRA}") from None
    try:
        with read_errors(span.path), open_stored(span, look=look) as file:
            watched = _Watched(file)
            try:
                yield watched
            except Exception:
                if watched.error is not None:
                    raise watched.error from None
                raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:300]
        raise Problem(
            f"{span.path!r} cannot be read: {reason}; legal: complete Parquet and Arrow files"
        ) from None


class _Watched(io.BufferedIOBase):
    """A file that keeps the error of a failed read, because pyarrow may raise another error."""

    def __init__(self, file: io.BufferedIOBase):
        self._file = file
        self.error: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        try:
            return self._file.read(size)
        except Exception as error:
            self.error = error
            raise

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _num_groups(span: Span, file: io.BufferedIOBase) -> int:
    import pyarrow
    import pyarrow.parquet

    if span.path.lower().endswith(".parquet"):
        return pyarrow.parquet.ParquetFile(file).metadata.num_row_groups
    if not _is_arrow_file(file):
        return 1
    return pyarrow.ipc.open_file(file).num_record_batches


def _begin(span: Span, group: int, count: int) -> int:
    """Return the byte at which a group begins, by the rule in the module's docstring."""
    size = span.version[0]
    return size * group // count


def _groups(span: Span, count: int) -> list[int]:
    return [group for group in range(count) if span.start <= _begin(span, group, count) < span.stop]


# A reader of a table yields these pairs. The first value is the position in the span up to which it
# has read. The second has the texts of the rows read since the previous pair.
_Texts = Iterator[tuple[int, list[str | None]]]


def _parquet(span: Span, file: io.BufferedIOBase, reading: Reading) -> _Texts:
    from pyarrow.parquet import ParquetFile

    # Without `pre_buffer`, pages are decoded as they are read. With it, the whole column of a row
    # group would be in memory.
    table = ParquetFile(
        file, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True
    )
    _check_columns(span, table.schema_arrow, reading)
    count = table.metadata.num_row_groups
    for group in _groups(span, count):
        start, stop = (_begin(span, g, count) for g in (group, group + 1))
        rows, done = table.metadata.row_group(group).num_rows, 0
        options = {"row_groups": [group], "columns": [*reading.names], "use_threads": False}
        for batch in table.iter_batches(_ROWS, **options):
            where = f"row group {group + 1}, row {done + 1} or later"
            done += batch.num_rows
            yield (
                start + (stop - start) * done // max(rows, 1),
                _documents(span, batch, reading, where),
            )


def _arrow(span: Span, file: io.BufferedIOBase, reading: Reading) -> _Texts:
    import pyarrow

    is_file = _is_arrow_file(file)
    begin = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    schema = begin(file).schema
    _check_columns(span, schema, reading)
    file.seek(0)
    indices = [schema.get_field_index(name) for name in reading.names]
    options = pyarrow.ipc.IpcReadOptions(included_fields=sorted(indices), use_threads=False)
    table = begin(file, options=options)
    if is_file:
        count = table.num_record_batches
        batches = ((g, table.get_batch(g)) for g in _groups(span, count))
        position = lambda group: _begin(span, group + 1, count)
    else:
        batches = enumerate(table)
        position = lambda group: min(file.tell(), span.stop)
    for group, batch in batches:
        # Without this check, a damaged batch would crash the process.
        batch.validate(full=True)
        texts = _documents(span, batch, reading, f"record batch {group + 1}")
        yield position(group), texts


def _is_arrow_file(file: io.BufferedIOBase) -> bool:
    start = file.read(len(_ARROW_FILE))
    file.seek(0)
    return start == _ARROW_FILE


def _check_columns(span: Span, schema: Any, reading: Reading) -> None:
    """Check that a table has the columns of a document.

    Raises:
      Problem: a column is missing, occurs more than once or has the wrong type.
    """
    is_legal, kind = (_is_list, "lists") if reading.kind == "messages" else (_is_text, "strings")
    for name in reading.names:
        index = schema.get_field_index(name)
        if index >= 0 and is_legal(schema.field(index).type):
            continue
        shown = [f"{n[:40]!r} ({_type_name(schema, i)})" for i, n in enumerate(schema.names)]
        columns = ", ".join(shown[:_SHOWN_COLUMNS] + ["..."] * (len(shown) > _SHOWN_COLUMNS))
        raise Problem(
            f"{span.path!r} has no column {name!r} of {kind}; columns: {columns or 'none'}; "
            f"legal: --text_field=NAME of a column of {kind}"
        )


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind)


def _type_name(schema: Any, index: int) -> str:
    return str(schema.field(index).type)[:40]


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
    )
    return any(test(kind) for test in tests)


def _documents(span: Span, batch: Any, reading: Reading, where: str) -> list[str | None]:
    """Return the document of each row, as `Reading.raw` returns it, or None if the row has a null.

    Raises:
      Problem: a text is not UTF-8, or a row is not a document.
    """
    if not reading.has_marks:
        return _strings(span, batch.column(reading.names[0]), where)
    if reading.kind == "completion":
        columns = [_strings(span, batch.column(name), where) for name in reading.names]
    else:
        columns = [batch.column(name).to_pylist() for name in reading.names]
    found = []
    for values in zip(*columns, strict=True):
        if any(value is None for value in values):
            found.append(None)
        elif (missing := reading.check(values)) is not None:
            raise Problem(f"{span.path!r} has {missing}, in {where}")
        else:
            found.append(reading.raw(values))
    return found


def _strings(span: Span, column: Any, where: str) -> list[str | None]:
    """Return the texts of a column; columns of bytes are decoded as UTF-8.

    Raises:
      Problem: a text is not UTF-8.
    """
    try:
        return [
            value.decode() if isinstance(value, bytes) else value for value in column.to_pylist()
        ]
    except UnicodeDecodeError as error:
        raise Problem(
            f"{span.path!r} is not UTF-8 in {where} ({error.reason}); legal: UTF-8 text"
        ) from None
