"""The environment variables that programs get which a runner starts: an allow-list, for a runner's own hold secrets.

A model writes what such a program runs. `HF_TOKEN`, `WANDB_API_KEY` and the keys of a cloud are nothing for it.
"""

from collections.abc import Mapping

PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TOKENIZERS_PARALLELISM",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
"""To every such program, beside variables that begin with `LC_`. None holds a secret."""
OF_HARNESSES = (
    "SHELL", "TERM", "COLORTERM", "EDITOR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR",
    "NODE_EXTRA_CA_CERTS", "NODE_OPTIONS", "NODE_PATH", "NVM_DIR", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
    "JAVA_HOME", "GOPATH", "GOROOT", "CARGO_HOME", "RUSTUP_HOME", "CONDA_PREFIX", "PYENV_ROOT",
    "OMP_NUM_THREADS", "NO_PROXY", "no_proxy",
)  # fmt: skip
"""To external harnesses too: where tools lie."""
DEVICES = "_VISIBLE_DEVICES"
"""Variables that end so are passed to external harnesses: they keep them from the devices of the run."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY")
"""To external harnesses too, in both spellings, unless the address has a password."""


def for_scorer(environment: Mapping[str, str]) -> dict[str, str]:
    """What a scorer's process gets of the variables of its runner."""
    return {name: value for name, value in environment.items() if _is_for_all(name)}


def for_harness(environment: Mapping[str, str]) -> dict[str, str]:
    """What an external harness gets of the variables of its runner."""
    passed: dict[str, str] = {}
    for name, value in environment.items():
        is_open_proxy = name.upper() in PROXIES and "@" not in value
        if _is_for_all(name) or name in OF_HARNESSES or name.endswith(DEVICES) or is_open_proxy:
            passed[name] = value
    return passed


def _is_for_all(name: str) -> bool:
    return name in PASSED_ON or name.startswith("LC_")
