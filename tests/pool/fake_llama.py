"""llama.cpp's two programs as far as a pool sees them: they listen, connect, and end as those do.

fake_llama.py rpc ARGUMENTS      the RPC server: one connection at a time, as the real one
fake_llama.py server ARGUMENTS   llama-server: aborts when one of its RPC servers goes away
"""

import argparse
import json
import os
import select
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from tinkercloud.pool.drafting import DRAFT_FLAGS
from tinkercloud.pool.llama_server import FLAGS


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def rpc(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    for short, name in (("-H", "host"), ("-p", "port"), ("-d", "device"), ("-t", "threads")):
        parser.add_argument(short, dest=name)
    parser.add_argument("-c", dest="cache", action="store_true")
    options = parser.parse_args(arguments)
    if options.device == "CUDA9":
        say("error: unknown device: CUDA9")
        return 1
    say("Starting RPC server v7.0.0\nDevices:")
    say(f"  {options.device}: fake (2048 MiB, 1024 MiB free)")
    with socket.create_server((options.host, int(options.port)), backlog=1) as listener:
        while True:
            connection, _ = listener.accept()
            say("Accepted client connection")
            with connection:
                while connection.recv(1024):
                    pass


def server(arguments: list[str]) -> int:
    if arguments == ["--rpc", ""]:
        say("no RPC servers specified")
        return 1
    if arguments == ["--version"]:
        say("version: 0.0.0-fake")
        return 0
    if arguments == ["--help"]:
        say(" ".join((*FLAGS, *DRAFT_FLAGS)))
        return 0
    if arguments[-1] == "--list-devices":
        say(arguments[1])
        return 0
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    places = [place.rsplit(":", 1) for place in given.get("--rpc", "").split(",") if place]
    sockets = [socket.create_connection((host, int(port))) for host, port in places]
    say(f"arguments: {json.dumps(arguments)}")
    threading.Thread(target=_abort_with_workers, args=(sockets,), daemon=True).start()
    _Handler.alias = given["--alias"]
    HTTPServer((given["--host"], int(given["--port"])), _Handler).serve_forever()
    return 0


def _abort_with_workers(sockets: list[socket.socket]) -> None:
    if sockets:
        select.select(sockets, [], [])
        say("Remote RPC server crashed or returned malformed response")
        os.abort()


class _Handler(BaseHTTPRequestHandler):
    alias = ""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": self.alias}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["max_tokens"] == 13:
            self.send_error(500)
            return
        rates = {"prompt_per_second": 100.0, "predicted_per_second": 10.0}
        self.answer({"timings": rates | {"predicted_n": body["max_tokens"]}})

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    sys.exit({"rpc": rpc, "server": server}[sys.argv[1]](sys.argv[2:]))
