"""deploy/kubernetes: the overlays, each component and all together render to resources that Kubernetes would take, and
that fit together."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from pydantic import BaseModel

from kvrelay.config.loader import resolve
from kvrelay.config.ranks import WAIT_FOR_WORKER_S, RankConfig
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig
from tests.unit.deploy.kustomize import KUBERNETES, NEEDS_KUBECTL, Resource, compose, key, render

pytestmark = NEEDS_KUBECTL

COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
ALL = (*sorted(set(COMPONENTS) - {"ranks"}), "ranks")
SETS = {"base": (), **{name: (name,) for name in COMPONENTS}, "all": ALL}
OVERLAYS = {path.name: path for path in (KUBERNETES / "overlays").iterdir()}
VERSIONS = ("1.31", "1.34")
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"


def closed(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these fields and no others."""
    properties = required | (optional or {})
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


WHOLE, ANY_OBJECT = {"type": "integer", "minimum": 0}, {"type": "object"}
GROUP = closed(
    {"workerTemplate": ANY_OBJECT, "size": WHOLE},
    {
        "restartPolicy": one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        "leaderTemplate": ANY_OBJECT,
    },
)
ROLLOUT = closed(
    {"type": one_of("RollingUpdate")},
    {"rollingUpdateConfiguration": closed({}, {"maxSurge": WHOLE, "maxUnavailable": WHOLE, "partition": WHOLE})},
)
LEADER_WORKER_SET = closed(
    {"leaderWorkerTemplate": GROUP},
    {"replicas": WHOLE, "startupPolicy": one_of("LeaderCreated", "LeaderReady"), "rolloutStrategy": ROLLOUT},
)
"""The fields of LeaderWorkerSetSpec that are used; no package has its schema. Pod templates are checked as pods."""


@pytest.fixture(params=[*SETS, *OVERLAYS])
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return compose(*SETS[request.param]) if request.param in SETS else render(OVERLAYS[request.param])


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
    config = settings(resources)
    ours = [template for _, template in pods(resources) if template["metadata"]["labels"][NAME] == "kvrelay"]
    return [
        (each["metadata"]["labels"][COMPONENT], each["spec"], each["spec"]["containers"][0], config["data"])
        for each in ours
    ]


def settings(resources: list[Resource]) -> Resource:
    """The ConfigMap with the variables of all pods."""
    found = [each for each in resources if each["kind"] == "ConfigMap" and "KVRELAY_REDIS_URL" in each["data"]]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid(resources: list[Resource], version: str) -> None:
    assert len({key(resource) for resource in resources}) == len(resources)
    for resource in resources:
        group = resource["apiVersion"].partition("/")[0]
        if group == "leaderworkerset.x-k8s.io":
            jsonschema.validate(resource["spec"], LEADER_WORKER_SET)
        elif group not in OPERATORS:
            kubernetes_validate.validate(resource, version, strict=True)
    for name, template in pods(resources):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **template["metadata"]}}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, version, strict=True)


OPERATORS = {"keda.sh": "keda.v1alpha1", "monitoring.coreos.com": "prometheus_operator.v1"}
"""The module of cloudcoil.models with the operator's types, by API group."""


@pytest.mark.slow  # four seconds to import their types
@pytest.mark.skipif(find_spec("cloudcoil") is None, reason="the operators' types are not installed")
def test_resources_of_operators_are_valid() -> None:
    kinds = set()
    for resource in compose(*ALL):
        group = resource["apiVersion"].partition("/")[0]
        if group in OPERATORS:
            model = getattr(importlib.import_module(f"cloudcoil.models.{OPERATORS[group]}"), resource["kind"])
            read = model.model_validate(resource).model_dump(mode="json", by_alias=True, exclude_unset=True)
            assert read["spec"] == resource["spec"], "a field that the operator does not have"
            kinds.add(resource["kind"])
    assert kinds == {"ScaledObject", "PodMonitor", "PrometheusRule"}


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
                    assert named - {5570} == set().union(*map(ports, selected)) - {"ranks"}
                for rule in spec["ingress"]:
                    chosen(rule["from"][0].get("podSelector", {}).get("matchLabels", {}) if "from" in rule else {})
            case "HorizontalPodAutoscaler" | "ScaledObject":
                target = (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
                (scaled,) = [each for each in resources if key(each) == target]
                assert "replicas" not in scaled["spec"]
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
        assert {name for name in config if not name.startswith("UCX_")} <= fields
        known: dict[str, list[type[BaseModel]]] = {"router": [RouterConfig], "decode-rank": [RankConfig, WorkerConfig]}
        own = {name for each in known.get(role, [WorkerConfig]) for name in each.model_fields}
        names = [each["name"] for each in container["env"]]
        assert {f"KVRELAY_{name.upper()}" for name in own} >= set(names) and len(set(names)) == len(names)
        assert container["args"] == [role.removeprefix("decode-")]


def test_a_changed_setting_replaces_every_pod(resources: list[Resource]) -> None:
    config = settings(resources)["metadata"]["name"]
    assert re.fullmatch(r"kvrelay-[a-z0-9]{10}", config)
    for _, _, container, _ in services(resources):
        assert container["envFrom"] == [{"configMapRef": {"name": config}}]


def test_the_policy_opens_the_ports_of_nixl(resources: list[Resource]) -> None:
    data = settings(resources)["data"]
    assert data["KVRELAY_TRANSFER"] == "nixl"
    first, last = map(int, data["UCX_TCP_PORT_RANGE"].split("-"))
    (policy,) = [each["spec"] for each in resources if key(each) == ("NetworkPolicy", "kvrelay")]
    (ours,) = [rule["ports"] for rule in policy["ingress"] if "podSelector" in rule.get("from", [{}])[0]]
    assert {"port": first, "endPort": last} in ours
    declared = [port["containerPort"] for _, _, each, _ in services(resources) for port in each.get("ports", ())]
    assert not [port for port in declared if first <= port <= last]
    assert last - first >= 15, "one for each rank in a pod"


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
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] == 10001, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"]["drop"] == ["ALL"] and "privileged" not in context, name
            has_rdma = any(each.startswith("rdma/") for each in container["resources"]["limits"])
            assert context["capabilities"].get("add", []) == (["IPC_LOCK"] if has_rdma else []), name
            assert context.get("runAsUser") == (0 if has_rdma else None), "only root gets an added capability"
            assert container["resources"]["limits"]["memory"], name
        assert not {"hostPID", "hostIPC"} & set(spec), name


