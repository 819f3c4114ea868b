"""A run as Kubernetes objects: a ConfigMap that holds its config, and a JobSet with a job for each slice.

The fields are those of https://github.com/kubernetes-sigs/jobset (v1alpha2, from 0.10 on) and of Kubernetes' Job.
What GKE adds itself is left to it: TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and the TPUs' devices.

A pod's exit code decides what happens (maxds/train.py). A pod that fails fails its job, and a job that fails restarts
the whole JobSet, for a step needs every host:

    0         the job is complete
    2, 4      config and loss are the same next time: the JobSet fails at once
    3         preempted and saved: it starts again, and is not counted. So does a pod that the cluster took away
    others    5 data, 6 hang, 7 storage, 1 a defect, a signal: it starts again, up to `max_restarts` times
"""

import dataclasses
from typing import Any

import yaml

from maxds.aot import topology
from maxds.cluster import WORKERS, Cluster

CONTAINER = "train"
CONFIG = "/etc/maxds/config.yaml"
HOPELESS = [2, 4]
SAVED = [3]

_FOREVER = 2**31 - 1  # what JobSet asks of `backoffLimit` with restarts in place


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a run needs its pods to have."""

    port: int | None = None  # where it serves its figures
    local_dir: str | None = (
        None  # where it keeps local checkpoints: in the host's memory, which stays while the pod does
    )


def render(cluster: Cluster, text: str, needs: Needs = Needs()) -> str:
    """The run as a YAML stream for `kubectl apply -f -`; `text` is that of its config."""
    objects = _config_map(cluster, text), _jobset(cluster, needs)
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)


def _config_map(cluster: Cluster, text: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": cluster.name, "namespace": cluster.namespace},
        "immutable": True,  # or a restart could go on with another config than the run began with
        "data": {"config.yaml": text},
    }


def _jobset(cluster: Cluster, needs: Needs) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": cluster.queue} if cluster.queue else {}
    job = {"name": WORKERS, "replicas": cluster.slices, "template": {"spec": _job(cluster, needs)}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": cluster.name,
            "namespace": cluster.namespace,
            **({"labels": labels} if labels else {}),
            # One job has one slice: no pod of it lands among those of another.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _failure_policy(cluster),
            "replicatedJobs": [job],
        },
    }


def _failure_policy(cluster: Cluster) -> dict[str, Any]:
    """What becomes of the JobSet when a job fails. The first rule that matches; without one, a restart that counts."""
    rules = [_on_rule("hopeless", "FailJobSet", "0")]
    if not cluster.restart_agent:
        rules.append(_on_rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", "[12]"))
    strategy = {"restartStrategy": "InPlaceRestart"} if cluster.restart_agent else {}
    return {"maxRestarts": cluster.max_restarts, **strategy, "rules": rules}


def _on_rule(name: str, action: str, index: str) -> dict[str, Any]:
    """For a job that this rule of its `podFailurePolicy` has failed; Kubernetes says which in the job's message."""
    pattern = f"matching FailJob rule at index {index}$"
    reasons = ["PodFailurePolicy"]
    return {"name": name, "action": action, "onJobFailureReasons": reasons, "onJobFailureMessagePatterns": [pattern]}


def _job(cluster: Cluster, needs: Needs) -> dict[str, Any]:
    hosts = cluster.slice.hosts
    rules = [{"action": "FailJob", "onExitCodes": _codes("In", HOPELESS)}]
    if cluster.restart_agent:  # what else a pod can end with is the agent's affair
        backoff = {"backoffLimit": _FOREVER, "podReplacementPolicy": "Failed"}
    else:
        backoff = {"backoffLimit": 0}
        taken_away = [{"type": "DisruptionTarget", "status": "True"}]
        rules += [
            {"action": "FailJob", "onExitCodes": _codes("In", SAVED)},
            {"action": "FailJob", "onPodConditions": taken_away},
        ]
    return {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        **backoff,
        "podFailurePolicy": {"rules": rules},
        "template": _pod(cluster, needs),
    }


