import math

from surogate_core.numbers import count, rate, significant


def test_large_numbers_have_no_exponent():
    assert [count(n) for n in (0, 999, 999.4, 999.6, 1000, 93_512, 999_500, 4.838e6, 8.19e9, 1e12, 1.5e16)] == [
        *("0", "999", "999", "1k", "1k", "93.5k", "1M", "4.84M", "8.19G", "1T", "15,000T")
    ]
    assert [rate(n) for n in (0.25, 999.4, 999.6, 4838.2, 4.838e6)] == ["0.25", "999", "1k", "4.84k", "4.84M"]
    assert [significant(n) for n in (0, 0.012345, 1e-5, 12.345, 999.4, 999.6, 4838.2, 1e6, -4838.2)] == [
        *("0", "0.0123", "1e-05", "12.3", "999", "1,000", "4,838", "1,000,000", "-4,838")
    ]
    assert (significant(9999.6, 4), significant(123456.7, 6), significant(0.123456, 2)) == ("10,000", "123457", "0.12")
    assert [significant(n) for n in (math.inf, -math.inf, math.nan)] == ["inf", "-inf", "nan"]


def test_no_number_of_any_size_is_printed_with_a_positive_exponent():
    for exponent in range(-12, 19):
        for mantissa in (1.0, 4.84, 9.994, 9.9951, 9.99999):
            value = mantissa * 10.0**exponent
            for text in (count(value), rate(value), *(significant(value, digits) for digits in (2, 3, 4, 6))):
                assert "e+" not in text, (value, text)
