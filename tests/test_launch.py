"""A run as Kubernetes objects: of their schemas, doing what each exit code asks, and refused where pods would fail.

The schemas are those that JobSet and Kubernetes publish, as the models that the package kubeflow-trainer-api has made
from them: a field that they do not know is dropped by a round trip, and one of another type is refused.
"""

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml
from kubeflow_trainer_api import models

from maxds import jobset, launch, loader, mesh, nodes
from maxds.aot import topology
from maxds.cluster import Cluster
from maxds.config import Config

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: it knows the torus")
ROOT = pathlib.Path(__file__).parents[1]
TINY = ROOT / "tests/tiny.yaml"
RECIPES = sorted((ROOT / "scripts/launch").glob("*.yaml"))
EVERYTHING = """
name: tiny
namespace: training
image: registry/maxds:1
topology: v5p:2x2x2
slices: 2
service_account: trainer
queue: tpu
priority: high
reservation: ours
mounts: [{bucket: corpus, path: /mnt/corpus}]
max_restarts: 7
grace_seconds: 60
"""
LEAST = "name: tiny\nimage: registry/maxds:1\ntopology: v6e:2x4\n"
RUN = ("run_dir=gs://bucket/run", "mesh={data: 2, fsdp: -1, expert: 2}", "data.global_batch=64")


@pytest.fixture(autouse=True)
def no_tpu_is_asked_for(monkeypatch):
    for name, value in topology._ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "maxds.launch", *map(str, args)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def cluster(tmp_path, text):
    (tmp_path / "cluster.yaml").write_text(text)
    return loader.load(Cluster, tmp_path / "cluster.yaml")[0]


def objects(found, config="steps: 1\n"):
    config_map, jobs = yaml.safe_load_all(jobset.render(found, config))
    return config_map, jobs


def pod(jobs):
    return jobs["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def recipe(path):
    """The command that a recipe begins with: CONFIG and overrides."""
    line = next(line for line in path.read_text().splitlines() if line.startswith("# python -m maxds.launch "))
    config, flag, *overrides = shlex.split(line.removeprefix("# python -m maxds.launch "))
    assert flag == f"--cluster=scripts/launch/{path.name}"
    return loader.load(Config, ROOT / config, overrides)


# ------------------------------------------------------------------------------------------------- schemas


KINDS = {"ConfigMap": models.IoK8sApiCoreV1ConfigMap, "JobSet": models.JobsetV1alpha2JobSet}


def assert_of_its_schema(document):
    """The JobSet's model holds Job's and Pod's."""
    model = KINDS[document["kind"]].from_dict(document)
    assert json.loads(model.to_json()) == document


@pytest.mark.parametrize("text", [LEAST, EVERYTHING, f"{EVERYTHING}restart_agent: registry/agent:1\n"])
def test_what_is_rendered_is_of_the_published_schemas(tmp_path, text):
    for document in objects(cluster(tmp_path, text)):
        assert_of_its_schema(document)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_renders_the_run_on_hosts_of_its_slices(path):
    config, tree = recipe(path)
    found = loader.load(Cluster, path)[0]
    launch.check(config, found)
    config_map, jobs = objects(found, loader.render(config, tree))
    assert_of_its_schema(config_map)
    assert_of_its_schema(jobs)
    (job,) = jobs["spec"]["replicatedJobs"]
    kind, extents, *slices = re.findall(r"[^-]+", path.stem)
    selector = pod(jobs)["spec"]["nodeSelector"]
    labels = {"tpu7x": "tpu7x", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}
    assert selector["cloud.google.com/gke-tpu-accelerator"] == labels[kind]
    assert selector["cloud.google.com/gke-tpu-topology"] == extents
    hosts = {"4x8x8": 64, "8x8x8": 128, "8x8": 16}[extents]
    assert job["replicas"] == int(slices[0] if slices else 1)
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == hosts


def test_there_is_a_recipe_of_every_tpu_with_one_slice_and_with_two():
    found = {(c.slice.chip.family, c.slices) for c in (loader.load(Cluster, path)[0] for path in RECIPES)}
    assert found == {(chip.family, slices) for chip in topology.CHIPS.values() for slices in (1, 2)}


@pytest.mark.parametrize("mistake", [{"maxRestarts": "20"}, {"maxRestart": 20}, {"rules": [{"action": "FailJobSet"}]}])
def test_the_schema_test_can_fail(tmp_path, mistake):
    _, jobs = objects(cluster(tmp_path, LEAST))
    jobs["spec"]["failurePolicy"] = mistake
    with pytest.raises((AssertionError, ValueError)):  # dropped by the model, or refused
        assert_of_its_schema(jobs)


# ---------------------------------------------------------------------------------------------- exit codes


def outcome(jobs, code, *, disrupted=False):
    """What the controllers of Job and JobSet do when a pod ends with a code, by their documentation."""
    spec = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    if code == 0:
        return "complete"
    for index, rule in enumerate(spec["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes")
        hit = code in codes["values"] if codes else disrupted
        assert rule["action"] == "FailJob" and (codes is None or codes["operator"] == "In")
        if hit:
            how = f"failed with exit code {code}" if codes else "has condition DisruptionTarget"
            reason, message = (
                "PodFailurePolicy",
                f"Container train for pod a/b {how} matching FailJob rule at index {index}",
            )
            break
    else:
        if spec["backoffLimit"] > 0:
            return "pod again"
        reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for rule in jobs["spec"]["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]
        ):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (0, "complete"),
        (1, "RestartJobSet"),  # a defect or the machine
        (2, "FailJobSet"),  # config
        (3, "RestartJobSetAndIgnoreMaxRestarts"),  # preempted and saved
        (4, "FailJobSet"),  # not finite
        (5, "RestartJobSet"),  # data
        (6, "RestartJobSet"),  # hang
        (7, "RestartJobSet"),  # storage
        (137, "RestartJobSet"),  # killed
        (134, "RestartJobSet"),  # aborted, as JAX does when a peer is gone
    ],
)
def test_an_exit_code_leads_to_what_it_means(tmp_path, code, wanted):
    _, jobs = objects(cluster(tmp_path, EVERYTHING))
    assert outcome(jobs, code) == wanted


