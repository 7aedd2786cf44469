"""Which names are asked of the hub again: those it answers for, with a yes or a no."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from molt.hub import only_local


@pytest.fixture
def hub(monkeypatch):
    """A server that answers what it is told to; nothing listens before it starts."""

    class Answer(BaseHTTPRequestHandler):
        status = 404

        def do_GET(self):
            self.send_response(self.status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    only_local.cache_clear()
    yield server
    server.shutdown()
    server.server_close()
    only_local.cache_clear()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_hub_that_says_no_is_asked_by_the_loader_which_says_why(hub, status):
    hub.RequestHandlerClass.status = status
    assert not only_local("org/name")


def test_a_hub_that_is_not_reached_is_not_waited_for(hub):
    hub.shutdown()
    hub.server_close()
    assert only_local("org/name")


def test_a_directory_asks_nobody(hub, tmp_path):
    hub.RequestHandlerClass.do_GET = None  # an answer would fail
    assert only_local(str(tmp_path))
