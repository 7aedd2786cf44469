"""Whether the Hugging Face hub answers. Its loaders retry for half a minute before they raise."""

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
    except HfHubHTTPError:  # it answers, and the loader will report why: no such model, no access
        return False
    except Exception:  # of many kinds: the hub cannot be reached, and the loader names what the cache lacks
        return True
    return False
