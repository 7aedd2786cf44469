"""Generation configs that transformers loads and would not save, and the end tokens of an export."""

import pytest
from transformers import GenerationConfig

from molt.models.generation import (
    changes,
    exported_generation_config,
    savable,
    save_problem,
)

SHIPPED = {
    "greedy with a temperature": {"do_sample": False, "temperature": 0.6},
    "no word on sampling": {"top_p": 0.8, "top_k": 20},
    "beams without beams": {"early_stopping": True, "do_sample": True, "temperature": 0.6},
    "a negative pad": {"pad_token_id": -1, "eos_token_id": 2},
    "outputs": {"output_attentions": True},
    "a cache that is off": {"use_cache": False, "cache_implementation": "static"},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_can_be_saved_after_its_repair(name, tmp_path):
    config = GenerationConfig(**SHIPPED[name])
    with pytest.raises(ValueError, match="invalid"):
        config.save_pretrained(tmp_path)
    assert save_problem(config)
    repaired = exported_generation_config(config, [5])
    repaired.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    # What samples still samples alike; what ended an answer still does.
    for key in ("temperature", "top_p", "top_k"):
        assert getattr(loaded, key) == getattr(config, key)
    ends = loaded.eos_token_id if isinstance(loaded.eos_token_id, list) else [loaded.eos_token_id]
    assert set(ends) == {5, *([2] if "eos_token_id" in SHIPPED[name] else [])}


def test_the_repair_is_named():
    config = GenerationConfig(do_sample=False, temperature=0.6)
    assert changes(config, savable(config)) == "do_sample True"
    assert "temperature" in save_problem(config)


def test_a_valid_config_is_left_alone():
    config = GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=2, max_new_tokens=7)
    assert save_problem(config) is None
    assert exported_generation_config(config, [2]).to_dict() == config.to_dict()
    assert exported_generation_config(config, []).eos_token_id == 2
    assert exported_generation_config(config, [9, 1]).eos_token_id == [1, 2, 9]
    assert config.eos_token_id == 2, "the config of the model was changed"