def test_a_pod_that_the_cluster_takes_away_is_not_counted(tmp_path):
    _, jobs = objects(cluster(tmp_path, EVERYTHING))
    assert outcome(jobs, 137, disrupted=True) == "RestartJobSetAndIgnoreMaxRestarts"
    assert outcome(jobs, 2, disrupted=True) == "FailJobSet"


@pytest.mark.parametrize(
    ("code", "container", "wanted"),
    [(0, "", "complete"), (2, "", "FailJobSet"), (4, "", "FailJobSet"), (3, "restarts", ""), (5, "restarts", "")],
)
def test_in_place_all_but_the_hopeless_restart_in_their_pod(tmp_path, code, container, wanted):
    _, jobs = objects(cluster(tmp_path, f"{EVERYTHING}restart_agent: registry/agent:1\n"))
    spec = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = spec["template"]["spec"]["containers"][0]["restartPolicyRules"]
    assert (rule["action"], rule["exitCodes"]["operator"]) == ("RestartAllContainers", "NotIn")
    assert (code not in rule["exitCodes"]["values"]) == (container == "restarts")
    if container != "restarts":
        assert outcome(jobs, code) == wanted
    # What JobSet's admission asks of a JobSet that restarts in place.
    assert jobs["spec"]["failurePolicy"]["restartStrategy"] == "InPlaceRestart"
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (2147483647, "Failed")
    assert spec["completions"] == spec["parallelism"]


# --------------------------------------------------------------------------------------------------- pods


def test_the_config_that_reaches_the_pods_is_the_one_that_was_launched(tmp_path):
    (tmp_path / "cluster.yaml").write_text(EVERYTHING)
    result = command(TINY, f"--cluster={tmp_path}/cluster.yaml", *RUN, "optimizer.lr=5e-4")
    assert (result.returncode, result.stderr) == (0, "")
    config_map, jobs = yaml.safe_load_all(result.stdout)
    ((name, text),) = config_map["data"].items()
    (tmp_path / name).write_text(text)
    assert loader.load(Config, tmp_path / name)[0] == loader.load(Config, TINY, [*RUN, "optimizer.lr=5e-4"])[0]
    spec = pod(jobs)["spec"]
    (volume,) = [v["name"] for v in spec["volumes"] if v.get("configMap") == {"name": config_map["metadata"]["name"]}]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == volume]
    assert spec["containers"][0]["command"] == ["python", "-m", "maxds.train", f"{mount['mountPath']}/{name}"]
    assert config_map["metadata"]["namespace"] == jobs["metadata"]["namespace"] == "training"


