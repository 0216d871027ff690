"""Which texts are numbers. The only definition; docs/data.md has it too.

    kind_of("12")       # INTEGER
    kind_of("1.5e3")    # NUMBER
    kind_of("007")      # CODE

    integer = [sign] (0 | a digit from 1 to 9, then digits)
    number  = integer, or with a decimal point, an exponent, or both: 1.5  .5  1.  2e-3
    sign    = + or -

Digits are 0 to 9 of ASCII. Everything else is text, also what int() and float() of Python would
take: 1_000, inf, nan, other digits of Unicode. `kind_of` also says which numbers a type holds.
"""

import re
import struct

INTEGER = "integer"  # Each type holds it.
LONG = "long"  # An integer that int64 and float64 hold, and float32 does not.
LONGEST = "longest"  # An integer that only int64 holds.
NUMBER = "number"  # It has a fraction or an exponent. float32 holds it, rounded to 7 digits.
DOUBLE = "double"  # The same, but float32 would change its whole part, or make it infinite or 0.
CODE = "code"  # Digits that no type keeps: they begin with 0, or are an integer beyond int64.
FOREIGN = "foreign"  # A number in another notation: 3,5  37,697  other digits; or 1e400, 1e-400.
GROUPED = "grouped"  # The same among numbers; otherwise text: 1_000  555 123 456  1.100.200.
TEXT = "text"

INTEGERS = (INTEGER, LONG, LONGEST)
NUMBERS = (*INTEGERS, NUMBER, DOUBLE)

_EXPONENT = r"(?:[eE][+-]?[0-9]+)?"
_NUMERAL = re.compile(
    r"(?P<integer>[+-]?(?:0|[1-9][0-9]{0,6}))"
    r"|(?P<long>[+-]?[1-9][0-9]{7,})"
    rf"|(?P<number>[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+){_EXPONENT})"
    rf"|(?P<code>[+-]?0[0-9]+(?:\.[0-9]*)?{_EXPONENT})"
    r"|(?P<grouped>[+-]?[1-9][0-9]{0,2}(?:(?:_[0-9]{3})+|(?: [0-9]{3})+|(?:\.[0-9]{3}){2,}))"
    # A decimal comma, or other separators between thousands and a decimal point or comma; or the
    # notation of a number, with the digits or the minus sign of another script.
    "|(?P<foreign>[+\\-\u2212]?(?:"
    r"\d+,\d+(?:[eE][+-]?\d+)?|,\d+|\d{1,3}(?:,\d{2,3})+(?:\.\d+)?"
    "|(?!0)\\d{1,3}(?:[ .'\u2019\u00a0\u2009\u202f]\\d{3})+(?:[.,]\\d+)?"
    r"|\d{1,3}(?:_\d{3})+\.\d*|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?))"
)
_MOST_DIGITS = 20
_WHOLE_FLOAT32, _WHOLE_FLOAT64 = 2**24, 2**53  # Up to these, a float holds each integer.
_LEAST_FLOAT32, _MOST_FLOAT32 = 1.1754943508222875e-38, 3.4028234663852886e38  # With all digits.
LEAST_FLOAT64, MOST_FLOAT64 = 5e-324, 1.7976931348623157e308


def kind_of(value: str) -> str:
    """The kind of a text: one of the names above."""
    if (match := _NUMERAL.fullmatch(value)) is None:
        return TEXT
    kind = str(match.lastgroup)
    if kind == LONG:
        if len(value) > _MOST_DIGITS or not -(2**63) <= (number := int(value)) < 2**63:
            return CODE
        if _float32_holds(number):
            return INTEGER
        return LONG if abs(number) <= _WHOLE_FLOAT64 else LONGEST
    if kind == NUMBER:
        size = abs(float(value))
        if size > _WHOLE_FLOAT32:
            if size > MOST_FLOAT64:
                return FOREIGN
            return NUMBER if _float32_holds(size) else DOUBLE
        if size < _LEAST_FLOAT32 and re.match("[^eE]*[1-9]", value):
            return DOUBLE if size else FOREIGN
    return kind


def _float32_holds(number: float) -> bool:
    if abs(number) > _MOST_FLOAT32:
        return False
    (nearest,) = struct.unpack("f", struct.pack("f", number))
    return bool(nearest == number)
