"""What deploy/kubernetes renders to, by kubectl's Kustomize."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

Resource = dict[str, Any]

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
KUBECTL = shutil.which("kubectl")
NEEDS_KUBECTL = pytest.mark.skipif(KUBECTL is None, reason="kubectl, which renders the files, is not installed")


@cache
def render(directory: Path) -> list[Resource]:
    """The resources of a kustomization. Not to be changed."""
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", directory], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def compose(*components: str) -> list[Resource]:
    """The resources of the base with these components. Not to be changed."""
    with TemporaryDirectory() as name:
        directory = Path(name).resolve()
        root = os.path.relpath(KUBERNETES, directory)  # Kustomize takes no absolute paths
        overlay = {
            "resources": [f"{root}/base"],
            "components": [f"{root}/components/{each}" for each in components],
        }
        (directory / "kustomization.yaml").write_text(json.dumps(overlay))
        return render(directory)


def key(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]
