"""Ray clusters: connected to, or started on the spot, and what a run takes of one."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dcil.errors import UserError, missing_extra

try:
    import ray
except ImportError as error:
    raise missing_extra("ray", "ray") from error

OBJECT_STORE = 128 * 2**20  # bytes: nothing of ours is stored there
LOCAL, AUTO = "local", "auto"
PATIENCE = 10.0  # seconds to reach an address


@dataclass(frozen=True)
class Share:
    """What a run takes: CPUs, a fraction of a GPU; and how many runs there are at most, all together."""

    cpus: int = 1
    gpus: float = 0.0
    at_most: int | None = None

    @property
    def described(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"
        return f"{cpus} and {self.gpus:.3g} of a GPU" if self.gpus else cpus

    def fitting(self, resources: dict[str, float]) -> int:
        """Return how many runs fit into the resources."""
        fits = int(resources.get("CPU", 0.0)) // self.cpus
        return min(fits, int(resources.get("GPU", 0.0) / self.gpus + 1e-6)) if self.gpus else fits


@contextmanager
def connected(address: str | None, cpus: int | None = None) -> Iterator[None]:
    """Connect to the cluster at ``address``, else to that of RAY_ADDRESS, else start one here; leave or end it after.

    cpus   of a cluster that is started here; None: all
    """
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    check_address(address)
    # Of a cluster of ours nobody else is told.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **(own if address == LOCAL else {}))
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise unreachable(address, (str(error).splitlines() or [type(error).__name__])[0]) from None
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Refuse addresses where nobody listens, which Ray would try for minutes, and those of Ray's client, which runs
    nothing where the runs are planned and read."""
    if "://" in address:
        raise UserError(
            f"--on must be ray or ray:HOST:PORT, got the address {address}; give the command to a node of the cluster, "
            "with --on ray:auto"
        )
    if address not in (LOCAL, AUTO):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
        except (OSError, ValueError) as error:
            raise unreachable(address, str(error)) from None


def unreachable(address: str, problem: str) -> UserError:
    return UserError(
        f"--on must name a Ray cluster that can be reached from here, {address} cannot: {problem}; --on ray starts one "
        "on this machine"
    )


def device_of_cluster() -> torch.device:
    """Return the device that runs are trained on: a GPU where the cluster has one."""
    return torch.device("cuda" if ray.cluster_resources().get("GPU", 0.0) else "cpu")


def capacity(share: Share) -> int:
    """Return how many runs fit into the cluster as it is now."""
    fits = share.fitting(ray.cluster_resources())
    return fits if share.at_most is None else min(fits, share.at_most)


def is_possible(share: Share) -> bool:
    """Return whether a node that is there now could train a run."""
    return any(share.fitting(node["Resources"]) for node in ray.nodes() if node["Alive"])
