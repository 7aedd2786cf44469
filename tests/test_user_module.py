"""Whose line an error is blamed on."""

from pathlib import Path

import pytest

import molt
from molt.user_module import is_raised_by_user, place_of, raised_at

MOLT = Path(molt.__file__).parent


def error_in(file: Path) -> ZeroDivisionError:
    """Raised in line 2 of the file, as the only frame."""
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("\n1 / 0", file, "exec"), {})
    error = raised.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without the line of this test


@pytest.mark.parametrize("file", [Path("agent.py"), MOLT.parent / "molt_agent.py"])
def test_a_file_beside_molt_is_a_users(file):
    error = error_in(file)
    assert is_raised_by_user(error) and raised_at(error) == f"{file}:2"


def test_a_line_of_molt_is_not_a_users():
    assert not is_raised_by_user(error_in(MOLT / "agents" / "env.py"))


def test_what_has_no_source_has_no_place():
    assert place_of(len) == ""
    assert place_of(error_in).startswith(f" ({__file__}:")