def environ_of(template: Resource, config: dict[str, str], fields: dict[str, str]) -> dict[str, str]:
    """The variables of a pod's container. `fields`: what its fields and the controller's variables are."""
    found = dict(config)
    for each in template["spec"]["containers"][0]["env"]:
        source = each.get("valueFrom", {})
        value = each.get("value", fields.get(source.get("fieldRef", {}).get("fieldPath", ""), "4"))
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: fields[match[1]], value)
    return found


def test_pods_of_a_group_are_the_ranks_of_one_worker() -> None:
    resources = compose("ranks")
    config = settings(resources)["data"]
    (group,) = [each["spec"] for each in resources if each["kind"] == "LeaderWorkerSet"]
    leader, other = (group["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate"))
    size = group["leaderWorkerTemplate"]["size"]
    config = {name: value for name, value in config.items() if name.startswith("KVRELAY_")}
    config |= {"KVRELAY_MODEL": "org/model", "KVRELAY_REDIS_PASSWORD_FILE": "", "KVRELAY_CURVE_KEY_FILE": ""}
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
    for role, spec, container, _ in services(compose("gpu")):
        limits = container["resources"]["limits"]
        if role == "router":
            assert "nvidia.com/gpu" not in limits
            continue
        environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        own = {name: environ[name] for name in ("KVRELAY_DEVICE", "KVRELAY_MEMORY_UTILIZATION")}
        worker = resolve(WorkerConfig, {}, own | {"KVRELAY_MODEL": "org/model"}, role=role)
        assert (worker.device, worker.memory_utilization) == ("cuda", 0.9)
        assert limits["nvidia.com/gpu"] == "1" and container["image"] == "kvrelay:cuda"
        assert [each["key"] for each in spec["tolerations"]] == ["nvidia.com/gpu"]
        requested = container["resources"]["requests"]["memory"]
        assert requested == limits["memory"] == "32Gi", "12 GiB of swap space beside 80 GB, and the process"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert "shm" in [each["name"] for each in spec["volumes"]]


def test_groups_have_what_other_components_give_workers() -> None:
    (group,) = [each["spec"] for each in compose(*ALL) if each["kind"] == "LeaderWorkerSet"]
    assert group["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}
    for name in ("leaderTemplate", "workerTemplate"):
        spec = group["leaderWorkerTemplate"][name]["spec"]
        assert {"nvidia.com/gpu", "rdma/hca_shared_devices_a"} < set(spec["containers"][0]["resources"]["limits"])
        assert {"shm", "models", "cache"} < {each["name"] for each in spec["volumes"]}


@pytest.mark.parametrize(
    ("component", "num_pods"), [("rdma", 2), ("host-network", 2), ("models", 3), ("kernel-cache", 2)]
)
def test_a_component_changes_the_pods_that_it_is_about(component: str, num_pods: int) -> None:
    def changed(spec: Resource) -> bool:
        volumes = {each["name"]: each for each in spec["volumes"]}
        match component:
            case "rdma":
                return bool(spec["containers"][0]["resources"]["limits"].get("rdma/hca_shared_devices_a"))
            case "host-network":
                return (spec.get("hostNetwork"), spec.get("dnsPolicy")) == (True, "ClusterFirstWithHostNet")
            case "models":
                return "models" in volumes
            case _:
                claim = {"claimName": "kvrelay-kernel-cache"}
                return bool(volumes["cache"] == {"name": "cache", "persistentVolumeClaim": claim})

    found = [changed(spec) for _, spec, _, _ in services(compose(component))]
    assert len(found) == 3 and sum(found) == num_pods


def test_every_dashboard_is_in_a_map_that_grafana_finds() -> None:
    resources = {key(each): each for each in compose("monitoring")}
    dashboards = resources["ConfigMap", "kvrelay-dashboards"]
    files = (KUBERNETES.parent / "observability" / "grafana" / "dashboards").glob("*.json")
    assert dashboards["data"] == {path.name: path.read_text() for path in files}
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_prometheus_names_jobs_as_the_queries_do() -> None:
    (monitor,) = [each["spec"] for each in compose("monitoring") if each["kind"] == "PodMonitor"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (relabeling,) = endpoint["relabelings"]
    jobs = {relabeling["replacement"].replace("$1", role) for role, *_ in services(compose("monitoring"))}
    assert relabeling["targetLabel"] == "job" and jobs == {"kvrelay-router", "kvrelay-prefill", "kvrelay-decode"}
    assert all(endpoint["port"] in {port["name"] for port in each["ports"]} for _, _, each, _ in services(compose()))
