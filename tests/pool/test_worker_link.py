"""The coordinator's side of a worker that somebody started."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from tinkercloud.pool.pool_file import Worker
from tinkercloud.pool.worker_link import WorkerLink


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        common = {"is_alive": True, "started": 1, "protocol": "7.0.0"}
        devices = [
            common | {"device": "CPU", "port": 50051, "free_bytes": 100},
            common | {"device": "CUDA0", "port": 50052, "free_bytes": 200},
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"devices": devices}).encode())

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_tunnel_may_have_other_ports_than_the_worker(tmp_path: Path) -> None:
    """RPC servers are reached where the pool's file says that the worker is, in its order."""
    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = server.server_port
    worker = Worker.model_validate(
        {"name": "a", "start": "by_hand", "port": port, "gpus": [{"device": "CUDA0"}]}
    )
    link = WorkerLink(worker, tmp_path)
    try:
        link.start()
        assert link.is_up()
        (device,) = link.devices()
    finally:
        link.end()
        server.shutdown()
        thread.join()
        server.server_close()
    assert (device.label, device.memory_bytes) == ("a/CUDA0", 200)
    assert device.endpoint == f"127.0.0.1:{port + 2}"
