"""A causal LM is known by names alone, and what that overlooks."""

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from molt.models.description import has_class_of_its_name

OVERLOOKED = {"blip_text_model", "csm_depth_decoder_model"}
"""Parts of larger models that transformers has a class for, and no row in its table: the back end refuses them."""


def test_a_class_of_the_name_means_a_row_in_transformers_table():
    wrong = set()
    found = set()
    for kind, config_class in CONFIG_MAPPING.items():
        if has_class_of_its_name(config_class.__new__(config_class)):
            found.add(kind)
            if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
                wrong.add(kind)
    assert wrong == OVERLOOKED
    # So most models are known without their table.
    assert len(found) > len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) / 2
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gemma2", "gpt2", "gpt_oss"} <= found


def test_a_model_with_parts_is_not_known_by_its_name():
    # There is a Mistral4ForCausalLM, and the table has Mistral4Config under image-text-to-text.
    assert not has_class_of_its_name(AutoConfig.for_model("mistral4"))
