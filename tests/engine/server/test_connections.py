"""Clients that dawdle, send too much, leave, or speak no HTTP: each is answered or cut off."""

import json
import socket
import time

import httpx
import pytest

from tests.engine.server_testing import EchoBody, SocketServer

TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def server():
    limits = dict(client_timeout_s=TIMEOUT_S, max_body_bytes=10_000)
    with SocketServer(lambda: EchoBody(step_s=0.001, max_model_len=200_000), **limits) as started:
        yield started


def error_of(answer):
    """Status and error of an answer that is one line of JSON."""
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"\n" not in content and b"Traceback" not in answer
    status = int(head.split()[1])
    error = json.loads(content)["error"]
    assert error["code"] == status and error["message"]
    return status


def post(body, *headers, length=None, path="/v1/completions"):
    length = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}", *headers]
    return "\r\n".join(["connection: close" if i == 1 else line for i, line in enumerate(lines)]
                       ).encode() + b"\r\n\r\n" + body  # fmt: skip


def test_what_is_no_http_is_answered_400(server):
    for data in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"{}\r\n\r\n"):
        assert error_of(server.talk(data)) == 400


def test_headers_that_never_end_are_cut_off(server):
    begin = time.monotonic()
    assert error_of(server.talk(b"GET /health HTTP/1.1\r\nx: y\r\n")) == 408
    assert error_of(server.talk(b"")) == 408  # a connection that says nothing
    assert time.monotonic() - begin < 20 * TIMEOUT_S
    long = b"GET /health HTTP/1.1\r\n" + b"x: %s\r\n" % (b"y" * 200_000)
    assert error_of(server.talk(long)) == 431


def test_a_body_that_never_ends_is_cut_off(server):
    assert error_of(server.talk(post(b'{"prompt":', length=100))) == 408


def test_a_body_that_is_too_long_is_answered_413_before_it_is_read(server):
    assert error_of(server.talk(post(b"", length=10**9))) == 413

    def parts():
        for _ in range(40):
            yield b" " * 1000

    response = httpx.post(f"{server.url}/v1/completions", content=parts())
    assert response.status_code == 413 and "10,000" in response.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_request(server):
    asked = {"prompt": "abc", "max_tokens": 100_000}
    for body in (asked, {**asked, "stream": True}):
        count = len(server.body.aborted)
        with server.connect() as sock:
            sock.sendall(post(json.dumps(body).encode()))
            server.wait_for(lambda: server.body.running)
        server.wait_for(lambda before=count: len(server.body.aborted) == before + 1)
        server.wait_for(lambda: not server.state.num_open)


def test_a_client_that_stops_reading_ends_its_request(server):
    asked = {"prompt": "abc" * 30, "max_tokens": 100_000, "stream": True, "logprobs": 5}
    with server.connect(SO_RCVBUF=4096) as sock:
        sock.sendall(post(json.dumps(asked).encode()))
        server.wait_for(lambda: server.body.running)
        server.wait_for(lambda: not server.body.running, timeout_s=30)
        server.wait_for(lambda: not server.state.num_open)
        assert sock.fileno() >= 0  # it was the server that gave up


def test_two_requests_in_one_write_are_answered_in_their_order(server):
    first = b'{"prompt":"abc","max_tokens":3}'
    second = b'{"prompt":"xyz","max_tokens":3}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(head % len(first) + first + head % len(second) + second)
        found = b""
        while found.count(b'"usage"') < 2:
            part = sock.recv(65536)
            assert part, found
            found += part
    assert found.index(b'"abc"') < found.index(b'"xyz"')


def test_more_connections_than_allowed_are_refused():
    with SocketServer(max_connections=2) as server:
        first, second = server.connect(), server.connect()
        with first, second:
            server.wait_for(lambda: len(server._listener.server_state.connections) == 2)
            assert error_of(server.talk(b"")) == 503
        server.wait_for(lambda: not server._listener.server_state.connections)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_port_in_use_is_told_before_anything_is_loaded(server):
    from engine.core.errors import ConfigError
    from engine.server.options import ServerOptions
    from engine.server.run import listening_socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            listening_socket(ServerOptions(port=port))
