"""Datasets as one sequence of plain dicts, and the account of the rows that cannot be used.

A dataset is a file (`files.py`), a directory that `datasets` saved, a directory of files, or a name on the
hub. Rows stay raw (lines, Arrow) and are decoded when they are asked for.
"""

import glob
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

from molt import hub
from molt.config import comma_list
from molt.data.files import READERS, Part, Row, table_part
from molt.errors import DataError, UnusableRow, did_you_mean

SPLIT_FLAGS = {
    "data.prompt_dataset": "data.prompt_split",
    "data.dataset": "data.dataset_split",
    "eval.dataset": "eval.split",
}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class DropReport:
    """Which rows of a dataset were dropped, by reason. A row that comes back every epoch counts once."""

    def __init__(self, total: int):
        self.total = total
        self._rows: dict[str, dict[int, None]] = {}

    def add(self, row: int, error: UnusableRow) -> None:
        self._rows.setdefault(str(error), {})[row] = None

    @property
    def dropped(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def left(self, sizes: Sequence[int]) -> list[int]:
        """How many rows remain of each dataset; `sizes` are those of `Rows`."""
        ends, left = list(accumulate(sizes)), list(sizes)
        for rows in self._rows.values():
            for row in rows:
                left[bisect_right(ends, row)] -= 1
        return left

    def message(self) -> str:
        """`dropped 3 of 1,000 rows: 2 longer than ... (rows 5, 17), 1 ... (row 8). <fix>`, or ''."""
        if not self._rows:
            return ""
        reasons = sorted(self._rows.items(), key=lambda item: -len(item[1]))
        parts = ", ".join(f"{len(rows):,} {reason} ({_numbers(rows)})" for reason, rows in reasons)
        return f"dropped {self.dropped:,} of {self.total:,} rows: {parts}. Correct these rows or remove them."


def _numbers(rows: dict[int, None]) -> str:
    shown = ", ".join(str(row) for row in islice(rows, 5))
    return f"row{'s' if len(rows) > 1 else ''} {shown}{', ...' if len(rows) > 5 else ''}"


class Rows:
    """A sequence of rows: `len(rows)`, `rows[i] -> dict`, `.columns`, `.source(i)`. Row numbers start at 0."""

    def __init__(self, datasets: Sequence[tuple[str, list[Part]]]):
        """Name and parts of each dataset; `sizes` says how many rows each of them has."""
        self.sizes = [sum(len(part.raw) for part in parts) for _, parts in datasets]
        self.parts = [part for _, parts in datasets for part in parts if part.raw]
        self.columns = list(dict.fromkeys(column for part in self.parts for column in part.columns))
        self._names = [name for name, _ in datasets]
        self._dataset_ends = list(accumulate(self.sizes))
        self._part_ends = list(accumulate(len(part.raw) for part in self.parts))

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, i: int) -> Row:
        if not 0 <= i < len(self):
            raise IndexError(i)
        k = bisect_right(self._part_ends, i)
        part = self.parts[k]
        return part.decode(part.raw[i - self._part_ends[k]])  # counted from the end of the part

    def source(self, i: int) -> str:
        """The dataset that row `i` comes from: the stem of a file, the last part of another name."""
        return self._names[bisect_right(self._dataset_ends, i)]


def load_rows(
    paths: str, *, flag: str, split: str = "train", max_samples: int | None = None, each: bool = False
) -> Rows:
    """Concatenate a comma list of datasets; at most the first `max_samples` rows, of `each` or in all.

    A dataset is a file with a suffix of `READERS`, a directory that `datasets` saved, a directory of such
    files, or a hub name; `NAME@DIR` is the directory DIR in it. `split` is for those that have splits.
    `flag` is the setting that holds `paths`, for messages. Raises DataError: a dataset is missing, malformed
    (file and line are named), of a kind that cannot be read, without that split or without rows.
    """
    datasets: list[tuple[str, list[Part]]] = []
    left = max_samples
    for name in comma_list(paths):
        path, parts = Path(name), _open(_Source(name, flag, split, left))
        count = sum(len(part.raw) for part in parts)
        if not count and left != 0:
            raise _no_rows(flag, name)
        if left is not None and not each:
            left -= count
        datasets.append((path.stem if path.suffix in READERS else path.name, parts))
    if not datasets:
        raise _no_rows(flag, paths)
    return Rows(datasets)


class _Source(NamedTuple):
    """One dataset of a comma list, and what messages say of it."""

    name: str
    flag: str
    split: str
    limit: int | None

    def error(self, problem: str) -> DataError:
        return DataError(f"`{self.flag}` (={self.name}): {problem}")

    def of_split(self, splits: Mapping[str, Any]) -> Any:
        if self.split not in splits:
            raise DataError(
                f"`{SPLIT_FLAGS[self.flag]}` (={self.split}): `{self.flag}` (={self.name}) has no such split, so there "
                f"is nothing to load.{did_you_mean(self.split, splits)} Use one of: {', '.join(splits)}."
            )
        return splits[self.split]


