"""Whether the Hugging Face hub answers: what loads from it tries for half a minute before it says no."""

from functools import cache
from pathlib import Path

TIMEOUT_S = 5.0


@cache
def only_local(model: str) -> bool:
    """Whether a model can come only from a directory or the cache: `local_files_only` of transformers' loaders."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if Path(model).exists():
        return True
    try:
        HfApi().model_info(model, timeout=TIMEOUT_S)
    except HfHubHTTPError:  # it answers, and the loader will say what: no such model, no access
        return False
    except Exception:  # of many kinds, all of a hub that is not reached; the loader names what the cache lacks
        return True
    return False
