"""What several test modules share: one Ray session, one tiny model on disk."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis
import pytest

from molt.rare_gc import collect_rarely

collect_rarely()
hypothesis.settings.register_profile("molt", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("molt")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items):
    """Files that start clusters come first: with two processes, a long one that is left to the end would run alone."""
    long_files = {item.path for item in items if item.get_closest_marker("ray")}
    items.sort(key=lambda item: item.path not in long_files)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny random Qwen3 with its character tokenizer."""
    from tests.tiny import save_tiny

    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def endless_model_dir(model_dir, tmp_path_factory):
    """The tiny model without an end token: it generates as long as it is asked to, however slow the machine is."""
    endless = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(model_dir, endless)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((endless / name).read_text())
        settings["eos_token_id"] = None
        (endless / name).write_text(json.dumps(settings))
    return str(endless)


@pytest.fixture(scope="session")
def ray_session(model_dir):
    """One local Ray for all tests that need it, with the environment that `cluster` gives its workers.

    The value is what a subprocess needs in its environment for a Ray session of its own to use the same warm workers.
    """
    import ray

    from molt.cluster import CPU_ENV, THIRD_PARTY_ENV, start_ray
    from molt.config import ActorConfig, RLConfig
    from tests.warm_workers import serving

    # A socket's path may have 107 characters: pytest's directories are too deep.
    with tempfile.TemporaryDirectory(prefix="molt-") as directory:
        with serving(Path(directory) / "workers", CPU_ENV | THIRD_PARTY_ENV) as environment:
            with mock.patch.dict(os.environ, environment):
                start_ray(RLConfig(actor=ActorConfig(model_name_or_path=model_dir)))
            yield environment
            ray.shutdown()
