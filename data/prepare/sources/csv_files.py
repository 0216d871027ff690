"""CSV files as they are found: encoding, separator, line of column names, lines of values.

    layout = layout_of("people.csv", Options())
    for line, row in lines("people.csv", layout): ...       # row: {"age": "37", ...}

docs/data.md says how the separator is found.
"""

import codecs
import contextlib
import csv
import io
import itertools
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TextIO

from data.numerals import NUMBERS, TEXT, kind_of
from data.prepare.sources import Options, open_unpacked
from data.system.files import DataError

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
_SEPARATORS, _RARER = ",;\t", "| "
_SEPARATOR_NAMES = {"tab": "\t", r"\t": "\t", "space": " "}
_FIRST_LINES = 20
_FIRST_BYTES = 1 << 16
_SEP_LINE = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # Of Excel.
_BREAKS = re.compile(rb"[\s,;|\"]")
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # Before UTF-16, whose mark begins it.
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_NO_TEXT = {
    b"PK\x03\x04": "a ZIP archive or an Excel workbook: unzip it, or save it as CSV",
    b"\xd0\xcf\x11\xe0": "an Excel workbook: save it as CSV",
    b"PAR1": "a Parquet file: type parquet:NAME in place of csv:NAME",
}
# A value may be an article or an image in base64, but a quote without end must not take all memory.
csv.field_size_limit(1 << 26)
_DAMAGE = (csv.Error, OSError, EOFError, zlib.error)  # OSError: gzip's, of a file that is none.


class Layout(NamedTuple):
    """How a file is read.

    Attributes:
        columns: Their names; `column_0`, ... for columns without a name.
        unnamed: The columns without a name; the last column, if the file has no names.
        separator: The character between values. Several spaces count as one.
        num_skipped: Lines before the values, or before the names: 1 if the first is `sep=;`.
        has_header: True if the first line of the others has the names.
        note: What a user should know about the separator.
    """

    columns: tuple[str, ...]
    unnamed: tuple[str, ...]
    separator: str
    encoding: str
    num_skipped: int
    has_header: bool
    note: str = ""


def layout_of(path: str, options: Options) -> Layout:
    """Finds the layout of a file from its first lines, as far as the options do not say it."""
    encoding, separator = _encoding(path, options.encoding), _separator_of(options.delimiter)
    num_skipped, note = 0, ""
    try:
        with _open(path, encoding) as file:
            first = list(itertools.islice(file, _FIRST_LINES))
        if first and (sep := _SEP_LINE.fullmatch(first[0].rstrip("\r\n"))):
            num_skipped, separator = 1, separator or sep[1]
        if not separator:
            separator = _deduced_separator(first, has_lists=options.lists is not None)
            if separator in _RARER:
                name = "spaces" if separator == " " else repr(separator)
                note = f"{path}: {name} separate the values. If they do not, add --delimiter=,"
    except (*_DAMAGE, UnicodeError) as error:
        raise _unreadable(path, 0, encoding, error) from None
    has_header = options.header is not False
    layout = Layout((), (), separator, encoding, num_skipped, has_header, note)
    _, values = next(_raw_lines(path, layout), (0, []))
    stripped = [value.strip() for value in values]
    return _with_columns(path, layout, stripped, is_sure=options.header is not None)


def _with_columns(path: str, layout: Layout, found: Sequence[str], *, is_sure: bool) -> Layout:
    """The layout with the names of columns. `found`: the values of the first line."""
    if not found:
        raise DataError(
            f"{path} must begin with a line of column names, or with data. Received: nothing. "
            "Give a --source that has lines."
        )
    numbered = [f"column_{number}" for number in range(len(found))]
    if not layout.has_header:
        # The last one has no values if each line ends with the separator.
        return layout._replace(columns=tuple(numbered), unnamed=(numbered[-1],))
    named = [name for name in found if name]
    if not is_sure and not _are_names(named, len(found)):
        raise DataError(
            f"{path} begins with numbers, {', '.join(found[:5])}, and not with a line of column "
            "names. Add --noheader: the columns are then column_0, column_1, ... If these are "
            "names, add --header."
        )
    columns = [name or number for name, number in zip(found, numbered, strict=True)]
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise DataError(
            f"{path} must begin with a line of column names, each once. Received {twice!r} more "
            "than once. Rename it; or, if the first line is data, add --noheader."
        )
    unnamed = [column for column, name in zip(columns, found, strict=True) if not name]
    return layout._replace(columns=tuple(columns), unnamed=tuple(unnamed))


def _are_names(named: Sequence[str], num_columns: int) -> bool:
    """True if `named`, the values of the first line without empty ones, may be names of columns.

    Numbers may be among them in rising order, as of pixels or years. Two empty ones are values.
    """
    numbers = [float(name) for name in named if kind_of(name) in NUMBERS]
    is_rising = numbers == sorted(set(numbers))
    return TEXT in map(kind_of, named) and not (
        numbers and (not is_rising or len(named) < num_columns - 1)
    )


def lines(path: str, layout: Layout) -> Iterator[tuple[int, dict[str, str]]]:
    """The number of each line of data, and its values by column."""
    columns = layout.columns
    found = _raw_lines(path, layout)
    if layout.has_header:
        next(found)
    for line, values in found:
        if len(values) > len(columns):
            values = values[: len(columns)] + _without_end(values[len(columns) :])
        if len(values) != len(columns):
            raise DataError(
                f"{path}, line {line}: {len(values)} values, and there are {len(columns)} columns "
                f"({', '.join(columns[:5])}{', ...' if len(columns) > 5 else ''}), separated by "
                f"{layout.separator!r}. A value with the separator in it needs double quotes. If "
                "the separator is another, say which: --delimiter=tab, for example."
            )
        yield line, dict(zip(columns, map(str.strip, values), strict=True))


