"""A recording proxy in front of a real SGLang server.

As a script: `recorder.py RECORD COMMAND... --host H --port P` starts COMMAND on another port,
serves H:P itself, hands every request on and writes a line per request to RECORD. As a module:
`calls`.
"""

import ctypes
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TIMEOUT_S = 600.0
_PR_SET_PDEATHSIG = 1


def recorded(record: Path, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command that runs `command` behind a recorder."""
    return (sys.executable, str(Path(__file__).resolve()), str(record), *command)


def calls(record: Path, *paths: str) -> list[dict[str, Any]]:
    """What was asked so far, in order of arrival: {"path", "body", "status"}; only `paths`, if any
    are given, and never health checks."""
    lines = record.read_text().splitlines() if record.exists() else []
    asked = [json.loads(line) for line in lines]
    return [
        call for call in asked if (call["path"] in paths if paths else call["path"] != "/health")
    ]


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    backend: tuple[str, int]
    record: Path
    lock = threading.Lock()

    def do_GET(self) -> None:
        self._pass_on()

    do_POST = do_GET

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        back = http.client.HTTPConnection(*self.backend, timeout=TIMEOUT_S)
        headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
        if "Authorization" in self.headers:
            headers["Authorization"] = self.headers["Authorization"]
        try:
            back.request(self.command, self.path, body or None, headers)
            answer = back.getresponse()
            if answer.headers.get_content_type() == "text/event-stream":
                self._note(body, answer.status)
                self._stream(answer)
                return
            status, content = answer.status, answer.read()
        except OSError as error:
            status, content = 502, str(error).encode()
        finally:
            back.close()
        self._note(body, status)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, answer: http.client.HTTPResponse) -> None:
        """Each event when it comes; the connection's end is the answer's."""
        self.close_connection = True
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while content := answer.read1(65536):
                self.wfile.write(content)
        except OSError:  # whoever asked has gone, or the server has
            return

    def _note(self, body: bytes, status: int) -> None:
        try:
            asked = json.loads(body) if body else None
        except ValueError:
            asked = None
        line = json.dumps({"path": self.path, "body": asked, "status": status})
        with self.lock, self.record.open("a") as file:
            file.write(line + "\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Silence: the record is the log."""


def _die_with_parent() -> None:
    """Of the single thread that starts the server below."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    record, *command = sys.argv[1:]
    place = command.index("--port") + 1
    port, host = int(command[place]), command[command.index("--host") + 1]
    inner = port + 1  # below the kernel's own range, as the outer one
    with socket.socket() as probe:
        probe.bind((host, inner))
    command[place] = str(inner)
    server = subprocess.Popen(command, preexec_fn=_die_with_parent)
    _Proxy.backend, _Proxy.record = (host, inner), Path(record)
    proxy = ThreadingHTTPServer((host, port), _Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    while server.poll() is None:
        time.sleep(0.2)
    return server.returncode


if __name__ == "__main__":
    sys.exit(main())
