"""Images and containers of `make container-test`, by podman without a daemon."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent
IMAGE = "localhost/pytgi-under-test"
CUDA_IMAGE = "localhost/pytgi-cuda-under-test"
BASE_IMAGE = "localhost/pytgi-debian:bookworm"
CPU_TORCH_INDEX_URL = "https://download.pytorch.org/whl/cpu"
NEEDED = ("podman", "buildah", "runc", "netavark", "iptables", "mmdebstrap")
READY_TIMEOUT_S = 300.0
"""A first start compiles kernels, and this machine may be busy."""
# Of pip's settings, what says where packages come from.
_PIP_SETTINGS = ("cert", "index-url", "extra-index-url", "find-links", "timeout", "trusted-host")
# Where the certificates are while packages are installed; packages bring some to the usual place.
_CERTIFICATES = "/mnt/certificates.crt"
# The sysctl is what a Docker daemon sets: a server that is not root may listen on port 80.
_CONFIGURATION = """
[containers]
default_sysctls = ["net.ipv4.ip_unprivileged_port_start=0"]
default_ulimits = ["nofile=20000:20000", "nproc=30000:30000"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def missing_tools() -> str:
    """What these tests lack, as a sentence; empty: nothing."""
    if os.geteuid() != 0:
        return (
            "make container-test must run as root: it builds and runs containers without a daemon"
        )
    search = os.environ["PATH"] + ":/usr/lib/podman:/usr/sbin"
    if any(shutil.which(name, path=search) is None for name in NEEDED):
        return (
            "make container-test needs Debian's container tools: apt-get install "
            f"--no-install-recommends {' '.join(NEEDED)}"
        )
    return ""


class Podman:
    """Runs podman with a configuration of its own in `folder`, and owns the containers it starts,
    which `close` removes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._containers: list[Container] = []
        configuration = folder / "containers.conf"
        configuration.write_text(_CONFIGURATION)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}

    def run(
        self,
        *arguments: str | Path,
        timeout_s: float = 120.0,
        stderr: int = subprocess.PIPE,
        **more: str,
    ) -> str:
        """The output of `podman ARGUMENTS`, which must succeed; `more` is added to its
        environment."""
        done = subprocess.run(
            ["podman", *map(str, arguments)],
            env=self._environment | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=timeout_s,
        )
        printed = f"{done.stdout[-4000:]}{(done.stderr or '')[-4000:]}"
        assert done.returncode == 0, f"podman {arguments}: {printed}"
        return done.stdout

    def inspect(self, name: str) -> dict[str, Any]:
        """`podman inspect` of an image or a container."""
        found: dict[str, Any] = json.loads(self.run("inspect", name))[0]
        return found

    def make_base_image(self) -> None:
        """A Debian as small as debian:bookworm-slim, from Debian's packages, without a registry."""
        if self.run("images", "--quiet", BASE_IMAGE):
            return
        archive = self._folder / "base.tar"
        make = ["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", str(archive)]
        subprocess.run(make, check=True, timeout=300)
        self.run("import", "--quiet", archive, BASE_IMAGE)
        archive.unlink()

    def build(self, context: Path, target: str, image: str, **environment: str) -> None:
        """Makes `image` from the Dockerfile in `context`; the packages come from wherever this
        machine's pip takes them. torch is the build for CPUs in all of them: 3 GB less, and the
        packages of all images are one cached layer."""
        command = ["build", "--format", "docker", "--file", str(context / "docker/Dockerfile")]
        command += ["--build-arg", f"BASE_IMAGE={BASE_IMAGE}"]
        settings = pip_settings()
        # In find-links is this machine's torch for CPUs.
        index = "" if "find-links" in settings else CPU_TORCH_INDEX_URL
        command += ["--build-arg", f"TORCH_INDEX_URL={index}"]
        # A mount leaves its mount point in every layer it was used for, and `base` is part of
        # the image.
        self.run(*command, "--target", "base", context, timeout_s=600, **environment)
        for source, place in self._pip_mounts(settings).items():
            command += ["--volume", f"{source}:{place}:ro"]
        command += ["--target", target, "--tag", image]
        self.run(*command, context, timeout_s=900, **environment)

    def _pip_mounts(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Host path to its place in the build: pip's settings, and the files they name."""
        mounts, lines = {}, ["[global]"]
        for name, value in settings.items():
            if name == "cert":
                mounts[value] = value = _CERTIFICATES
            # Indexes on disk link to their neighbours, so it is the folder around them that is
            # needed, and under its own name.
            for path in re.findall(r"(?:^|\s|file://)(/\S+)", value) if name != "cert" else ():
                folder = str(Path(*Path(path).parts[:3]))
                mounts[folder] = folder
            lines.append(f"{name} = {value}")
        configuration = self._folder / "pip.conf"
        configuration.write_text("\n".join(lines) + "\n")
        return {**mounts, str(configuration): "/etc/pip.conf"}

    def start(
        self, *options: str | Path, arguments: Sequence[str] = (), image: str = IMAGE
    ) -> "Container":
        """`podman run OPTIONS IMAGE ARGUMENTS`, in the background."""
        name = self.run("run", "--detach", *options, image, *arguments).split()[-1]
        container = Container(self, name)
        self._containers.append(container)
        return container

    def close(self) -> None:
        """Removes every container, with its volumes."""
        for container in self._containers:
            container.remove()

    def gateway(self) -> str:
        """This machine's address as containers see it."""
        network = json.loads(self.run("network", "inspect", "podman"))[0]
        return str(network["subnets"][0]["gateway"])


class Container:
    """One container. Requests go to its published port, as from outside."""

    def __init__(self, podman: Podman, name: str) -> None:
        self._podman = podman
        self.name = name

    def url(self, port: int = 80) -> str:
        """The host's address of a port of the container."""
        address = self._podman.run("port", self.name, f"{port}/tcp").split()[0]
        return f"http://{address.replace('0.0.0.0', '127.0.0.1')}"

    def client(self, port: int = 80) -> httpx.Client:
        """A client of the container's server."""
        return httpx.Client(base_url=self.url(port), timeout=60, trust_env=False)

    def wait_until_ready(self, port: int = 80) -> None:
        """Returns once GET /health is 200; fails with the log if the container ends instead."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        with self.client(port) as client:
            while time.monotonic() < deadline:
                state = self.state()
                assert state["Running"], f"ended with code {state['ExitCode']}:\n{self.log()}"
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # the server does not listen yet
                time.sleep(0.1)
        raise AssertionError(f"not ready after {READY_TIMEOUT_S} s:\n{self.log()}")

    def state(self) -> dict[str, Any]:
        """`Running`, `ExitCode`, `Pid`, …"""
        state: dict[str, Any] = self._podman.inspect(self.name)["State"]
        return state

    def log(self) -> str:
        """What the container has printed so far, standard error included."""
        return self._podman.run("logs", self.name, stderr=subprocess.STDOUT)

    def execute(self, *command: str) -> str:
        """The output of a command in the container, which must succeed."""
        return self._podman.run("exec", self.name, *command)

    def signal(self, name: str) -> None:
        """Sends process 1 a signal."""
        self._podman.run("kill", "--signal", name, self.name)

    def wait_for_exit(self, timeout_s: float = 120.0) -> int:
        """The exit code of a container that ends by itself."""
        return int(self._podman.run("wait", self.name, timeout_s=timeout_s))

    def stop(self) -> str:
        """`podman stop`, then the log; exit code 0 is asserted."""
        self._podman.run("stop", "--time", "60", self.name)
        code, log = self.state()["ExitCode"], self.log()
        assert code == 0, f"ended with code {code}:\n{log}"
        return log

    def changed_paths(self) -> set[str]:
        """The files that were added or changed in the container's own file system."""
        lines = self._podman.run("diff", self.name).splitlines()
        return {path for kind, path in (line.split(" ", 1) for line in lines) if kind in "AC"}

    def remove(self) -> None:
        """Ends and removes the container. Idempotent."""
        self._podman.run("rm", "--force", "--ignore", "--volumes", "--time", "0", self.name)


def pip_settings() -> dict[str, str]:
    """The settings of this machine's pip that differ from its defaults."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    settings = {}
    for line in listed.splitlines():
        name, value = line.split("=", 1)
        settings[name.rsplit(".", 1)[-1]] = str(ast.literal_eval(value))
    return {name: value for name, value in settings.items() if name in _PIP_SETTINGS}
