import json

import pytest

from molt.config_sft import SftDataConfig
from molt.data.conversations import build_conversations
from molt.data.rows import load_rows
from tests.tiny import char_tokenizer


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """`build(rows, tokenizer, **config)`: conversations and report."""
    path = tmp_path_factory.mktemp("sft") / "rows.jsonl"

    def build(rows, tokenizer=None, embedding_rows=None, **config):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = load_rows(str(path), flag="data.dataset")
        return build_conversations(rows, SftDataConfig(**config), tokenizer or char_tokenizer(), embedding_rows)

    return build
