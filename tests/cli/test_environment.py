"""What the environment of a run lacks."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from molt.cli import environment
from molt.cli.environment import ENOUGH, LIMITS, check_environment


def _found(variables: dict[str, str], **more) -> list[tuple[str, str]]:
    return [(level, text) for level, text in check_environment(variables, **more)]


@pytest.fixture(autouse=True)
def roomy(monkeypatch):
    """A machine with enough of everything."""
    monkeypatch.setattr(environment, "shared_memory", lambda free, shares_weights: iter(()))
    monkeypatch.setattr(environment, "below", lambda limit, value: iter(()))


def test_a_good_one(tmp_path):
    assert _found({"TMPDIR": "/tmp", "HTTP_PROXY": "http://proxy:3128", "HTTPS_PROXY": "http://u:p@proxy"}) == []
    assert _found({}) == []


@pytest.mark.parametrize("name", ["ALL_PROXY", "all_proxy", "HTTPS_PROXY"])
def test_a_socks_proxy_that_no_client_can_use(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    ((level, text),) = _found({name: "socks5h://user:secret@proxy:1080"})
    assert level == "warning" and name in text and "socks5h proxy" in text and "httpx[socks]" in text
    assert "secret" not in text
    monkeypatch.setattr("importlib.util.find_spec", lambda module: object())
    assert _found({name: "socks5h://proxy:1080"}) == []


def test_temporary_files():
    ((level, text),) = _found({"TMPDIR": "/proc/tmp"})
    assert level == "error" and "TMPDIR (=/proc/tmp): /proc is not writable" in text
    ((level, text),) = _found({"RAY_TMPDIR": "/tmp/" + "x" * 60})
    assert level == "error" and "has 65 bytes" in text and "at most 39" in text and "AF_UNIX" in text


def test_a_long_directory_is_no_obstacle(tmp_path):
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    ((level, text),) = _found({"TMPDIR": str(folder)})
    assert level == "ok" and "/tmp/molt-" in text


@pytest.mark.parametrize(("free", "text"), [(3, "97% full"), (6, None), (0, "100% full")])
def test_a_full_disk(free, text):
    disk = SimpleNamespace(f_blocks=100, f_bavail=free)
    found = [finding.text for finding in environment.full_disk(Path("/tmp"), disk)]
    assert len(found) == (text is not None)
    if text is not None:
        assert text in found[0] and "above 95%" in found[0]
    assert list(environment.full_disk(Path("/proc"), SimpleNamespace(f_blocks=0, f_bavail=0))) == []


def test_shared_memory(monkeypatch):
    monkeypatch.undo()
    (finding,) = environment.shared_memory(free=64 << 20, shares_weights=0)  # docker's default
    assert finding.level == "warning" and "has 64 MiB free" in finding.text and "--shm-size" in finding.text
    (finding,) = environment.shared_memory(free=1 << 30, shares_weights=2 << 30)
    assert finding.level == "error" and "has 1,024 MiB free, and a weight sync takes 2,048" in finding.text
    assert list(environment.shared_memory(free=1 << 30, shares_weights=1 << 20)) == []


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.name for limit in LIMITS])
def test_limits(limit, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("os.getuid", lambda: 1000)
    (finding,) = environment.below(limit, limit.least - 1)
    assert finding.level == "warning" and f"ulimit -H {limit.flag}" in finding.text
    assert list(environment.below(limit, limit.least)) == []
    assert list(environment.below(limit, resource.RLIM_INFINITY)) == []


def test_root_has_no_limit_of_threads(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("os.getuid", lambda: 0)
    (threads,) = (limit for limit in LIMITS if limit.name == "RLIMIT_NPROC")
    assert list(environment.below(threads, 10)) == [] and ENOUGH > 2**40


def test_weights_in_shared_memory(tmp_path):
    """3 parameters in float32 are 12 bytes; the CPU engine maps them in float32, or with bf16 in half of it."""
    import torch

    from molt.cli.check import weights_in_shared_memory
    from molt.config import ActorConfig, FsdpConfig, RLConfig, TrainConfig, VllmConfig

    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(12))
    cpu = torch.device("cpu")
    actor = ActorConfig(model_name_or_path=str(tmp_path))
    assert weights_in_shared_memory(RLConfig(actor=actor), cpu) == 12
    assert weights_in_shared_memory(RLConfig(actor=actor, vllm=VllmConfig(dtype="bf16")), cpu) == 6
    assert weights_in_shared_memory(RLConfig(actor=actor, fsdp=FsdpConfig(param_dtype="bf16")), cpu) == 6
    assert weights_in_shared_memory(RLConfig(actor=actor), torch.device("cuda")) == 0
    replay = RLConfig(actor=actor, train=TrainConfig(rollout_replay_dir=Path("dump")))
    assert weights_in_shared_memory(replay, cpu) == 0
