"""Datasets as one sequence of plain dicts, and the account of the rows that cannot be used.

A dataset is a file (`files.py`), a directory that `datasets` saved, a directory of files, or a name on the
hub. Rows stay raw (lines, Arrow) and are decoded when they are read.
"""

import glob
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, TypeVar

from molt import hub
from molt.config import comma_list
from molt.data.files import READERS, Part, Row, table_part
from molt.errors import DataError, UnusableRow, did_you_mean, plural

T = TypeVar("T")
SPLIT_FLAGS = {
    "data.prompt_dataset": "data.prompt_split",
    "data.dataset": "data.dataset_split",
    "eval.dataset": "eval.split",
}
"""The setting of a dataset, and the one of its split."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
NAMED_ROWS = 5
"""How many rows a message names by their number."""


class DropReport:
    """Which rows of a dataset were dropped, by reason. A row that comes back every epoch counts once.

    And of which rows, that were not dropped, the chat template leaves something out.
    """

    def __init__(self, total: int):
        self.total = total
        self._rows: dict[str, dict[int, None]] = {}
        self._hidden: dict[str, dict[int, None]] = {}

    def add(self, row: int, error: UnusableRow) -> None:
        rows = self._rows.setdefault(str(error), {})
        rows[row] = None

    def hide(self, row: int, part: str) -> None:
        """part: what of the row is not shown to the model, in words."""
        rows = self._hidden.setdefault(part, {})
        rows[row] = None

    @property
    def dropped(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def left(self, sizes: Sequence[int]) -> list[int]:
        """How many rows remain of each dataset; `sizes` are those of `Rows`."""
        ends = list(accumulate(sizes))
        left = list(sizes)
        for rows in self._rows.values():
            for row in rows:
                dataset = bisect_right(ends, row)
                left[dataset] -= 1
        return left

    def message(self) -> str:
        """`dropped 3 of 1,000 rows: 2 longer than ... (rows 5, 17), 1 ... (row 8). <fix>`, or ''."""
        if not self._rows:
            return ""
        reasons = sorted(self._rows.items(), key=_count, reverse=True)
        parts = ", ".join(f"{len(rows):,} {reason} ({_numbers(rows)})" for reason, rows in reasons)
        return f"dropped {self.dropped:,} of {self.total:,} rows: {parts}. Correct these rows or remove them."

    def hidden_message(self) -> str:
        """`the chat template does not show the reasoning of an assistant message in 4 rows (rows 0, ...)`, or ''."""
        if not self._hidden:
            return ""
        hidden = sorted(self._hidden.items(), key=_count, reverse=True)
        parts = ", ".join(f"{part} in {plural(len(rows), 'row')} ({_numbers(rows)})" for part, rows in hidden)
        return (
            f"the chat template does not show {parts}: the model neither sees nor learns it. Use another "
            "`data.chat_template`, or leave it out of the rows."
        )


def _count(of_reason: tuple[str, dict[int, None]]) -> int:
    _, rows = of_reason
    return len(rows)


def _numbers(rows: dict[int, None]) -> str:
    """`rows 5, 17, ...`"""
    word = "rows" if len(rows) > 1 else "row"
    shown = ", ".join(str(row) for row in islice(rows, NAMED_ROWS))
    if len(rows) > NAMED_ROWS:
        shown += ", ..."
    return f"{word} {shown}"


@dataclass(frozen=True)
class Dataset:
    """One dataset of a comma list."""

    name: str
    parts: list[Part]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)


class Rows:
    """A sequence of rows: `len(rows)`, `rows[i] -> dict`, `.columns`, `.source(i)`. Row numbers start at 0."""

    def __init__(self, datasets: Sequence[Dataset]):
        self.sizes = [len(dataset) for dataset in datasets]
        """Rows of each dataset."""
        self.parts: list[Part] = []
        """All files and tables that have rows."""
        for dataset in datasets:
            self.parts.extend(part for part in dataset.parts if len(part))
        self.columns = _in_order(part.columns for part in self.parts)
        self._names = [dataset.name for dataset in datasets]
        self._dataset_ends = list(accumulate(self.sizes))
        self._part_ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, i: int) -> Row:
        if not 0 <= i < len(self):
            raise IndexError(i)
        index = bisect_right(self._part_ends, i)
        part = self.parts[index]
        first = self._part_ends[index] - len(part)
        return part.decode(part.raw[i - first])

    def source(self, i: int) -> str:
        """The dataset that row `i` comes from, by its name of `short_names`."""
        return self._names[bisect_right(self._dataset_ends, i)]


def _in_order(lists: Iterable[list[str]]) -> list[str]:
    """Every name once, in the order of its first appearance."""
    names: dict[str, None] = {}
    for each in lists:
        names.update(dict.fromkeys(each))
    return list(names)


def load_rows(
    paths: str,
    *,
    flag: str,
    split: str = "train",
    max_samples: int | None = None,
    each: bool = False,
) -> Rows:
    """Concatenate a comma list of datasets; at most the first `max_samples` rows, of `each` or in all.

    A dataset is a file with a suffix of `READERS`, a directory that `datasets` saved, a directory of such
    files, or a hub name; `NAME@DIR` is the directory DIR in it. `split` is for those that have splits.
    `flag` is the setting that holds `paths`, for messages. Raises DataError: a dataset is missing, malformed
    (file and line are named), of a kind that cannot be read, without that split or without rows.
    """
    datasets: list[Dataset] = []
    left = max_samples
    names = comma_list(paths)
    for name, short_name in zip(names, short_names(names), strict=True):
        source = _Source(name=name, flag=flag, split=split, limit=left)
        dataset = Dataset(short_name, _open(source))
        if not len(dataset) and left != 0:
            raise _no_rows(flag, name)
        if left is not None and not each:
            left -= len(dataset)
        datasets.append(dataset)

    if not datasets:
        raise _no_rows(flag, paths)
    return Rows(datasets)


def short_names(names: Sequence[str]) -> list[str]:
    """What each dataset is called as a source: the stem of a file, or the last part of another name.

    Different datasets have different names: those that would share one have their suffixes too, or as many of their
    directories as tell them apart: `math/test` and `code/test`.
    """
    short = [_short_name(name, parts=1, with_suffix=False) for name in names]
    chosen = []
    for name, shared in zip(names, short, strict=True):
        alike = [other for other, its in zip(names, short, strict=True) if its == shared]
        chosen.append(_name_among(name, alike))
    return chosen


def _name_among(name: str, alike: Sequence[str]) -> str:
    """The shortest name of a dataset that differs from those of the others; `alike` has the dataset itself too."""
    different = {os.path.normpath(other) for other in alike}
    longest = max(len(Path(other).parts) for other in different)
    for parts in range(1, longest + 1):
        for with_suffix in (False, True):
            named = {_short_name(other, parts=parts, with_suffix=with_suffix) for other in different}
            if len(named) == len(different):
                return _short_name(os.path.normpath(name), parts=parts, with_suffix=with_suffix)
    return name


def _short_name(name: str, *, parts: int, with_suffix: bool) -> str:
    """The last parts of a path, with or without the suffix of a file."""
    path = Path(name)
    if path.suffix in READERS and not with_suffix:
        path = path.with_suffix("")
    return str(Path(*path.parts[-parts:]))


def _no_rows(flag: str, name: str) -> DataError:
    return DataError(f"`{flag}` (={name}): there are no rows to learn from. Name files that hold at least one row.")


@dataclass(frozen=True)
class _Source:
    """One dataset of a comma list before it is opened, and how messages name it."""

    name: str
    flag: str
    split: str
    limit: int | None

    def error(self, problem: str) -> DataError:
        return DataError(f"`{self.flag}` (={self.name}): {problem}")

    def of_split(self, splits: Mapping[str, T]) -> T:
        if self.split not in splits:
            raise DataError(
                f"`{SPLIT_FLAGS[self.flag]}` (={self.split}): `{self.flag}` (={self.name}) has no such split, so there "
                f"is nothing to load.{did_you_mean(self.split, splits)} Use one of: {', '.join(splits)}."
            )
        return splits[self.split]


def _open(source: _Source) -> list[Part]:
    name = source.name
    path = Path(name).expanduser()
    data_dir = None
    if "@" in name and not path.exists():
        name, data_dir = name.rsplit("@", 1)
        path = Path(name).expanduser() / data_dir

    if path.is_file() and path.suffix in READERS:
        return [READERS[path.suffix](path, source.limit)]
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return [_read_saved(source, path)]
    if path.is_dir():
        return _read_directory(source, path)

    siblings = [sibling.name for sibling in path.parent.glob("*")]
    near = did_you_mean(path.name, siblings)
    if _may_be_on_the_hub(name):
        return [_read_hub(source, name, data_dir, near)]

    problem = "no such file or directory"
    if path.is_file():
        problem = f"a file of unknown kind {path.suffix!r}"
    raise source.error(
        f"{problem}, so there is nothing to load.{near} Give the path of a file that ends in {', '.join(READERS)}, of "
        "a directory of such files, or a hub name (org/name)."
    )


def _may_be_on_the_hub(name: str) -> bool:
    """Any other name is a mistyped path, and needs no network."""
    if HUB_NAME.fullmatch(name) is None:
        return False
    path = Path(name)
    return path.suffix not in READERS and not path.exists()


def _read_directory(source: _Source, path: Path) -> list[Part]:
    """The files of one split; `datasets` knows how people name splits in files and directories."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    base = glob.escape(str(path.absolute()))
    try:
        by_split = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    except EmptyDatasetError:
        by_split = {}

    splits: dict[str, list[Path]] = {}
    for split, names in by_split.items():
        files = [Path(name) for name in names]
        readable = [file for file in files if file.suffix in READERS]
        if readable:
            splits[str(split)] = readable
    if not splits:
        raise source.error(
            f"the directory has no data files, so there is nothing to load. Put files that end in {', '.join(READERS)} "
            "there, or name the directory that has them."
        )

    parts: list[Part] = []
    left = source.limit
    for file in source.of_split(splits):
        part = READERS[file.suffix](file, left)
        if left is not None:
            left -= len(part)
        parts.append(part)
    return parts


