"""scripts/style.py against numbers counted by hand."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "style.py"
_spec = importlib.util.spec_from_file_location("style", SCRIPT)
style = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(style)

SOURCE = '''"""A docstring counts neither as tokens nor as lines."""

a, b = 1, 2
c, d = divmod(7, 2)


def f(x):
    """Nor does this one."""
    # nor a comment
    return [y for y in x] if x else (lambda: 0)


g = [[z for z in y] for y in a]
h = {y: z for y in a for z in y}
'''


def test_one_file_counted_by_hand():
    counts = style.count(SOURCE)
    # a , b = 1 , 2 (7); c , d = divmod ( 7 , 2 ) (10); def f ( x ) : (6);
    # return [ y for y in x ] if x else ( lambda : 0 ) (16);
    # g = [ [ z for z in y ] for y in a ] (15); h = { y : z for y in a for z in y } (15)
    assert counts.tokens == 7 + 10 + 6 + 16 + 15 + 15
    assert counts.lines == 6 and counts.file_lines == [6]
    assert counts.tokens_per_line == pytest.approx(69 / 6)
    assert counts.tuple_assignments == 1  # the result of divmod is unpacked, which is none
    assert counts.nested_comprehensions == 2  # g has one inside, h has two `for`
    assert counts.lambdas == 1 and counts.conditional_expressions == 1
    assert counts.per_thousand_lines(counts.lambdas) == pytest.approx(1000 / 6)


def test_long_functions_and_deep_nesting():
    body = "".join(f"    x{i} = {i}\n" for i in range(60))
    assert style.count(f"def f():\n{body}").long_functions == 1  # 61 lines
    assert style.count(f"def f():\n{body[: body.index('    x59')]}").long_functions == 0  # 60 lines
    four = "def f():\n if a:\n  for b in c:\n   with d:\n    while e:\n     pass\n"
    assert style.count(four).deep_functions == 1
    assert style.count(four.replace("while e:", "g()").replace("     pass\n", "")).deep_functions == 0
    chain = "def f():\n if a:\n  pass\n elif b:\n  pass\n elif c:\n  pass\n elif d:\n  pass\n"
    assert style.count(chain).deep_functions == 0  # an elif is as deep as its if


@pytest.fixture
def tree(tmp_path):
    """The same code twice, once spread over lines by a trailing comma."""
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "spread.py").write_text("f(\n    a,\n    b,\n)\n")
    (tmp_path / "joined.py").write_text("f(a, b)\n")
    (tmp_path / "empty.py").write_text("")
    return tmp_path


def test_a_trees_own_line_breaks_do_not_count(tree):
    folders = style.by_folder(style.formatted_files(tree))
    assert sorted(folders) == [".", "part/"]
    assert folders["part/"].lines == folders["."].lines == 1
    everything = style.total(folders)
    assert everything.tokens_per_line == 6  # f ( a , b )
    assert everything.file_lines == [1, 1]  # an empty file has no say in the median
    assert (tree / "part" / "spread.py").read_text().count("\n") == 4  # only a copy is formatted


def test_several_trees_side_by_side_and_the_densest_functions(tree, tmp_path, capsys):
    style.main([str(tree), str(tree / "joined.py")])
    lines = capsys.readouterr().out.splitlines()
    totals = lines[lines.index("in total") + 1 :]
    assert totals[0].split()[1:] == ["6.0", "2", "0.0", "0.0", "0.0", "0.0", "0", "0", "1"]
    assert totals[1].split()[1:] == ["6.0", "1", "0.0", "0.0", "0.0", "0.0", "0", "0", "1"]

    lean = "def lean():\n" + "    a = 1\n" * 5
    dense = "def dense():\n" + "    a = [b, c, d, e, f]\n" * 5
    (tree / "functions.py").write_text(f"{lean}\n\n{dense}")
    style.main([str(tree), "--functions", "1"])
    # def dense ( ) : and five times a = [ b , c , d , e , f ]: (5 + 5 * 13) / 6
    assert capsys.readouterr().out.split() == ["11.7", "6", "lines", f"{tree}/functions.py:9", "dense"]


def test_a_tree_that_is_not_there_is_told(capsys):
    with pytest.raises(SystemExit):
        style.main(["nowhere"])
    assert "nowhere does not exist: there is nothing to measure. Name a folder" in capsys.readouterr().err