def test_slices_find_each_other_and_a_single_one_is_not_asked_to(tmp_path):
    def environment(text):
        _, jobs = objects(cluster(tmp_path, text))
        return {e["name"]: e.get("value") or e["valueFrom"]["fieldRef"]["fieldPath"] for e in container(jobs)["env"]}

    def container(jobs):
        return pod(jobs)["spec"]["containers"][0]

    assert environment(LEAST) == {"JAX_PLATFORMS": "tpu,cpu"}
    assert environment(EVERYTHING) == {
        "JAX_PLATFORMS": "tpu,cpu",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "metadata.annotations['jobset.sigs.k8s.io/job-index']",
        "MEGASCALE_COORDINATOR_ADDRESS": "tiny-workers-0-0.tiny",
    }


def test_pods_name_the_port_where_prometheus_finds_them_if_they_serve(tmp_path):
    made = cluster(tmp_path, LEAST)
    for port, wanted in ((None, None), (9400, [{"name": "metrics", "containerPort": 9400}])):
        _, jobs = yaml.safe_load_all(jobset.render(made, "", jobset.Needs(port)))
        assert pod(jobs)["spec"]["containers"][0].get("ports") == wanted
    result = command(TINY, f"--cluster={tmp_path}/cluster.yaml", "prometheus_port=9400", "run_dir=gs://bucket/run")
    assert (result.returncode, "containerPort: 9400" in result.stdout) == (0, True), result.stderr


LOCAL = "checkpoint.local_dir=/local", "checkpoint.local_every_steps=10"


def test_local_checkpoints_lie_in_memory_that_stays_with_the_pod(tmp_path):
    (tmp_path / "cluster.yaml").write_text(f"{EVERYTHING}restart_agent: registry/agent:1\n")
    result = command(TINY, f"--cluster={tmp_path}/cluster.yaml", *RUN, *LOCAL)
    assert result.returncode == 0, result.stderr
    _, jobs = yaml.safe_load_all(result.stdout)
    assert_of_its_schema(jobs)
    spec = pod(jobs)["spec"]
    (volume,) = [v["name"] for v in spec["volumes"] if v.get("emptyDir") == {"medium": "Memory"}]
    assert {"name": volume, "mountPath": "/local"} in spec["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("agent", "flags", "remedy"), [("", (), "set restart_agent"), ("restart_agent: registry/agent:1\n", ("--xpk",), "")]
)
def test_local_checkpoints_that_no_restart_would_find_are_refused(tmp_path, agent, flags, remedy):
    (tmp_path / "cluster.yaml").write_text(EVERYTHING + agent)
    result = command(TINY, f"--cluster={tmp_path}/cluster.yaml", *flags, *RUN, *LOCAL)
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr.startswith("checkpoint.local_dir=/local would be lost with the pods") and remedy in result.stderr
    )


