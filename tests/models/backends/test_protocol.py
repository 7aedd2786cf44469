"""The same checks of the `Backend` Protocol over every back end, for a tiny model of each family."""

import inspect
from importlib.util import find_spec
from typing import get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from molt.batch.collate import collate, gather
from molt.models.backends.choice import BACKENDS, load_backend
from molt.models.backends.protocol import Backend
from molt.models.load_balance import recorded_routes
from tests.models.backends import toy
from tests.models.families import MODELS
from tests.tiny import save_tiny
from tests.train.ranks import step_batch

NAMES = [name for name in BACKENDS if name != "automodel" or find_spec("nemo_automodel")]
CASES = [(model, backend) for model in MODELS for backend in NAMES]
EXPERT_LAYERS = {"qwen3_moe": 2, "deepseek_v3": 1, "glm4_moe": 1}
EXPERTS = 4
EXPERTS_PER_TOKEN = 2
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:Qwen2ForCausalLM is deprecated")  # of AutoModel
torch.set_num_threads(1)
over_all = pytest.mark.parametrize(("model", "backend"), CASES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("protocol")
    torch.manual_seed(0)
    for name, make in MODELS.items():
        save_tiny(directory / name, make())
    return directory


def build(directory, model: str, backend: str, dtype=torch.float32):
    """Not loaded yet."""
    config = AutoConfig.from_pretrained(directory / model)
    return load_backend(backend).build(str(directory / model), config, "varlen", CPU, dtype)


@pytest.fixture(scope="module")
def loaded(directory):
    """(model, back end) to the model with its weights. Nothing may change it."""
    built = {}
    for model, backend in CASES:
        causal_lm = build(directory, model, backend)
        load_backend(backend).load_weights(causal_lm, str(directory / model), CPU)
        built[model, backend] = causal_lm.eval()
    return built


def sequences():
    token_ids, _ = step_batch(seed=3)
    return [torch.tensor(ids).long() for ids in token_ids]


@pytest.mark.parametrize("backend", [*NAMES, "toy"])
def test_it_has_the_functions_of_the_protocol(backend):
    module = toy if backend == "toy" else load_backend(backend)
    functions = inspect.getmembers(Backend, inspect.isfunction)
    declared = {name: function for name, function in functions if not name.startswith("_")}
    assert {"build", "layers", "to_disk"} <= declared.keys()
    for name, function in declared.items():
        implemented = getattr(module, name)
        _, *parameters = inspect.signature(function).parameters
        assert list(inspect.signature(implemented).parameters) == parameters, name
        assert get_type_hints(implemented) == get_type_hints(function), name


@over_all
def test_the_weights_are_there_in_the_dtype_that_was_asked_for(loaded, directory, model, backend):
    causal_lm = loaded[model, backend]
    assert {param.dtype for param in causal_lm.parameters()} == {torch.float32}
    assert {tensor.device for tensor in causal_lm.state_dict().values()} == {CPU}
    bf16 = build(directory, model, backend, torch.bfloat16)
    assert {param.dtype for param in bf16.parameters()} == {torch.bfloat16}


@over_all
def test_it_has_a_configuration_a_decoder_layers_and_a_head(loaded, model, backend):
    causal_lm = loaded[model, backend]
    backend = load_backend(backend)
    assert causal_lm.config.use_cache is False and causal_lm.generation_config.eos_token_id == 2

    decoder = backend.decoder(causal_lm)
    layers = backend.layers(causal_lm)
    assert len(layers) == 2
    assert all(layer in list(decoder.modules()) for layer in layers)
    for layer in layers:
        assert not any(other in list(layer.modules()) for other in layers if other is not layer)
    # What no layer holds: embeddings, final norm and head (the embeddings, if tied).
    in_layers = {param for layer in layers for param in layer.parameters()}
    assert len(set(causal_lm.parameters()) - in_layers) == (2 if model == "tied" else 3)

    head = backend.head(causal_lm)
    assert head.weight.shape == (99, 64)
    assert (head.weight in set(decoder.parameters())) == (model == "tied")


@over_all
def test_hidden_states_are_those_of_each_sequence_alone(loaded, directory, model, backend):
    reference = AutoModel.from_pretrained(directory / model, dtype=torch.float32)
    decoder = load_backend(backend).decoder(loaded[model, backend])
    with torch.no_grad():
        for packed in (True, False):
            batch = collate(sequences(), packed=packed)
            states = gather(batch, load_backend(backend).hidden_states(decoder, batch))
            for ids, of_sequence in zip(sequences(), states, strict=True):
                expected = reference(ids[None]).last_hidden_state[0]
                torch.testing.assert_close(of_sequence, expected, atol=1e-5, rtol=0)


@over_all
def test_routers_tell_their_logits_and_choices(loaded, model, backend):
    def routes(name):
        causal_lm = loaded[model, name]
        routers = load_backend(name).routers(causal_lm)
        batch = collate(sequences(), packed=True)
        with torch.no_grad(), recorded_routes(routers) as routes:
            load_backend(name).hidden_states(load_backend(name).decoder(causal_lm), batch)
        return routes

    found = routes(backend)
    assert len(found) == EXPERT_LAYERS.get(model, 0)
    for route, expected in zip(found, routes("transformers"), strict=True):
        cells = sum(len(ids) for ids in sequences())
        assert route.logits.shape == (cells, EXPERTS) and route.chosen.shape == (cells, EXPERTS_PER_TOKEN)
        torch.testing.assert_close(route.logits.float(), expected.logits.float(), atol=1e-5, rtol=0)
        assert torch.equal(route.chosen.sort(1).values, expected.chosen.sort(1).values)


@over_all
def test_the_tensors_of_the_state_are_written_as_they_were_read(loaded, directory, model, backend):
    causal_lm = loaded[model, backend]
    aliases = load_backend(backend).aliases(causal_lm)
    assert aliases == ({"lm_head.weight"} if model == "tied" else set())

    convert = load_backend(backend).to_disk(causal_lm)
    written = {}
    for name, tensor in causal_lm.state_dict().items():
        if name not in aliases:
            written |= dict(convert(name, tensor))
    files = load_file(directory / model / "model.safetensors")
    assert written.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(written[name], tensor.float()), name


@over_all
def test_recomputed_layers_run_twice_and_have_the_same_gradient(directory, model, backend):
    name, backend = backend, load_backend(backend)
    batch = collate(sequences(), packed=True)
    calls, gradients = [], []
    for recompute in (False, True):
        causal_lm = build(directory, model, name).train()
        if recompute:
            backend.recompute_layers(causal_lm)
        backend.load_weights(causal_lm, str(directory / model), CPU)
        seen = []
        for layer in backend.layers(causal_lm):
            next(layer.children()).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        backend.hidden_states(backend.decoder(causal_lm), batch).square().sum().backward()
        calls.append(len(seen))
        gradients.append({n: p.grad for n, p in causal_lm.named_parameters() if p.grad is not None})
    assert calls == [2, 4]
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)


@over_all
def test_a_dropped_head_leaves_the_decoder_as_it_is(loaded, directory, model, backend):
    name, backend = backend, load_backend(backend)
    causal_lm = build(directory, model, name).eval()
    backend.drop_head(causal_lm)
    backend.load_weights(causal_lm, str(directory / model), CPU)
    batch = collate(sequences(), packed=True)
    with torch.no_grad():
        states = backend.hidden_states(backend.decoder(causal_lm), batch)
        whole = backend.hidden_states(backend.decoder(loaded[model, name]), batch)
    assert torch.equal(states, whole)
