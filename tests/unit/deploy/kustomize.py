"""As much of kustomize as deploy/kubernetes uses: resources, JSON patches by kind and name, deletions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]
KNOWN_KEYS = {"apiVersion", "kind", "resources", "patches"}


def render(directory: Path) -> list[Resource]:
    """The resources of a kustomization. Raises AssertionError for what this does not know."""
    kustomization = _read(directory / "kustomization.yaml")[0]
    assert set(kustomization) <= KNOWN_KEYS, f"{directory}: {set(kustomization) - KNOWN_KEYS} is not known here"
    found: list[Resource] = []
    for name in kustomization["resources"]:
        path = (directory / name).resolve()
        found += render(path) if path.is_dir() else _read(path)
    for patch in kustomization.get("patches", ()):
        content = yaml.safe_load(patch["patch"] if "patch" in patch else (directory / patch["path"]).read_text())
        if isinstance(content, dict):
            assert content.pop("$patch") == "delete", "only deletions are known as merge patches"
            wanted = (content["kind"], content["metadata"]["name"])
            assert any(key(each) == wanted for each in found), f"{directory}: no {wanted} to delete"
            found = [each for each in found if key(each) != wanted]
            continue
        targets = [each for each in found if key(each) == (patch["target"]["kind"], patch["target"]["name"])]
        assert targets, f"{directory}: a patch without a target: {patch['target']}"
        for target in targets:
            for operation in content:
                _apply(target, operation)
    return found


def key(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def _read(path: Path) -> list[Resource]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def _apply(target: Any, operation: dict[str, Any]) -> None:
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    match operation["op"]:
        case "add" if isinstance(target, list):
            target.append(operation["value"]) if last == "-" else target.insert(int(last), operation["value"])
        case "add":
            target[last] = operation["value"]
        case "replace":
            index = int(last) if isinstance(target, list) else last
            assert target[index] is not None
            target[index] = operation["value"]
        case "remove":
            del target[last]
        case other:
            raise AssertionError(f"{other} is not known here")