def _open(source: _Source) -> list[Part]:
    name, data_dir, path = source.name, None, Path(source.name).expanduser()
    if "@" in name and not path.exists():
        name, data_dir = name.rsplit("@", 1)
        path = Path(name).expanduser() / data_dir
    if path.is_file() and path.suffix in READERS:
        return [READERS[path.suffix](path, source.limit)]
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return [_read_saved(source, path)]
    if path.is_dir():
        return _read_directory(source, path)
    near = did_you_mean(path.name, [p.name for p in path.parent.glob("*")])
    # What it cannot be on the hub either is a mistyped path, and needs no network.
    if HUB_NAME.fullmatch(name) and Path(name).suffix not in READERS and not Path(name).exists():
        return [_read_hub(source, name, data_dir, near)]
    kind = f"a file of unknown kind {path.suffix!r}" if path.is_file() else "no such file or directory"
    raise source.error(
        f"{kind}, so there is nothing to load.{near} Give the path of a file that ends in {', '.join(READERS)}, of a "
        "directory of such files, or a hub name (org/name)."
    )


def _read_directory(source: _Source, path: Path) -> list[Part]:
    """The files of one split; `datasets` knows how people name splits in files and directories."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    base = glob.escape(str(path.absolute()))
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    except EmptyDatasetError:
        found = {}
    splits = {str(name): [file for file in map(Path, files) if file.suffix in READERS] for name, files in found.items()}
    if not any(splits.values()):
        raise source.error(
            f"the directory has no data files, so there is nothing to load. Put files that end in {', '.join(READERS)} "
            "there, or name the directory that has them."
        )
    parts: list[Part] = []
    for file in source.of_split({name: files for name, files in splits.items() if files}):
        left = None if source.limit is None else source.limit - sum(len(part.raw) for part in parts)
        parts.append(READERS[file.suffix](file, left))
    return parts


def _read_saved(source: _Source, path: Path) -> Part:
    import datasets

    return _from_library(
        source,
        lambda: datasets.load_from_disk(str(path)),
        problem="the saved dataset cannot be opened",
        fix="Save it again with `save_to_disk`.",
    )


def _read_hub(source: _Source, name: str, data_dir: str | None, near: str) -> Part:
    import datasets
    from huggingface_hub import HfApi

    def load() -> Any:
        if not datasets.config.HF_HUB_OFFLINE:  # `load_dataset` itself would try for half a minute
            HfApi().dataset_info(name, timeout=hub.TIMEOUT_S)
        return datasets.load_dataset(name, data_dir=data_dir)

    problem = "there is no such path here, and as a dataset of the hub it cannot be loaded"
    fix = "Correct the path or the name, download it and give its path, or set HF_HUB_OFFLINE=1 to use the cache."
    return _from_library(source, load, problem, f"{near} {fix}".strip())


def _from_library(source: _Source, load: Callable[[], Any], problem: str, fix: str) -> Part:
    """The rows of a `Dataset`, which has no splits, or of one split of a `DatasetDict`."""
    try:
        found = load()
    except Exception as error:  # of many kinds; raised again
        detail = next(iter(str(error).splitlines()), type(error).__name__)
        raise source.error(f"{problem} ({detail}), so there is nothing to load. {fix}") from error
    dataset = source.of_split(found) if isinstance(found, dict) else found
    return table_part(source.name, dataset.with_format("arrow"), source.limit)


def _no_rows(flag: str, name: str) -> DataError:
    return DataError(f"`{flag}` (={name}): there are no rows to learn from. Name files that hold at least one row.")


def require_column(rows: Rows, name: str, flag: str, *, everywhere: bool = True) -> None:
    """Raise DataError if a file lacks the column `name` that `flag` asks for; not `everywhere`: if every file does."""
    lacking = [part for part in rows.parts if name not in part.columns]
    if len(lacking) == len(rows.parts):
        raise DataError(
            f"`{flag}` (={name}): the dataset has no such column, so no row could be used."
            f"{did_you_mean(name, rows.columns)} Use one of: {', '.join(rows.columns)}."
        )
    if lacking and everywhere:
        columns = lacking[0].columns
        raise DataError(
            f"`{flag}` (={name}): {lacking[0].name} has no such column, so none of its rows could be used."
            f"{did_you_mean(name, columns)} It has {', '.join(columns)}. Rename its column, or leave it out."
        )
