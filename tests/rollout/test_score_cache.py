"""Scores on disk: found again, by the scorer that gave them, whoever writes at the same time."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from molt.rollout.score_cache import ScoreCache

SCORE = {"reward": 0.5, "score": 1.0, "info": {"n": 3.0}}


def get(cache, trajectory):
    return asyncio.run(cache.get(trajectory))


def test_a_score_is_found_again_by_an_equal_trajectory_and_scorer(tmp_path):
    cache = ScoreCache(tmp_path / "scores", "digest")
    assert get(cache, "t") is None
    asyncio.run(cache.put("t", SCORE))
    assert get(cache, "t") == get(ScoreCache(tmp_path / "scores", "digest"), "t") == SCORE
    assert get(cache, "u") is None and get(ScoreCache(tmp_path / "scores", "another"), "t") is None


def test_a_file_is_plain_json_and_nothing_else_is_left(tmp_path):
    asyncio.run(ScoreCache(tmp_path, "digest").put("t", SCORE))
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path.suffix == ".json" and path.parent.name == path.name[:2] and json.loads(path.read_text()) == SCORE


@pytest.mark.parametrize("torn", ["", '{"reward": 0.', "[1]", '{"score": 1}', "\x80"])
def test_a_torn_file_is_scored_again(tmp_path, torn):
    cache = ScoreCache(tmp_path, "digest")
    asyncio.run(cache.put("t", SCORE))
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(torn.encode("latin-1"))
    assert get(cache, "t") is None
    asyncio.run(cache.put("t", SCORE))
    assert get(cache, "t") == SCORE


def test_many_writers_and_readers_never_see_half_a_score(tmp_path):
    long = {"reward": 1.0, "score": 1.0, "info": {f"number {i}": float(i) for i in range(2000)}}

    def write(number):
        cache = ScoreCache(tmp_path, "digest")
        cache._write("t", long)
        return cache._read("t")

    with ThreadPoolExecutor(8) as threads:
        assert all(found == long for found in threads.map(write, range(64)))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_disk_that_does_not_take_it_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    asyncio.run(ScoreCache(tmp_path / "file" / "below", "digest").put("t", SCORE))