def _raw_lines(path: str, layout: Layout) -> Iterator[tuple[int, list[str]]]:
    line = 0
    try:
        with _open(path, layout.encoding) as file:
            for _ in range(layout.num_skipped):
                next(file)
            separator = layout.separator
            reader = csv.reader(
                file, strict=True, delimiter=separator, skipinitialspace=separator == " "
            )
            for values in filter(None, reader):
                line = reader.line_num + layout.num_skipped
                yield line, values
    except (*_DAMAGE, UnicodeError) as error:
        raise _unreadable(path, line + 1, layout.encoding, error) from None


def _open(path: str, encoding: str) -> TextIO:
    return io.TextIOWrapper(open_unpacked(path), encoding, newline="")


def _encoding(path: str, given: str | None) -> str:
    """The encoding of a file: `given`, or what a mark at its beginning says, or UTF-8."""
    try:
        with open_unpacked(path) as file:
            first = file.read(_FIRST_BYTES)
    except _DAMAGE as error:
        raise DataError(f"{path}: {error}.") from None
    for beginning, what in _NO_TEXT.items():
        if first.startswith(beginning):
            raise DataError(f"{path} is no CSV file, but {what}.")
    marked = next((name for mark, name in _MARKS.items() if first.startswith(mark)), "")
    if given is not None:
        name = _known_encoding(given)
        if marked and not marked.startswith(name[:6]):
            raise DataError(f"{path} begins with the mark of {marked}. Leave --encoding out.")
        return marked or name
    if not marked and first.count(b"\0") > len(first) // 4:
        likely = "utf-16-le" if first.find(b"\0") % 2 else "utf-16-be"
        raise DataError(
            f"{path} is not UTF-8, but probably UTF-16 without a mark at its beginning. Add "
            f"--encoding={likely}."
        )
    return marked or "utf-8"


def _known_encoding(given: str) -> str:
    try:
        "".encode(given)  # Fails for a codec that is not of text, such as base64.
        return codecs.lookup(given).name
    except (LookupError, UnicodeError):
        raise DataError(
            f"--encoding={given} is no encoding of text. Type --encoding=latin-1, cp1252, utf-16 "
            "or gb18030, for example."
        ) from None


def _unreadable(path: str, line: int, encoding: str, error: Exception) -> DataError:
    if not isinstance(error, UnicodeDecodeError):
        where = f"{path}, line {line}" if line else path
        if not str(error).startswith("field larger than"):
            return DataError(f"{where}: {error}.")
        return DataError(
            f"{where}: a value has more than {csv.field_size_limit():,} characters. Probably a "
            "double quote is not closed: close it, or, if it belongs to the value, write it twice "
            "and put the value in double quotes. Otherwise shorten the value."
        )
    if encoding.startswith(("utf-16", "utf-32")):
        return DataError(f"{path} is not {encoding}, or is cut off: {error}. Copy it again.")
    byte = error.object[error.start]
    if not encoding.startswith("utf-8"):
        return DataError(
            f"{path} is not {encoding}: it has byte 0x{byte:02x}. Type another --encoding: "
            "--encoding=latin-1 reads all bytes."
        )
    before, after = error.object[: error.start][-20:], error.object[error.start :][:20]
    word = _BREAKS.split(before)[-1] + _BREAKS.split(after)[0]
    western = "cp1252" if re.search(rb"[\x80-\x9f]", word) else "latin-1"
    readings = []
    for name, language in ((western, "Western European"), ("gb18030", "Chinese")):
        with contextlib.suppress(UnicodeDecodeError):
            readings.append(f"--encoding={name} ({language}) reads it as {word.decode(name)!r}")
    if western == "cp1252":
        readings.append("--encoding=latin-1 reads all bytes")
    return DataError(
        f"{path} is not UTF-8: it has {word!r}. Say what it is: {'; '.join(readings)}."
    )


def _separator_of(option: str | None) -> str:
    separator = _SEPARATOR_NAMES.get(option or "", option or "")
    if option is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise DataError(
            f"{shlex.quote(f'--delimiter={option}')} is not one character. Type '--delimiter=;', "
            "'--delimiter=|', --delimiter=tab or --delimiter=space, for example."
        )
    return separator


def _deduced_separator(first: Sequence[str], *, has_lists: bool) -> str:
    """The separator of the first lines. `has_lists`: the rarer ones separate items of lists."""

    def widths(separator: str) -> list[int]:
        rows = csv.reader(first, delimiter=separator, skipinitialspace=separator == " ")
        found = [len(_without_end(row)) for row in filter(None, rows)]
        # The last of these lines may be a part of a row.
        return found[:-1] if len(first) == _FIRST_LINES else found

    common = {separator: widths(separator) for separator in _SEPARATORS}
    best = max(_SEPARATORS, key=lambda separator: common[separator][:1])
    if has_lists or len(set(common[best])) == 1 < common[best][0]:
        return best
    for separator in _RARER if common[best][:1] <= [1] else _RARER[:1]:
        found = widths(separator)
        if len(found) > 1 and len(set(found)) == 1 < found[0]:
            return separator
    return best


def _without_end(values: list[str]) -> list[str]:
    """The values without empty ones at the end, of a line that ends with the separator."""
    while values and not values[-1].strip():
        values = values[:-1]
    return values
