"""The metrics endpoint: what Prometheus reads, and what strangers and slow callers get."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from graphflow.errors import AddressInUse, ArgumentError, InsecureAddress, TransportError
from graphflow.runtime.telemetry import metrics_endpoint as endpoint
from graphflow.runtime.telemetry.metrics import METRICS, Meters
from graphflow.runtime.telemetry.metrics_endpoint import (
    CONNECTIONS,
    REQUEST_CAP,
    MetricsServer,
    exposition,
    html_page,
)

pytest.importorskip("prometheus_client")


def fill_meters() -> Meters:
    """Each metric once, with labels that would break out of a line or a page."""
    meters = Meters()
    for name, metric in METRICS.items():
        labels = tuple(f'<b>"{label}"\n\\' for label in metric.labels)
        if metric.kind == "counter":
            meters.add(name, 3, *labels)
        elif metric.kind == "gauge":
            meters.set(name, 2.5, *labels)
        else:
            for seconds in (1e-6, 0.2, 1e9):
                meters.observe(name, seconds)
    return meters


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1:*", fill_meters())
    yield made
    made.close()


def get(
    server: MetricsServer, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    host, _, port = server.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    with contextlib.closing(connection):
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def request_raw(server: MetricsServer, data: bytes) -> bytes:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
        return answer


def test_prometheus_own_parser_reads_every_metric_back(server: MetricsServer) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    status, headers, text = get(server)
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, metric in METRICS.items():
        family = families[name.removesuffix("_total")]
        assert family.type == metric.kind
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
            assert all('"' in v and "\n" in v for k, v in sample.labels.items() if k != "le")
    counts = [s.value for s in families["graphflow_step_seconds"].samples if "bucket" in s.name]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 3


def test_openmetrics_is_written_for_who_asks(server: MetricsServer) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    accept = "application/openmetrics-text; version=1.0.0\x07evil, text/plain"
    status, headers, text = get(server, Accept=accept)
    assert status == 200 and headers["Content-Type"].startswith("application/openmetrics-text")
    assert "evil" not in headers["Content-Type"]
    assert len(list(text_string_to_metric_families(text))) == len(METRICS)


def test_the_page_is_for_eyes_and_everything_in_it_is_escaped(server: MetricsServer) -> None:
    status, headers, text = get(server, "/")
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert "<b>" not in text.replace("<p><b>", "") and "&lt;b&gt;" in text
    assert all(name in text for name in METRICS)


@pytest.mark.parametrize("host", ["localhost:{}", "127.0.0.1:{}", "localhost", "[::1]:{}"])
def test_this_machine_by_its_own_names_is_answered(server: MetricsServer, host: str) -> None:
    port = server.address.rpartition(":")[2]
    assert get(server, Host=host.format(port))[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:9100", "evil.example", "127.0.0.1.evil.example", "10.0.0.1:9100", "", "@"],
)
def test_a_foreign_host_is_refused_as_after_dns_rebinding(server: MetricsServer, host: str) -> None:
    for path in ("/metrics", "/"):
        status, _, text = get(server, path, Host=host)
        assert status == 403 and "graphflow_" not in text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", ""])
def test_a_page_of_another_origin_is_refused(server: MetricsServer, origin: str) -> None:
    assert get(server, Origin=origin)[0] == 403


def test_its_own_page_may_ask(server: MetricsServer) -> None:
    assert get(server, Origin=f"http://{server.address}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "OPTIONS", "DELETE", "BREW"])
def test_only_get_is_answered(server: MetricsServer, method: str) -> None:
    assert get(server, method=method)[0] == 405


@pytest.mark.parametrize("path", ["/metrics/", "/etc/passwd", "/../metrics", "//", "*"])
def test_there_are_two_paths(server: MetricsServer, path: str) -> None:
    assert get(server, path)[0] == 404


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics SPDY/9\r\nHost: localhost\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nnonsense\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: MetricsServer, data: bytes) -> None:
    answer = request_raw(server, data)
    assert answer.startswith(b"HTTP/1.1 400") and b"graphflow_" not in answer


def test_a_request_has_a_cap(server: MetricsServer) -> None:
    answer = request_raw(server, b"GET / HTTP/1.1\r\nX: " + b"a" * (2 * REQUEST_CAP))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")


def test_who_sends_a_byte_at_a_time_is_cut_off_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.5)
    server = MetricsServer("127.0.0.1:*", Meters())
    try:
        host, _, port = server.address.rpartition(":")
        started = time.monotonic()
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"G")
            assert get(server)[0] == 200
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 5
    finally:
        server.close()


def test_many_silent_connections_take_a_few_threads_and_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 1.0)
    server = MetricsServer("127.0.0.1:*", Meters())
    host, _, port = server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        names = [t.name for t in threading.enumerate() if t.name == "metrics-request"]
        assert len(names) <= CONNECTIONS
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(server)[0] == 200:
                break
        time.sleep(0.05)
    assert get(server)[0] == 200
    server.close()


def test_who_says_nothing_makes_room_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 60.0)
    server = MetricsServer("127.0.0.1:*", Meters())
    host, _, port = server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(3 * CONNECTIONS):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        for _ in range(3):
            assert get(server)[0] == 200
    server.close()


def test_who_does_not_read_makes_room_for_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 60.0)
    more_than_buffers_take = "x" * (16 << 20)
    monkeypatch.setattr(endpoint, "html_page", lambda meters: more_than_buffers_take)
    server = MetricsServer("127.0.0.1:*", Meters())
    host, _, port = server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            deaf = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            deaf.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert deaf.recv(1)
        for _ in range(3):
            assert get(server)[0] == 200
    server.close()


@pytest.mark.parametrize("address", ["0.0.0.0:*", "10.1.2.3:9100", "[::]:9100"])
def test_beyond_loopback_it_must_be_said(address: str) -> None:
    with pytest.raises(InsecureAddress, match="insecure://"):
        MetricsServer(address, Meters())


def test_where_it_is_said_numbers_and_this_machines_name_are_answered_and_others_not() -> None:
    server = MetricsServer("insecure://0.0.0.0:*", fill_meters())
    try:
        server.address = server.address.replace("0.0.0.0", "127.0.0.1")
        assert get(server, Host="10.1.2.3:9100")[0] == 200
        assert get(server, Host=f"{socket.gethostname()}:9100")[0] == 200
        assert get(server, Host="evil.example:9100")[0] == 403
    finally:
        server.close()


@pytest.mark.parametrize(
    "address",
    ["", "9100", "127.0.0.1", "127.0.0.1:99999", "evil.example:80", "http://127.0.0.1:1", None],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ArgumentError, match=r"127\.0\.0\.1"):
        MetricsServer(address, Meters())


def test_a_port_in_use_is_named(server: MetricsServer) -> None:
    with pytest.raises(AddressInUse, match=server.address):
        MetricsServer(server.address, Meters())


def test_an_address_of_another_machine_cannot_be_used() -> None:
    with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
        MetricsServer("insecure://192.0.2.1:9100", Meters())


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"graphflow\[metrics\]"):
        MetricsServer("127.0.0.1:*", Meters())


def test_closing_twice_is_fine_and_frees_the_port() -> None:
    server = MetricsServer("127.0.0.1:*", Meters())
    server.close()
    server.close()
    again = MetricsServer(server.address, Meters())
    again.close()


def test_empty_meters_are_an_empty_page() -> None:
    assert exposition(Meters())[0] == b""
    assert "graphflow metrics" in html_page(Meters())
