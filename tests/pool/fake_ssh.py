"""ssh as the pool uses it: -L LOCAL:HOST:PORT relays, then the command, here instead of there."""

import contextlib
import socket
import subprocess
import sys
import threading


def main(words: list[str]) -> int:
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-T":
            continue
        value = rest.pop(0)
        if option == "-L":
            _, local, host, port = value.split(":")
            listener = socket.create_server(("127.0.0.1", int(local)))
            threading.Thread(target=relay, args=(listener, host, int(port)), daemon=True).start()
    host, command = rest
    assert host == "ada@laptop"
    return subprocess.run(["sh", "-c", f"exec {command}"]).returncode


def relay(listener: socket.socket, host: str, port: int) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((host, port))
        except OSError:
            near.close()
            continue
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=copy, args=(source, sink), daemon=True).start()


def copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