def _read_saved(source: _Source, path: Path) -> Part:
    from datasets import load_from_disk

    def load() -> Any:
        return load_from_disk(str(path))

    return _from_library(
        source,
        load,
        problem="the saved dataset cannot be opened",
        fix="Save it again with `save_to_disk`.",
    )


def _read_hub(source: _Source, name: str, data_dir: str | None, near: str) -> Part:
    """near: a suggestion for a mistyped path, or ''."""
    from datasets import load_dataset
    from datasets.config import HF_HUB_OFFLINE
    from huggingface_hub import HfApi

    def load() -> Any:
        if not HF_HUB_OFFLINE:  # `load_dataset` itself would try for half a minute
            HfApi().dataset_info(name, timeout=hub.TIMEOUT_S)
        return load_dataset(name, data_dir=data_dir)

    fix = "Correct the path or the name, download it and give its path, or set HF_HUB_OFFLINE=1 to use the cache."
    return _from_library(
        source,
        load,
        problem="there is no such path here, and as a dataset of the hub it cannot be loaded",
        fix=f"{near} {fix}".strip(),
    )


def _from_library(source: _Source, load: Callable[[], Any], *, problem: str, fix: str) -> Part:
    """The rows of a `Dataset`, which has no splits, or of one split of a `DatasetDict`."""
    try:
        loaded = load()
    except Exception as error:  # of many kinds; raised again
        lines = str(error).splitlines() or [type(error).__name__]
        raise source.error(f"{problem} ({lines[0]}), so there is nothing to load. {fix}") from error

    if isinstance(loaded, dict):
        loaded = source.of_split(loaded)
    return table_part(source.name, loaded.with_format("arrow"), source.limit)


def require_column(rows: Rows, name: str, flag: str, *, everywhere: bool = True) -> None:
    """Raise DataError if a file lacks the column `name` that `flag` names; not `everywhere`: if every file does."""
    lacking = [part for part in rows.parts if name not in part.columns]
    if len(lacking) == len(rows.parts):
        raise DataError(
            f"`{flag}` (={name}): the dataset has no such column, so no row could be used."
            f"{did_you_mean(name, rows.columns)} Use one of: {', '.join(rows.columns)}."
        )
    if lacking and everywhere:
        first = lacking[0]
        raise DataError(
            f"`{flag}` (={name}): {first.name} has no such column, so none of its rows could be used."
            f"{did_you_mean(name, first.columns)} It has {', '.join(first.columns)}. Rename its column, or leave it "
            "out."
        )
