"""The command: python -m maxds.launch CONFIG.yaml --cluster=CLUSTER.yaml [key=value ...] [--xpk]

Prints the run as Kubernetes objects, a ConfigMap and a JobSet, to be given to `kubectl apply -f -` on any GKE cluster
that has JobSet, with or without Kueue. With `--xpk`, a script that gives the run to `xpk workload create` instead.
Nothing is contacted. Config, cluster, model, batch and mesh are checked against each other as a pod would check them.

exit code 0   printed                               2   a mistake in the config or the cluster, or they do not fit
          1   a defect of maxds or the machine
"""

import base64
import importlib.util
import pathlib
import shlex
import sys

from absl import flags

from maxds import command, jobset, loader, optimizer
from maxds import mesh as mesh_lib
from maxds import step as step_lib
from maxds.aot import topology
from maxds.cluster import Cluster
from maxds.config import Config
from maxds.model import deepseek

_CLUSTER = flags.DEFINE_string("cluster", None, "The file that says where to run (scripts/launch has some).")
_XPK = flags.DEFINE_bool("xpk", False, "Print a script that calls xpk, instead of Kubernetes objects.")

USAGE = "usage: python -m maxds.launch CONFIG.yaml --cluster=CLUSTER.yaml [key=value ...] [--xpk]"


class LaunchError(ValueError):
    """The run cannot be launched on this cluster."""


def main(args: list[str]) -> int:
    """Runs the command; returns its exit code."""
    if len(args) < 2 or _CLUSTER.value is None:
        print(USAGE, file=sys.stderr)
        return 2
    topology.prepare()
    try:
        cluster, _ = loader.load(Cluster, _CLUSTER.value)
        config, tree = loader.load(Config, args[1], args[2:])
        check(config, cluster)
        check_local(config, cluster, _XPK.value)
    except (loader.ConfigError, mesh_lib.MeshError, optimizer.PatternError, LaunchError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in unmounted(config, cluster):
        print(f"note: the image must have {path}, for no mount of {_CLUSTER.value} has it", file=sys.stderr)
    text = loader.render(config, tree)
    needs = jobset.Needs(config.prometheus_port, config.checkpoint.local_dir)
    print(xpk(cluster, text) if _XPK.value else jobset.render(cluster, text, needs), end="")
    return 0


def check(config: Config, cluster: Cluster) -> None:
    """Refuses what every pod would refuse, or lose. How axes lie on the torus can only be seen where libtpu is.

    Raises:
      LaunchError: the run would not outlive its pods, or asks for devices that they do not have.
      MeshError: mesh, model and batch do not fit the slices.
    """
    if config.mesh.cpu_devices is not None:
        raise LaunchError(f"mesh.cpu_devices={config.mesh.cpu_devices} trains on CPUs: set mesh.cpu_devices=null")
    if not config.in_bucket:
        raise LaunchError(
            f"run_dir={config.run_dir} would be lost with its pod, checkpoints included: set run_dir=gs://bucket/folder"
        )
    devices = cluster.slice.devices * cluster.slices
    try:
        sizes = mesh_lib.sizes(config.mesh, devices, cluster.slices)
        step_lib.check(deepseek.Network(config), sizes)
        if importlib.util.find_spec("libtpu"):
            mesh_lib.make(config.mesh, topology.devices(cluster.topology, cluster.slices))
    except mesh_lib.MeshError as error:
        slices = f" x {cluster.slices} slices" if cluster.slices > 1 else ""
        raise mesh_lib.MeshError(f"{cluster.topology}{slices}: {error}") from None


def check_local(config: Config, cluster: Cluster, by_xpk: bool) -> None:
    """Raises LaunchError where no restart would find its local checkpoints again."""
    folder = config.checkpoint.local_dir
    if folder is not None and (by_xpk or cluster.restart_agent is None):
        remedy = "" if by_xpk else "set restart_agent, which restarts them in place, or "
        raise LaunchError(
            f"checkpoint.local_dir={folder} would be lost with the pods, which a restart makes anew: {remedy}"
            "set checkpoint.local_dir=null and checkpoint.local_every_steps=null"
        )


def unmounted(config: Config, cluster: Cluster) -> list[str]:
    """The files and folders of the data that pods do not find in a mount."""
    named = [config.data.tokenizer, *(path for source in config.data.sources for path in source.path)]
    files = [pathlib.PurePosixPath(path) for path in named if path not in ("bytes", "stdlib")]
    return [str(file) for file in files if not any(file.is_relative_to(mount.path) for mount in cluster.mounts)]


# ------------------------------------------------------------------------------------------------------- xpk


def xpk(cluster: Cluster, config: str) -> str:
    """A script that calls `xpk workload create`; its arguments say --cluster, --project and --zone.

    xpk writes a JobSet of its own: it restarts on the codes that it is told, counts every restart, and takes `mounts`
    from `xpk storage`, the queue and the nodes from its cluster.
    """
    encoded = base64.b64encode(config.encode()).decode()
    # xpk sends SIGTERM to the shell that runs this, which training must have replaced.
    file = '"${TMPDIR:-/tmp}/config.yaml"'
    train = f"echo {encoded} | base64 -d > {file} && exec python -m maxds.train {file}"
    options = {
        "workload": cluster.name,
        "namespace": cluster.namespace,
        "docker-image": cluster.image,
        "tpu-type": cluster.topology.replace(":", "-"),
        "num-slices": cluster.slices,
        "max-restarts": cluster.max_restarts,
        "restart-on-exit-codes": "1,3,5,6,7",
        "termination-grace-period-seconds": cluster.grace_seconds,
        "env": "JAX_PLATFORMS=tpu,cpu",
        **({"priority": cluster.priority} if cluster.priority else {}),
        "command": train,
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items()]
    head = "#!/usr/bin/env bash\n# bash FILE --cluster=... --project=... --zone=...\nset -euo pipefail\n"
    return head + " \\\n  ".join(["exec xpk workload create", *lines, '"$@"']) + "\n"


if __name__ == "__main__":
    command.run(main)
