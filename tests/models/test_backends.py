"""transformers and AutoModel, one rank and two: the same loss, the same gradient, the same export."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.models.families import MODELS
from tests.tiny import save_tiny
from tests.train.ranks import backends, run_ranks, step_batch

pytestmark = pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="nemo-automodel is not installed")
torch.set_num_threads(1)

BACKENDS = ("transformers", "automodel")
RUNS = [(ranks, backend) for ranks in (1, 2) for backend in BACKENDS]
LAYOUTS = [(2, True, None), (4, False, None)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("backends")
    torch.manual_seed(0)
    for name, make in MODELS.items():
        save_tiny(directory / name, make())
    return directory


@pytest.fixture(scope="module")
def runs(directory):
    """(ranks, model, back end) to what `ranks.backends` returns on the first rank."""
    cases = [(directory / name, backend) for name in MODELS for backend in BACKENDS]
    runs = {}
    for ranks in (1, 2):
        first = run_ranks(backends, ranks, directory / f"run_{ranks}", cases, LAYOUTS, directory, limit_s=240)[0]
        runs |= {(ranks, *case): result for case, result in first.items()}
    return runs


@pytest.mark.processes
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradient_norm_are_the_same_for_all(runs, model):
    for layout in range(len(LAYOUTS)):
        expected = runs[1, model, "transformers"].steps[layout]
        for ranks, backend in RUNS:
            first, second = runs[ranks, model, backend].steps[layout]
            assert first == (pytest.approx(expected[0][0], abs=1e-6), pytest.approx(expected[0][1], rel=1e-5))
            # After an optimizer step: Adam's first one is the sign of the gradient, whatever its rounding.
            assert second == (pytest.approx(expected[1][0], abs=2e-5), pytest.approx(expected[1][1], rel=2e-5))


@pytest.mark.processes
@pytest.mark.parametrize("model", MODELS)
def test_the_classes_are_those_asked_for_and_the_masters_float32(runs, model):
    for ranks, backend in RUNS:
        run = runs[ranks, model, backend]
        assert run.module.split(".")[0] == {"automodel": "nemo_automodel"}.get(backend, backend)
        assert run.dtypes == {torch.float32}


@pytest.mark.processes
def test_transformers_alone_does_not_import_automodel(runs):
    assert not runs[1, next(iter(MODELS)), "transformers"].automodel_imported


@pytest.mark.processes
@pytest.mark.parametrize("model", MODELS)
def test_an_export_computes_what_was_trained_under_the_names_of_the_original(runs, directory, model):
    original = load_file(directory / model / "model.safetensors")
    ids = torch.tensor(step_batch(seed=5)[0][0])
    for ranks, backend in RUNS:
        path = directory / f"{model}_{backend}_{ranks}"
        exported = load_file(path / "model.safetensors")
        assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in original.items()}
        with torch.no_grad():
            lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            logprobs = lm(ids[None].long()).logits[0, :-1].log_softmax(-1)
        trained, entropy = runs[ranks, model, backend].probe
        torch.testing.assert_close(trained[1:], logprobs.gather(1, ids[1:, None].long())[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[1:], -(logprobs.exp() * logprobs).sum(-1), atol=1e-5, rtol=0)
        ours, theirs = (json.loads((p / "config.json").read_text()) for p in (path, directory / model))
        assert ours == theirs | {"dtype": "float32"}