def test_every_key_of_the_cluster_file_arrives(tmp_path):
    _, jobs = objects(cluster(tmp_path, EVERYTHING))
    metadata, spec = pod(jobs)["metadata"], pod(jobs)["spec"]
    assert jobs["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "tpu"}
    assert jobs["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert (spec["terminationGracePeriodSeconds"], spec["priorityClassName"]) == (60, "high")
    assert spec["serviceAccountName"] == "trainer" and "hostNetwork" not in spec
    assert spec["nodeSelector"]["cloud.google.com/reservation-name"] == "ours"
    assert metadata["annotations"] == {"gke-gcsfuse/volumes": "true"}
    (volume,) = [v for v in spec["volumes"] if "csi" in v]
    attributes = {"bucketName": "corpus", "mountOptions": "implicit-dirs"}  # else no folder is seen that has no object
    assert volume["csi"] == {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True, "volumeAttributes": attributes}
    assert {"name": volume["name"], "mountPath": "/mnt/corpus", "readOnly": True} in spec["containers"][0][
        "volumeMounts"
    ]
    _, spot = objects(cluster(tmp_path, f"{LEAST}spot: true\n"))
    assert pod(spot)["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod(spot)["spec"]["hostNetwork"] is True


@pytest.mark.parametrize("text", [LEAST, EVERYTHING])
def test_a_pod_has_all_chips_of_its_host_and_may_use_them(tmp_path, text):
    spec = pod(objects(cluster(tmp_path, text))[1])["spec"]
    (container,) = spec["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert container["securityContext"] == {"privileged": True, "runAsUser": 0}
    assert spec["tolerations"] == [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_the_hosts_of_a_slice_find_each_other_before_they_are_ready_and_have_a_pool_of_nodes_to_themselves(tmp_path):
    _, jobs = objects(cluster(tmp_path, LEAST))
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert jobs["metadata"]["annotations"] == exclusive
    assert jobs["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert jobs["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMode"] == "Indexed"  # which numbers hosts
    assert pod(jobs)["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"  # on its host's network, too


def test_a_pod_hears_sigterm_tells_why_it_ended_and_is_begun_anew_by_the_jobset_with_the_same_config(tmp_path):
    config_map, jobs = objects(cluster(tmp_path, LEAST))
    spec = pod(jobs)["spec"]
    assert spec["shareProcessNamespace"] is True  # the first process of a namespace is kept from signals
    assert spec["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert spec["restartPolicy"] == "Never"  # else Kubernetes refuses a podFailurePolicy
    assert config_map["immutable"] is True


def test_the_agent_for_restarts_in_place_waits_for_all_pods_and_survives_what_training_does_not(tmp_path):
    """As JobSet's documents ask for it."""
    _, jobs = objects(cluster(tmp_path, f"{EVERYTHING}restart_agent: registry/agent:1\n"))
    (agent,) = pod(jobs)["spec"]["initContainers"]
    assert (agent["image"], agent["restartPolicy"]) == ("registry/agent:1", "Always")
    assert agent["startupProbe"]["httpGet"] == {"path": "/barrier-is-down", "port": 8081}
    exits = {"operator": "NotIn", "values": [0]}
    assert agent["restartPolicyRules"] == [{"action": "RestartAllContainers", "exitCodes": exits}]
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in agent["env"]}
    named = "metadata.annotations['jobset.sigs.k8s.io/jobset-name']"
    assert fields == {"JOBSET_NAME": named, "POD_NAME": "metadata.name"}


@pytest.mark.parametrize(
    ("name", "hosts", "devices"),
    [("v5p:2x2x1", 1, 4), ("v5p:2x2x4", 4, 16), ("v5p:2x4x4", 8, 32), ("v5p:4x4x4", 16, 64),
    ("v6e:2x4", 2, 8), ("v6e:16x16", 64, 256), ("tpu7x:4x8x8", 64, 512)],
)  # fmt: skip
def test_hosts_have_four_chips(name, hosts, devices):
    found = topology.of_gke(name)
    assert (found.hosts, found.devices) == (hosts, devices)


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topology: tpu7:4x4x4", "no TPU is named tpu7; did you mean tpu7x? (for example tpu7x:4x4x8)"),
        ("topology: tpu7x:8x8x4", "and multiples of 4 that ascend; try tpu7x:4x8x8"),
        ("topology: v5p:4x4x6", "GKE has no such slice"),
        *((f"topology: v5p:{extents}", "give chips as v5p:4x4x8") for extents in ("4x4", "0x4x4")),
        ("topology: v6e:3x3", "of v6e it has 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("slices: 0", "slices=0 must be positive"),
        ("slice: 2", "unknown key slice; did you mean slices?"),
        ("name: Tiny_Run", "name=Tiny_Run must be of small letters, digits and dashes"),
        (f"name: {'a' * 46}", f"is 1 characters too long: pods such as {'a' * 46}-workers-1-1-xxxxx may have 63"),
        ("max_restarts: -1", "max_restarts=-1 must not be negative"),
        ("grace_seconds: 0", "grace_seconds=0 must be positive"),
        ("service_account: null", "mounts= needs service_account"),
        ("spot: true", "reservation=ours and spot=true exclude each other"),
        ("mounts: [{bucket: 'gs://corpus', path: /mnt}]", "must be its name alone"),
        ("mounts: [{bucket: corpus, path: mnt}]", "path=mnt must be absolute, such as /mnt/corpus"),
    ],
)
def test_a_mistake_in_the_cluster_file_is_told_with_its_line(tmp_path, text, message):
    key = text.partition(":")[0]
    lines = [line for line in EVERYTHING.strip().splitlines() if not line.startswith(f"{key}:")]
    with pytest.raises(nodes.ConfigError) as caught:
        cluster(tmp_path, "\n".join([*lines, text]))
    (mistake,) = caught.value.mistakes
    assert message in mistake and re.match(r"cluster\.yaml(:\d+)?: ", mistake)


def test_the_longest_name_and_no_restart_are_taken_and_an_agent_that_may_do_nothing_is_not(tmp_path):
    found = cluster(tmp_path, f"{EVERYTHING.replace('tiny', 'a' * 45)}".replace("max_restarts: 7", "max_restarts: 0"))
    assert (found.max_restarts, len(f"{found.name}-workers-1-1-xxxxx")) == (0, 63)
    with pytest.raises(nodes.ConfigError, match="restart_agent=registry/agent:1 needs service_account, which may"):
        cluster(tmp_path, f"{LEAST}restart_agent: registry/agent:1\n")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run_dir=runs/tiny"], "run_dir=runs/tiny would be lost with its pod, checkpoints included: set run_dir=gs://"),
        (["mesh.cpu_devices=8"], "mesh.cpu_devices=8 trains on CPUs: set mesh.cpu_devices=null"),
        (["mesh={data: 2, fsdp: 2, expert: 2}"], "v5p:2x2x2 x 2 slices: mesh.data=2 x mesh.fsdp=2 x mesh.expert=2 does "
                                                 "not fit the 16 devices"),
        (["mesh.data=1"], "mesh.data=1 is not divisible by the 2 slices"),
        (["data.global_batch=48"], "data.global_batch=48 does not give each of the 16 devices a multiple of 2"),
        (["optimiser.lr=1"], "unknown key optimiser"),
    ],
)  # fmt: skip
def test_a_run_that_pods_would_refuse_or_lose_is_not_rendered(tmp_path, monkeypatch, capsys, overrides, message):
    (tmp_path / "cluster.yaml").write_text(EVERYTHING)
    monkeypatch.setattr(launch, "_CLUSTER", type("Flag", (), {"value": tmp_path / "cluster.yaml"}))
    assert launch.main(["launch", str(TINY), *RUN, *overrides]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_data_that_no_mount_has_is_named_and_the_image_may_have_it(tmp_path):
    found = cluster(tmp_path, EVERYTHING)
    here = "{kind: text, path: [/mnt/corpus/books, /mnt/corpus2, stdlib]}"
    config, _ = loader.load(Config, TINY, [*RUN, "data.tokenizer=tokenizers/t.json", f"data.sources=[{here}]"])
    assert launch.unmounted(config, found) == ["tokenizers/t.json", "/mnt/corpus2"]
    assert launch.unmounted(loader.load(Config, TINY, RUN)[0], found) == []


def test_what_the_image_must_have_is_told_beside_the_objects_and_not_among_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "cluster.yaml").write_text(EVERYTHING)
    monkeypatch.setattr(launch, "_CLUSTER", type("Flag", (), {"value": tmp_path / "cluster.yaml"}))
    monkeypatch.setattr(launch, "_XPK", type("Flag", (), {"value": False}))
    assert launch.main(["launch", str(TINY), *RUN, "data.sources=[{kind: text, path: /corpus}]"]) == 0
    out, err = capsys.readouterr()
    assert [document["kind"] for document in yaml.safe_load_all(out)] == ["ConfigMap", "JobSet"]
    assert err == f"note: the image must have /corpus, for no mount of {tmp_path}/cluster.yaml has it\n"


@needs_libtpu
def test_a_mesh_that_the_torus_cannot_hold_is_not_rendered(tmp_path):
    found = cluster(tmp_path, "name: tiny\nimage: registry/maxds:1\ntopology: v6e:4x8\n")
    config, _ = loader.load(Config, TINY, [*RUN, "mesh={data: 1, fsdp: 16, expert: 2}"])
    with pytest.raises(mesh.MeshError) as caught:
        launch.check(config, found)
    assert str(caught.value) == (
        "v6e:4x8: mesh.fsdp=16 x mesh.expert=2 cannot be laid over the torus of a slice, 4 x 8 x 1 chips: an axis "
        "takes whole dimensions, so make each the product of some of these"
    )


def test_without_a_cluster_the_usage_is_told():
    result = command(TINY)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: python -m maxds.launch CONFIG.yaml --cluster=CLUSTER.yaml")


# ---------------------------------------------------------------------------------------------------- xpk


@pytest.fixture
def xpk_script(tmp_path):
    (tmp_path / "cluster.yaml").write_text(EVERYTHING)
    result = command(TINY, f"--cluster={tmp_path}/cluster.yaml", "--xpk", *RUN)
    assert (result.returncode, result.stderr) == (0, "")
    (tmp_path / "run.sh").write_text(result.stdout)
    return tmp_path / "run.sh"


def test_xpk_is_told_what_the_cluster_file_says_and_to_start_again_what_a_jobset_starts_again(tmp_path):
    """Beside codes from 127 on, which it starts again by itself."""
    found = cluster(tmp_path, EVERYTHING)
    words = shlex.split(launch.xpk(found, "steps: 1\n"), comments=True)
    told = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    codes = {int(code) for code in told.pop("restart-on-exit-codes").split(",")}
    _, jobs = objects(found)
    assert codes == {code for code in range(1, 8) if outcome(jobs, code).startswith("Restart")}
    assert told.pop("command")
    assert told == {
        "workload": "tiny",
        "namespace": "training",
        "docker-image": "registry/maxds:1",
        "tpu-type": "v5p-2x2x2",
        "num-slices": "2",
        "max-restarts": "7",
        "termination-grace-period-seconds": "60",
        "env": "JAX_PLATFORMS=tpu,cpu",
        "priority": "high",
    }


def fake(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_the_command_given_to_xpk_trains_with_the_config_that_was_launched(tmp_path, xpk_script):
    """With stand-ins for xpk, which runs the command, and for python, which shows what it was given."""
    fake(tmp_path, "xpk", 'printf "%s\\n" "$@"; for a; do [[ $a == --command=* ]] && bash -c "(${a#--command=})"; done')
    fake(tmp_path, "python", 'echo "ran $*"; cat "${@: -1}"')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    shown = subprocess.run(
        ["bash", xpk_script, "--zone=z"], env=environment, capture_output=True, text=True, check=False
    )
    given, _, text = shown.stdout.partition(f"ran -m maxds.train {tmp_path}/config.yaml\n")
    assert {"workload", "create", "--tpu-type=v5p-2x2x2", "--num-slices=2", "--zone=z"} <= set(given.splitlines())
    (tmp_path / "arrived.yaml").write_text(text)
    assert loader.load(Config, tmp_path / "arrived.yaml")[0] == loader.load(Config, TINY, RUN)[0]


@pytest.mark.skipif(
    shutil.which("xpk") is None, reason="xpk is not on PATH: pip install xpk, in an environment of its own"
)
def test_xpk_itself_makes_the_same_pods_of_it(tmp_path, xpk_script):
    where = "--cluster=c --project=p --zone=us-east5-a --dry-run --skip-validation".split()
    shown = subprocess.run(
        ["bash", xpk_script, *where, f"--output-manifest-file={tmp_path}/xpk.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    theirs = yaml.safe_load((tmp_path / "xpk.yaml").read_text())
    _, ours = objects(cluster(tmp_path, EVERYTHING))
    for path in ("spec.parallelism", "spec.completions"):
        assert job_value(theirs, path) == job_value(ours, path)
    assert theirs["spec"]["replicatedJobs"][0]["replicas"] == 2
    selector, wanted = pod(theirs)["spec"]["nodeSelector"], pod(ours)["spec"]["nodeSelector"]
    tpu = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
    assert [selector[key] for key in tpu] == [wanted[key] for key in tpu]
    assert pod(theirs)["spec"]["terminationGracePeriodSeconds"] == 60
    (rule,) = job_value(theirs, "spec.podFailurePolicy.rules")  # fails the run on what it does not name
    assert rule["onExitCodes"]["operator"] == "NotIn"
    restarting = set(rule["onExitCodes"]["values"])
    assert {1, 3, 5, 6, 7, 137} <= restarting and not {2, 4} & restarting


def job_value(jobs, path):
    found = jobs["spec"]["replicatedJobs"][0]["template"]
    for key in path.split("."):
        found = found[key]
    return found
