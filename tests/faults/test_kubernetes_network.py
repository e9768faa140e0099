"""The pods of deploy/kubernetes as processes, each in a network namespace with the rules of the NetworkPolicies."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvrelay.curve import CurveKey
from kvrelay.fleet.embedded import redis_executable
from kvrelay.process import die_with_parent
from tests.fakes.waiting import wait_until
from tests.unit.deploy.kustomize import NEEDS_KUBECTL, Resource, compose

MISSING = [name for name in ("ip", "iptables", "curl") if shutil.which(name) is None]
pytestmark = [
    NEEDS_KUBECTL,
    pytest.mark.skipif(
        os.geteuid() != 0 or bool(MISSING), reason=f"needs root, and {MISSING or 'tools that are here'}"
    ),
    pytest.mark.timeout(300),
]
MOUNTED = "/run/secrets/kvrelay"
POD_NAMES = ("redis", "client", "router", "prefill", "decode", "decode-rank")
ADDRESSES = {name: f"10.77.0.{number}" for number, name in enumerate(POD_NAMES, 1)}
OURS = POD_NAMES[2:]
COMPONENT = "app.kubernetes.io/component"


class Cluster:
    """A namespace for each pod, with one interface, and one with the switch between them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.prefix = f"kvrelay-{secrets.token_hex(4)}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        ip("netns", "add", self.prefix)
        ip("-n", self.prefix, "link", "add", "switch", "type", "bridge")
        ip("-n", self.prefix, "link", "set", "switch", "up")
        for name in POD_NAMES:
            self._connect(name)

    def _connect(self, name: str) -> None:
        space = f"{self.prefix}-{name}"
        ip("netns", "add", space)
        ip("-n", self.prefix, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("-n", self.prefix, "link", "set", name, "master", "switch", "up")
        ip("-n", space, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            ip("-n", space, "link", "set", interface, "up")

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(30)
        for name in (*POD_NAMES, ""):
            ip("netns", "delete", f"{self.prefix}-{name}".rstrip("-"))

    def start(self, name: str, command: list[str], environ: Mapping[str, str] | None = None) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            inside = ["ip", "netns", "exec", f"{self.prefix}-{name}", *command]
            process = subprocess.Popen(
                inside, env={**os.environ, **(environ or {})}, stdout=log, stderr=log, preexec_fn=die_with_parent()
            )
        self.processes[name] = process

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        inside = ["ip", "netns", "exec", f"{self.prefix}-{name}", *command]
        return subprocess.run(inside, capture_output=True, text=True, check=False)

    def get(self, url: str, *options: str, seen_by: str = "client") -> str | None:
        """The answer's body. None if the address refused, did not answer in time, or answered with an error."""
        done = self.run(
            seen_by, "curl", "--silent", "--fail", "--max-time", "60", "--connect-timeout", "1", *options, url
        )
        return done.stdout if done.returncode == 0 else None

    def apply(self, name: str, template: Resource, policies: Sequence[Resource]) -> None:
        """Closes a pod but for the rules of the policies that select it."""
        self.run(name, "iptables", "-P", "INPUT", "DROP")
        self._accept(name, "-i", "lo")
        self._accept(name, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED")
        ports = template["spec"]["containers"][0].get("ports", ())
        named = {port["name"]: port["containerPort"] for port in ports}
        for rule in (rule for policy in policies if selects(policy, template) for rule in policy["ingress"]):
            is_among_ours = any("podSelector" in peer for peer in rule.get("from", ()))
            sources = [ADDRESSES[each] for each in OURS] if is_among_ours else ["0.0.0.0/0"]
            for port in rule.get("ports", [{"port": 1, "endPort": 65535}]):
                first = named.get(port["port"], port["port"])
                if isinstance(first, int):  # else the pod has no port of this name
                    for source in sources:
                        self._accept(
                            name, "-p", "tcp", "-s", source, "--dport", f"{first}:{port.get('endPort', first)}"
                        )

    def _accept(self, name: str, *rule: str) -> None:
        assert self.run(name, "iptables", "-A", "INPUT", *rule, "-j", "ACCEPT").returncode == 0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def selects(policy: Resource, template: Resource) -> bool:
    selector, labels = policy["podSelector"], template["metadata"]["labels"]
    chosen = all(labels[each["key"]] in each["values"] for each in selector.get("matchExpressions", ()))
    return chosen and bool(selector.get("matchLabels", {}).items() <= labels.items())


def variables(cluster: Cluster, name: str, container: Resource, settings: Mapping[str, str]) -> dict[str, str]:
    """Those of a pod's container, with what it is given on a node."""
    found = dict(settings)
    for each in container["env"]:
        is_address = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == "status.podIP"
        value = each.get("value", ADDRESSES[name] if is_address else "1")
        found[each["name"]] = value.replace("$(LWS_LEADER_ADDRESS)", ADDRESSES["decode"])
    found |= {
        "KVRELAY_REDIS_URL": f"redis://{ADDRESSES['redis']}:6379/0",
        "KVRELAY_KV_MEMORY_BYTES": "64MiB",
        "KVRELAY_LOG_FORMAT": "text",
        "UCX_TLS": "tcp",  # as between nodes: here UCX would copy between the processes
    }
    return {name: value.replace(MOUNTED, str(cluster.directory)) for name, value in found.items()}


def templates(resources: Sequence[Resource]) -> dict[str, Resource]:
    """One pod of each kind that is kvrelay's, by its component."""
    specs = [each["spec"] for each in resources if each["kind"] in ("Deployment", "LeaderWorkerSet")]
    groups = [spec["leaderWorkerTemplate"] for spec in specs if "leaderWorkerTemplate" in spec]
    pods = [spec["template"] for spec in specs if "template" in spec]
    pods += [group[name] for group in groups for name in ("leaderTemplate", "workerTemplate")]
    return {each["metadata"]["labels"][COMPONENT]: each for each in pods}


@pytest.fixture(params=[(), ("ranks",)], ids=["base", "ranks"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """One pod of each kind, ready."""
    resources = compose(*request.param)
    (settings,) = [each["data"] for each in resources if each["kind"] == "ConfigMap"]
    policies = [each["spec"] for each in resources if each["kind"] == "NetworkPolicy"]
    for name, text in (
        ("api_keys", "sk-test"),
        ("redis_password", "pw"),
        ("curve_key", CurveKey.new().secret.decode()),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    made = Cluster(tmp_path)
    try:
        made.start("redis", [redis_executable(), "--requirepass", "pw", "--save", "", "--protected-mode", "no"])
        kvrelay = str(Path(sys.executable).parent / "kvrelay")
        pods = templates(resources)
        for role, template in pods.items():
            (container,) = template["spec"]["containers"]
            made.apply(role, template, policies)
            made.start(role, [kvrelay, *container["args"]], variables(made, role, container, settings))
        for role in pods.keys() - {"decode-rank"}:
            wait_until(lambda role=role: made.get(f"http://{ADDRESSES[role]}:8081/ready"))  # type: ignore[misc]
        yield made
    finally:
        made.close()


def test_blocks_go_over_nixl_through_the_ports_of_the_policy_and_no_others_are_open(cluster: Cluster) -> None:
    api = f"http://{ADDRESSES['router']}:8000"
    keyed = ("-H", "Authorization: Bearer sk-test")
    wait_until(lambda: {"prefill", "decode"} <= ready_roles(json.loads(cluster.get(f"{api}/fleet", *keyed) or "{}")))
    question = {"model": "kvrelay-demo", "prompt": "What is an otter?", "max_tokens": 4}
    body = ("-H", "Content-Type: application/json", "--data", json.dumps(question))
    assert cluster.get(f"{api}/v1/completions", *keyed, *body)
    totals = {each["role"]: each["totals"] for each in json.loads(cluster.get(f"{api}/fleet", *keyed) or "")["workers"]}
    assert totals["decode"]["handoffs_committed"] == 1 and totals["prefill"]["pushed_bytes"] > 0
    assert "come by nixl" in (cluster.directory / "decode.log").read_text()

    for role in cluster.processes.keys() - {"redis", "router"}:
        listens = re.findall(r"(\S+):(\d+) +\S+:\*", cluster.run(role, "ss", "-Hltn").stdout)
        nixl = [(address, int(port)) for address, port in listens if 5570 <= int(port) <= 5585]
        assert [address for address, _ in nixl] == [ADDRESSES[role]]
        for port in [nixl[0][1], *([] if role == "decode-rank" else [5550])]:
            reached = f"http://{ADDRESSES[role]}:{port}"
            assert connects(cluster, reached, "router") and not connects(cluster, reached, "client")


def ready_roles(fleet: Mapping[str, list[Resource]]) -> set[str]:
    return {each["role"] for each in fleet.get("workers", ()) if each["state"] == "ready"}


def connects(cluster: Cluster, url: str, seen_by: str) -> bool:
    """Whether a connection comes about, whatever is said on it."""
    done = cluster.run(seen_by, "curl", "--silent", "--verbose", "--max-time", "2", "--connect-timeout", "1", url)
    return "Connected to" in done.stderr
