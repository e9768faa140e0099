"""deploy/kubernetes: every overlay renders to resources that Kubernetes would take, and that fit together."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel

from kvrelay.config.loader import resolve
from kvrelay.config.ranks import WAIT_FOR_WORKER_S, RankConfig
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig
from tests.unit.deploy.kustomize import Resource, key, render

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
DIRECTORIES = [KUBERNETES / "base", *sorted((KUBERNETES / "overlays").iterdir())]
VERSIONS = ("1.31", "1.34")
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"


def closed(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these fields and no others."""
    properties = required | (optional or {})
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


TEXT, WHOLE, ANY_OBJECT = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
TARGET = closed({"name": TEXT}, {"apiVersion": TEXT, "kind": TEXT})
TRIGGER = closed(
    {"type": {"const": "prometheus"}, "metadata": closed({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT})},
    {"metricType": {"enum": ["AverageValue", "Value"]}},
)
CUSTOM = {
    "keda.sh/v1alpha1": closed(
        {"scaleTargetRef": TARGET, "triggers": {"type": "array", "items": TRIGGER, "minItems": 1}},
        {
            "minReplicaCount": WHOLE,
            "maxReplicaCount": WHOLE,
            "pollingInterval": WHOLE,
            "cooldownPeriod": WHOLE,
            "advanced": closed({}, {"horizontalPodAutoscalerConfig": closed({}, {"behavior": ANY_OBJECT})}),
        },
    ),
    "leaderworkerset.x-k8s.io/v1": closed(
        {
            "leaderWorkerTemplate": closed(
                {"workerTemplate": ANY_OBJECT, "size": WHOLE}, {"restartPolicy": TEXT, "leaderTemplate": ANY_OBJECT}
            )
        },
        {"replicas": WHOLE, "startupPolicy": TEXT, "rolloutStrategy": ANY_OBJECT},
    ),
}
"""What is used of resources that Kubernetes' own schemas do not have: the `spec` by apiVersion."""


@pytest.fixture(params=DIRECTORIES, ids=lambda path: path.name)
def directory(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def resources(directory: Path) -> list[Resource]:
    return render(directory)


def pods(resources: list[Resource]) -> list[tuple[str, Resource]]:
    """Name and template of everything that makes pods."""
    found = []
    for resource in resources:
        if resource["kind"] == "Deployment":
            found.append((resource["metadata"]["name"], resource["spec"]["template"]))
        if resource["kind"] == "LeaderWorkerSet":
            group = resource["spec"]["leaderWorkerTemplate"]
            found += [(resource["metadata"]["name"], group[name]) for name in ("leaderTemplate", "workerTemplate")]
    return found


def services(resources: list[Resource]) -> list[tuple[str, Resource, Resource, Resource]]:
    """Of kvrelay's own pods: the role, the pod's spec, its container, the ConfigMap's data."""
    (config,) = [each["data"] for each in resources if key(each) == ("ConfigMap", "kvrelay")]
    ours = [template for _, template in pods(resources) if template["metadata"]["labels"][NAME] == "kvrelay"]
    return [
        (each["metadata"]["labels"][COMPONENT], each["spec"], each["spec"]["containers"][0], config) for each in ours
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid(resources: list[Resource], version: str) -> None:
    assert len({key(resource) for resource in resources}) == len(resources)
    for resource in resources:
        if resource["apiVersion"] in CUSTOM:
            jsonschema.validate(resource["spec"], CUSTOM[resource["apiVersion"]])
        else:
            kubernetes_validate.validate(resource, version, strict=True)
    for name, template in pods(resources):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **template["metadata"]}}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, version, strict=True)


def test_kustomize_itself_agrees(directory: Path, resources: list[Resource]) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True, check=True)
    rendered = {key(each): each for each in yaml.safe_load_all(done.stdout)}
    assert rendered == {key(each): each for each in resources}


def test_selectors_find_their_pods_and_ports_exist(resources: list[Resource]) -> None:
    templates = [template for _, template in pods(resources)]

    def chosen(labels: dict[str, str], expressions: list[Resource] | None = None) -> list[Resource]:
        found = [
            each
            for each in templates
            if labels.items() <= each["metadata"]["labels"].items()
            and all(each["metadata"]["labels"].get(one["key"]) in one["values"] for one in expressions or ())
        ]
        assert found, f"nothing has the labels {labels} and fits {expressions}"
        return found

    def ports(template: Resource) -> set[str]:
        return {port["name"] for container in template["spec"]["containers"] for port in container.get("ports", ())}

    for resource in resources:
        spec = resource.get("spec", {})
        match resource["kind"]:
            case "Deployment":
                assert spec["template"] in chosen(spec["selector"]["matchLabels"])
            case "PodDisruptionBudget":
                assert len(chosen(spec["selector"]["matchLabels"])) == 1
            case "Service":
                (template,) = chosen(spec["selector"])
                assert {port["targetPort"] for port in spec["ports"]} <= ports(template)
            case "NetworkPolicy":
                selector = spec["podSelector"]
                selected = chosen(selector.get("matchLabels", {}), selector.get("matchExpressions"))
                named = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())}
                if all("ports" in rule for rule in spec["ingress"]):
                    assert named == set().union(*map(ports, selected)) - {"ranks"}
                for rule in spec["ingress"]:
                    chosen(rule["from"][0].get("podSelector", {}).get("matchLabels", {}) if "from" in rule else {})
            case "HorizontalPodAutoscaler" | "ScaledObject":
                target = (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
                (deployment,) = [each for each in resources if key(each) == target]
                assert "replicas" not in deployment["spec"]
    for template in templates:
        for container in template["spec"]["containers"]:
            probes = [container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")]
            for probe in filter(None, probes):
                assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports(template)


def test_every_role_has_workers_that_may_be_moved_one_by_one(resources: list[Resource]) -> None:
    roles = {role for role, *_ in services(resources)}
    budgets = {
        each["metadata"]["labels"][COMPONENT]: each["spec"]
        for each in resources
        if each["kind"] == "PodDisruptionBudget"
    }
    assert roles - {"decode-rank"} == {"router", "prefill", "decode"}
    assert roles == set(budgets)
    assert all(spec["maxUnavailable"] == 1 for spec in budgets.values())


def test_every_variable_is_a_field(resources: list[Resource]) -> None:
    fields = {f"KVRELAY_{name.upper()}" for name in (*RouterConfig.model_fields, *WorkerConfig.model_fields)}
    for role, _, container, config in services(resources):
        assert set(config) <= fields
        known: dict[str, type[BaseModel]] = {"router": RouterConfig, "decode-rank": RankConfig}
        own = known.get(role, WorkerConfig)
        names = [each["name"] for each in container["env"]]
        assert {f"KVRELAY_{name.upper()}" for name in own.model_fields} >= set(names) and len(set(names)) == len(names)
        assert container["args"] == [role.removeprefix("decode-")]


def test_a_pod_may_drain_before_it_is_killed(resources: list[Resource]) -> None:
    for _, spec, container, config in services(resources):
        pause_s = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0, 0])[1])
        needed_s = pause_s + int(config["KVRELAY_DRAIN_TIMEOUT_S"]) + 10
        assert spec["terminationGracePeriodSeconds"] >= needed_s