def _codes(operator: str, values: list[int]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": operator, "values": values}


def _pod(cluster: Cluster, needs: Needs) -> dict[str, Any]:
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace_seconds,
        # The kernel keeps SIGTERM from the first process of a container until that has a handler, which training has
        # not while it starts: here another process is the first.
        "shareProcessNamespace": True,
        "nodeSelector": _nodes(cluster),
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [_container(cluster, needs)],
        "volumes": [{"name": "config", "configMap": {"name": cluster.name}}, *map(_volume, cluster.mounts)],
    }
    if needs.local_dir is not None:
        spec["volumes"].append({"name": "local", "emptyDir": {"medium": "Memory"}})
    if cluster.restart_agent:
        spec["initContainers"] = [_agent(cluster.restart_agent)]
    if cluster.priority:
        spec["priorityClassName"] = cluster.priority
    if cluster.service_account:
        spec["serviceAccountName"] = cluster.service_account
    else:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    metadata = {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}} if cluster.mounts else {}
    return {**metadata, "spec": spec}


def _nodes(cluster: Cluster) -> dict[str, str]:
    found = cluster.slice
    nodes = {
        "cloud.google.com/gke-tpu-accelerator": topology.ACCELERATORS[found.chip.family],
        "cloud.google.com/gke-tpu-topology": found.label,
    }
    if cluster.spot:
        nodes["cloud.google.com/gke-spot"] = "true"
    if cluster.reservation:
        nodes["cloud.google.com/reservation-name"] = cluster.reservation
    return nodes


def _container(cluster: Cluster, needs: Needs) -> dict[str, Any]:
    mounts = [{"name": "config", "mountPath": CONFIG.rpartition("/")[0], "readOnly": True}]
    mounts += [{"name": mount.bucket, "mountPath": mount.path, "readOnly": True} for mount in cluster.mounts]
    if needs.local_dir is not None:
        mounts.append({"name": "local", "mountPath": needs.local_dir})
    in_place = {"restartPolicy": "Never", "restartPolicyRules": [_restart_all(0, *HOPELESS)]}
    return {
        "name": CONTAINER,
        "image": cluster.image,
        **(in_place if cluster.restart_agent else {}),
        "command": ["python", "-m", "maxds.train", CONFIG],
        **({} if needs.port is None else {"ports": [{"name": "metrics", "containerPort": needs.port}]}),
        "env": _environment(cluster),
        # A TPU's device files are root's, and its driver locks more memory than a container may.
        "securityContext": {"privileged": True, "runAsUser": 0},
        "resources": {"limits": {"google.com/tpu": topology.CHIPS_PER_HOST}},
        "terminationMessagePolicy": "FallbackToLogsOnError",  # `kubectl describe pod` tells why it ended
        "volumeMounts": mounts,
    }


def _environment(cluster: Cluster) -> list[dict[str, Any]]:
    """A TPU that does not start must be an error: JAX would go on without it, and the mesh would seem mistaken."""
    environment: list[dict[str, Any]] = [{"name": "JAX_PLATFORMS", "value": "tpu,cpu"}]
    if cluster.slices > 1:
        environment += [
            {"name": "MEGASCALE_NUM_SLICES", "value": str(cluster.slices)},
            _annotation("MEGASCALE_SLICE_ID", "job-index"),
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": f"{cluster.name}-{WORKERS}-0-0.{cluster.name}"},
        ]
    return environment


def _annotation(name: str, annotation: str) -> dict[str, Any]:
    """A variable with the value of an annotation that JobSet gives each pod."""
    field = f"metadata.annotations['jobset.sigs.k8s.io/{annotation}']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _volume(mount: Any) -> dict[str, Any]:
    attributes = {"bucketName": mount.bucket, "mountOptions": "implicit-dirs"}
    csi = {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True, "volumeAttributes": attributes}
    return {"name": mount.bucket, "csi": csi}


def _agent(image: str) -> dict[str, Any]:
    """JobSet's sidecar, which holds the pod back until all are there, and restarts it when one has failed."""
    pod_name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return {
        "name": "restart-agent",
        "image": image,
        "restartPolicy": "Always",
        "restartPolicyRules": [_restart_all(0)],
        "startupProbe": {
            "httpGet": {"path": "/barrier-is-down", "port": 8081},
            "failureThreshold": 3600,  # seconds: a host under repair takes its time
            "periodSeconds": 1,
        },
        "env": [_annotation("JOBSET_NAME", "jobset-name"), pod_name],
    }


def _restart_all(*but: int) -> dict[str, Any]:
    return {"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": list(but)}}


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such, and every list out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
