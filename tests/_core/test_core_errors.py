"""Error codes of the core and the exceptions that stand for them."""

import pytest

from fastrt import errors
from fastrt._core.memory.errors import raise_code


@pytest.mark.parametrize("code", sorted(errors.ERROR_CODES))
def test_code_raises_its_class_with_advice(code):
    with pytest.raises(errors.ERROR_CODES[code], match=r"\w+ \w+"):
        raise_code(code)


@pytest.mark.parametrize("code", [-12, -100, -(1 << 31)])
def test_unknown_code_raises_the_base_class(code):
    with pytest.raises(errors.FastrtError, match=f"core error {code}"):
        raise_code(code)


@pytest.mark.parametrize("code", [0, 1, 5, (1 << 31) - 1])
def test_value_that_is_no_error_passes(code):
    assert raise_code(code) == code


def test_signal_whose_handler_returned_is_no_error():
    assert raise_code(-9) == 0


@pytest.mark.parametrize("code", [None, "x", 1 << 31])
def test_code_that_is_no_number_is_refused(code):
    with pytest.raises((TypeError, OverflowError)):
        raise_code(code)
