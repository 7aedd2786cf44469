#!/usr/bin/env bash
# Everything a fresh machine needs, in .venv/. Safe to call again: a second call takes well under a second.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.molt-setup
wanted=$(cat pyproject.toml constraints/cpu.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# phase NAME COMMAND...: one line with its seconds; the command's output only if it fails.
phase() {
    local name=$1 start=$SECONDS
    shift
    if "$@" >"$log" 2>&1; then
        echo "setup: $name ($((SECONDS - start)) s)"
        return 0
    fi
    echo "setup: $name FAILED after $((SECONDS - start)) s: $*" >&2
    cat "$log" >&2
    return 1
}

find_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "setup: python3 (=$(python3 --version 2>&1 || true)) is older than 3.11: molt does not import there." \
        "Install Python 3.11 and run make setup again." >&2
    return 1
}

# Why the packages failed, if it is what usually fails: pip sees other torch versions, but not this one.
explain_torch() {
    local answer
    answer=$("${pip[@]}" install -q --dry-run --no-deps "$torch" 2>&1 || true)
    if grep -q 'from versions: [0-9]' <<<"$answer"; then
        echo "setup: this machine's pip does not find $torch: the CPU build of vLLM runs with no other torch." \
            "Set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index and run make setup again." >&2
    fi
    return 1
}

torch=$(grep '^torch==' constraints/cpu.txt)
python=$(find_python)
[ -x .venv/bin/python ] || phase "environment in .venv" "$python" -m venv .venv
rm -f "$stamp"
pip=(.venv/bin/python -m pip --disable-pip-version-check)
phase "pip" "${pip[@]}" install -q --upgrade pip
phase "packages (minutes on a fresh machine)" "${pip[@]}" install -q -c constraints/cpu.txt -e '.[cpu,dev,examples]' || explain_torch
# Its dependencies are CUDA builds that do not go with these; the classes that molt uses need none of them.
phase "AutoModel" "${pip[@]}" install -q -c constraints/cpu.txt --no-deps nemo-automodel
# They arrive as CUDA builds and break `import transformers` beside the CPU build of torch.
phase "without torchvision, torchaudio, torchcodec" "${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec
phase "imports" .venv/bin/python -c 'import torch, transformers, ray, vllm, molt'
echo "$wanted" >"$stamp"
