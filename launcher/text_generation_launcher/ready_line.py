"""The log line with an example request for a server that is ready."""

import shlex

from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.probe import reachable_host


def how_to_ask(config: LauncherConfig) -> tuple[str, str]:
    """The server's URL, and an example command."""
    host = reachable_host(config.hostname)
    scheme = "https" if config.has_tls else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"
    # The certificate has the public name of this machine.
    insecure = ["--insecure"] if config.has_tls else []
    command = ["curl", *insecure, f"{url}/generate", "-H", "Content-Type: application/json"]
    if config.has_api_key:
        command += ["-H", "Authorization: Bearer YOUR_API_KEY"]
    return url, shlex.join([*command, "-d", config.example_request])