def test_probes_ask_what_they_mean(resources: list[Resource]) -> None:
    """Alive: the process answers. Ready: it can be used. A dead Redis or a missing peer must kill nobody."""
    for role, _, container, _ in services(resources):
        if role == "decode-rank":  # has no pages: its worker watches it
            continue
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 300


def test_pods_may_do_little(resources: list[Resource]) -> None:
    for name, template in pods(resources):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context, name
            assert container["resources"]["limits"]["memory"], name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name


def environ_of(template: Resource, config: dict[str, str], fields: dict[str, str]) -> dict[str, str]:
    """The variables of a pod's container. `fields`: what its fields and the controller's variables are."""
    found = dict(config)
    for each in template["spec"]["containers"][0]["env"]:
        source = each.get("valueFrom", {})
        value = each.get("value", fields.get(source.get("fieldRef", {}).get("fieldPath", ""), "4"))
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: fields[match[1]], value)
    return found


def test_pods_of_a_group_are_the_ranks_of_one_worker() -> None:
    resources = render(KUBERNETES / "overlays" / "leader-worker-set")
    (config,) = [each["data"] for each in resources if key(each) == ("ConfigMap", "kvrelay")]
    (group,) = [each["spec"] for each in resources if each["kind"] == "LeaderWorkerSet"]
    leader, other = (group["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate"))
    size = group["leaderWorkerTemplate"]["size"]
    config = config | {"KVRELAY_MODEL": "org/model", "KVRELAY_REDIS_PASSWORD_FILE": "", "KVRELAY_CURVE_KEY_FILE": ""}
    worker = resolve(WorkerConfig, {}, environ_of(leader, config, {"status.podIP": "10.0.0.1"}), role="decode")
    assert worker.num_ranks == size > 1 and worker.num_local_ranks == 0
    fields = {
        "status.podIP": "10.0.0.2",
        "LWS_LEADER_ADDRESS": "kvrelay-decode-0.kvrelay-decode.default",
        "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": "1",
    }
    rank = resolve(RankConfig, {}, environ_of(other, config, fields))
    assert (rank.rank, rank.reachable_host, rank.threads) == (1, "10.0.0.2", 4)
    assert rank.engine == f"{fields['LWS_LEADER_ADDRESS']}:{worker.rank_port}"
    assert (worker.rank_host, worker.reachable_host) == ("10.0.0.1", "10.0.0.1")
    assert worker.rank_timeout_s == WAIT_FOR_WORKER_S
    assert {"name": "ranks", "containerPort": worker.rank_port} in leader["spec"]["containers"][0]["ports"]
    # The leader is ready only once the others have joined, so they must not wait for that.
    assert group["startupPolicy"] == "LeaderCreated"
    pause_s = int(other["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause_s > worker.drain_timeout_s, "the worker drains with its ranks"


def test_workers_on_gpus_have_one_each_and_most_of_its_memory() -> None:
    for role, spec, container, config in services(render(KUBERNETES / "overlays" / "gpu")):
        limits = container["resources"]["limits"]
        if role == "router":
            assert "nvidia.com/gpu" not in limits
            continue
        environ = config | {each["name"]: each["value"] for each in container["env"] if "value" in each}
        own = {name: environ[name] for name in ("KVRELAY_DEVICE", "KVRELAY_MEMORY_UTILIZATION")}
        worker = resolve(WorkerConfig, {}, own | {"KVRELAY_MODEL": "org/model"}, role=role)
        assert (worker.device, worker.memory_utilization) == ("cuda", 0.9)
        assert limits["nvidia.com/gpu"] == "1" and container["image"] == "kvrelay:cuda"
        assert [each["key"] for each in spec["tolerations"]] == ["nvidia.com/gpu"]
        requested = container["resources"]["requests"]["memory"]
        assert requested == limits["memory"] == "32Gi", "14 GB of swap space beside 80 GB, and the process"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert "shm" in [each["name"] for each in spec["volumes"]]
