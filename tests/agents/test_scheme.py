"""`load_scheme`: every way a file of a scheme can be wrong, with the fix in the message."""

import pytest

from molt.agents.scheme import load_scheme
from molt.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "scheme.py"
    path.write_text(text)
    return str(path)


def test_a_good_file_gives_its_coroutine_function(tmp_path):
    path = write(tmp_path, "async def run_group(task, rollout, *, depth=2):\n    return None\n")
    assert load_scheme(path).__name__ == "run_group"
    assert load_scheme("examples/python/schemes/draft_revise.py").__name__ == "run_group"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "async def run_groups(task, rollout): ...",
            r"exports no `run_group`.*Did you mean 'run_groups'.*Add `async def",
        ),
        ("def run_group(task, rollout): ...", r"is no coroutine of two arguments.*Write `async def run_group"),
        ("async def run_group(task): ...", r"is no coroutine of two arguments"),
        ("run_group = 3", r"is no coroutine of two arguments"),
        ("import nothing_of_that_name", r"cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_scheme(write(tmp_path, text))
    assert "`rollout.scheme` (=" in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"is not a file.*Did you mean 'scheme.py'"):
        load_scheme(str(tmp_path / "schema.py"))
