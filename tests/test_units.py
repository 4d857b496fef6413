"""Bytes survive printing and reading; what is no number of bytes is refused with the remedy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.errors import MemlabError
from memlab.units import GiB, KiB, MiB, TiB, format_bytes, format_ratio, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (KiB, "1.00 KiB"),
        (round(12.34 * MiB), "12.3 MiB"),
        (123 * MiB, "123 MiB"),
        (1023 * MiB, "1023 MiB"),
        (MiB - 1, "1.00 MiB"),
        (GiB - 1, "1.00 GiB"),
        (TiB - 1, "1.00 TiB"),
        (5000 * TiB, "5000 TiB"),
        (-512, "-512 B"),
        (-3 * GiB // 2, "-1.50 GiB"),
    ],
)
def test_bytes_are_printed_with_three_digits(n, text):
    assert format_bytes(n) == text


@given(st.integers(0, 2**60))
def test_printed_bytes_read_back_to_three_digits(n):
    assert math.isclose(parse_bytes(format_bytes(n)), n, rel_tol=0.005)


@given(st.integers(-(2**60), 2**60))
def test_a_difference_is_printed_like_its_size(n):
    assert format_bytes(n).lstrip("-") == format_bytes(-n).lstrip("-")


@given(st.integers(0, 2**60))
def test_whole_numbers_are_read_exactly(n):
    assert parse_bytes(n) == parse_bytes(str(n)) == parse_bytes(f"{n} B") == n


@pytest.mark.parametrize(
    ("amount", "n"),
    [
        ("512 MiB", 512 * MiB),
        ("1.5GiB", 3 * GiB // 2),
        ("16 GB", 16 * 10**9),
        (" 2 tib ", 2 * TiB),
        ("0.1 KiB", 102),
        (16e9, 16 * 10**9),
        (0, 0),
    ],
)
def test_amounts_that_people_write(amount, n):
    assert parse_bytes(amount) == n
    assert type(parse_bytes(amount)) is int


def test_numpy_integers_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert parse_bytes(numpy.int64(MiB)) == MiB


@pytest.mark.parametrize(
    "amount",
    ["", "MiB", "12 parsecs", "12 Mb it", "-1 MiB", "1,5 GiB", "1e9", "nan", "16G", "٣ MiB"]
    + [-1, 0.8, math.nan, math.inf, True, None, [1], 1j],
)
def test_what_is_no_number_of_bytes_is_refused(amount):
    with pytest.raises(MemlabError) as error:
        parse_bytes(amount)
    assert repr(amount) in str(error.value)
    assert "'512 MiB'" in str(error.value)
    assert "GiB" in str(error.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 µs"),
        (789e-6, "789 µs"),
        (0.9999999, "1.00 s"),
        (45.6e-3, "45.6 ms"),
        (1.234, "1.23 s"),
        (125, "125 s"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(1, "1.00x"), (1.256, "1.26x"), (0.55, "0.55x"), (0.00423, "0.0042x"), (12.34, "12.34x")]
)
def test_ratios(ratio, text):
    assert format_ratio(ratio) == text
