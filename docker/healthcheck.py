#!/opt/pytgi/bin/python
"""HEALTHCHECK of the image: exit code 0 if the server, process 1, answers GET /readyz with 200."""

import os
import sys
from http.client import HTTPException
from pathlib import Path

from text_generation_launcher.options import read_options, split_mode
from text_generation_launcher.router_link import connection_to, reachable_host
from text_generation_process.option import Mode

TIMEOUT_S = 4.0


def address() -> tuple[str, int, bool] | None:
    """Host and port of process 1 and whether it uses TLS, from its flags and the container's
    environment. None: it is not a server, but answers a batch or runs shards alone."""
    words = Path("/proc/1/cmdline").read_bytes().decode().split("\0")[:-1]
    script = next(i for i, word in enumerate(words) if word.endswith("text-generation-launcher"))
    mode, flags = split_mode(words[script + 1 :])
    if mode is not Mode.SERVE:
        return None
    values = read_options(flags, dict(os.environ), mode)
    port = values.get("aip-http-port", values["port"])
    return reachable_host(values["hostname"]), int(port), "ssl-certfile" in values


def main() -> int:
    """Returns the exit code, and prints the reason."""
    server = address()
    if server is None:
        print("process 1 is not a server")
        return 0
    host, port, has_tls = server
    connection = connection_to(host, port, has_tls, TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        print(f"no answer on {host} port {port}: {error}")
        return 1
    print(f"GET /readyz on {host} port {port}: {status}")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
