"""How large a model on this disk is."""

from pathlib import Path
from typing import NamedTuple


class ModelSize(NamedTuple):
    """A model on this disk; 0 of one on the hub."""

    stored_bytes: int
    parameters: int


def model_size(model: str) -> ModelSize:
    """From its files, without reading them."""
    description = Path(model, "config.json")
    is_float32 = description.is_file() and '"float32"' in description.read_text()
    parameter_bytes = 4 if is_float32 else 2
    stored = sum(file.stat().st_size for file in description.parent.glob("*.safetensors"))
    return ModelSize(stored, stored // parameter_bytes)
