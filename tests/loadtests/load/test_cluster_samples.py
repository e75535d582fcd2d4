import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadtests.load.cluster_samples import COUNTERS, GAUGES, IMAGE_COUNTERS, ClusterSamples, parse_metrics
from loadtests.reports.run_file import EngineTotals

Serve = Callable[[], "Replica"]


class Replica:
    """Serves /metrics; all its counters are `value`, and those of `more` ten times as high."""

    def __init__(self) -> None:
        self.value = 0
        self.more: tuple[str, ...] = ()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lines = [f"{name} {replica.value}" for name in (*COUNTERS, *GAUGES)]
                lines += [f"{name} {10 * replica.value}" for name in replica.more]
                body = "\n".join(lines).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Serve]:
    replicas: list[Replica] = []

    def start() -> Replica:
        replicas.append(Replica())
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.close()


def write_targets(file: Path, **addresses: str) -> str:
    """As `kvasir up` does, which names its router there too."""
    groups = [{"targets": ["127.0.0.1:1"], "labels": {"job": "kvasir-router", "router": "r"}}]
    for name, address in addresses.items():
        groups.append({"targets": [address], "labels": {"job": "kvasir-replica", "replica": name}})
    file.write_text(json.dumps(groups))
    return str(file)


def test_metrics_are_read_summed_over_labels_and_by_each() -> None:
    values = parse_metrics('a_total{tier="host"} 3\na_total{tier="disk"} 4\nb 5\nc nothing\n')
    assert values == {"a_total": 7.0, 'a_total{tier="host"}': 3.0, 'a_total{tier="disk"}': 4.0, "b": 5.0}


def test_images_are_counted_where_replicas_count_them(serve: Serve) -> None:
    reader, of_text = serve(), serve()
    reader.more = (*IMAGE_COUNTERS, 'replica_images_total{outcome="full"}')
    samples = ClusterSamples([f"a={reader.address}", f"b={of_text.address}"])
    samples.start(0.0)
    reader.value = 3
    samples.stop()
    assert samples.totals == EngineTotals(3, 3, 3, 0, 0, 30, 30, 30)


@pytest.mark.parametrize("is_file", [True, False])
def test_totals_are_what_the_counters_grew_by(is_file: bool, serve: Serve, tmp_path: Path) -> None:
    first, second = serve(), serve()
    first.value = 100
    named = [write_targets(tmp_path / "targets.json", a=first.address, b=second.address)]
    samples = ClusterSamples(named if is_file else [f"a={first.address}", f"b=http://{second.address}"])
    samples.start(0.0)
    first.value, second.value = 130, 4
    samples.stop()
    assert samples.totals == EngineTotals(34, 34, 34)
    assert [sample.replica for sample in samples.samples] == ["a", "b", "a", "b"]


def test_a_replica_that_was_started_again_elsewhere_is_followed_and_leaves_no_total(
    serve: Serve, tmp_path: Path
) -> None:
    before, after = serve(), serve()
    file = tmp_path / "targets.json"
    samples = ClusterSamples([write_targets(file, a=before.address)])
    samples.start(0.0)
    before.value = 50
    samples.stop()
    samples.start(0.0)
    after.value = 7
    write_targets(file, a=after.address)
    samples.stop()
    assert samples.samples[-1].num_running == 7
    assert samples.totals is None, "it has counted more than before the run, and less than in between"


def test_a_replica_that_is_gone_in_the_end_leaves_no_total(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    samples = ClusterSamples([write_targets(file, a=serve().address, b=serve().address)])
    samples.start(0.0)
    write_targets(file, a=serve().address)
    samples.stop()
    assert samples.totals is None


def test_without_a_file_there_are_no_replicas_and_no_total(tmp_path: Path) -> None:
    samples = ClusterSamples([str(tmp_path / "targets.json")])
    samples.start(0.0)
    samples.stop()
    assert (samples.samples, samples.totals) == ([], None)
