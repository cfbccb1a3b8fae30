"""Renders what kvdock is deployed with, and has each file checked by the tool of its kind (`make deploy-check`).

It runs with the tools of .venv-deploy. A tool that is missing is named and left out; with KVDOCK_NO_SKIPS=1 that is a
failure. Rendered files stay in build/deploy/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-not-found]  # .venv-deploy has it
import yaml  # type: ignore[import-untyped]  # it ships no types

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build/deploy"
CHART = "charts/kvdock"
EVERYTHING = (
    "disk.enabled=true", "podMonitor.enabled=true", "podMonitor.labels.release=prometheus",
    "prometheusRule.enabled=true", "prometheusRule.labels.release=prometheus", "engine.enabled=true",
    "engine.modelsClaim=models", "engine.tokenSecret=hub", "engine.args={--max-model-len=8192}",
    "priorityClassName=system-node-critical", "imagePullSecrets[0].name=registry", "podAnnotations.team=serving",
    "tolerations[0].operator=Exists", "settings.growth=ahead", "settings.drain_s=7.5", "settings.table_records=262144",
)
RENDERINGS: dict[str, Sequence[str]] = {
    "default": (), "everything": EVERYTHING,
    "least": ("makeFolders=false", "networkPolicy.enabled=false", "access.existingSecret=tokens"),
}
"""The values with which the chart is rendered, by the name of the file."""
REFUSED = {
    "pool_byts": "settings.pool_byts=1GiB", "a setting that the chart sets itself": "settings.socket_path=/s",
    "root": "user=0", "no digest": "image.digest=latest", "an unknown value": "podMonitors.enabled=true",
}
VERSIONS = ("1.27.0", "1.37.0")
"""The oldest Kubernetes that the chart takes, and the newest whose schemas are here."""
MONITORING = "monitoring.coreos.com/v1"


class Failed(Exception):
    pass


def run(*command: str, may_fail: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise Failed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done


def rendered(*values: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    sets = [word for value in values for word in ("--set", value)]
    return run("helm", "template", "kvdock", CHART, "--namespace", "kvdock", *sets, may_fail=may_fail)


def documents(path: Path) -> Iterator[dict[str, Any]]:
    yield from (one for one in yaml.safe_load_all(path.read_text()) if one is not None)


def chart() -> str:
    run("helm", "lint", "--strict", "--quiet", CHART)
    for name, values in RENDERINGS.items():
        (OUT / f"{name}.yaml").write_text(rendered(*values).stdout)
    taken = [why for why, value in REFUSED.items() if rendered(value, may_fail=True).returncode == 0]
    if taken:
        raise Failed(f"values.schema.json lets pass: {', '.join(taken)}")
    return f"{len(RENDERINGS)} renderings, and {len(REFUSED)} wrong values refused"


def kubernetes() -> str:
    count = 0
    for path in (*sorted(OUT.glob("*.yaml")), ROOT / "docs/examples/kvdock-daemonset.yaml"):
        for one in documents(path):
            count += one["apiVersion"] != MONITORING
            for version in VERSIONS if one["apiVersion"] != MONITORING else ():
                try:
                    kubernetes_validate.validate(one, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    raise Failed(f"{path}: {one['kind']} under Kubernetes {version}: {error}") from error
    return f"{count} objects, for each of Kubernetes {' and '.join(VERSIONS)}"


def operators_objects() -> str:
    """The models of the Prometheus operator take any field, and drop those that they do not know."""
    # It takes some seconds.
    from cloudcoil.models.prometheus_operator import v1  # type: ignore[import-not-found]  # .venv-deploy has it

    found = [one for one in documents(OUT / "everything.yaml") if one["apiVersion"] == MONITORING]
    if {one["kind"] for one in found} != {"PodMonitor", "PrometheusRule"}:
        raise Failed(f"{OUT}/everything.yaml: found {[one['kind'] for one in found]}")
    for one in found:
        kept = getattr(v1, one["kind"]).model_validate(one).model_dump(mode="json", by_alias=True, exclude_unset=True)
        if kept != one:
            raise Failed(f"{one['kind']}: the operator knows {kept}\nand the chart has {one}")
    rule, = (one for one in found if one["kind"] == "PrometheusRule")
    if rule["spec"] != yaml.safe_load((ROOT / "examples/monitoring/alerts.yml").read_text()):
        raise Failed("the chart's alerts are not those of examples/monitoring/alerts.yml")
    return "PodMonitor and PrometheusRule, with the alerts of examples/monitoring"


def alerts() -> str:
    return run("promtool", "check", "rules", "examples/monitoring/alerts.yml").stdout.split(":", 1)[1].strip()


def dockerfiles() -> str:
    run("hadolint", "--no-color", "Dockerfile", "examples/vllm.Dockerfile")
    return "both clean"


def compose() -> str:
    run("docker-compose", "-f", "examples/compose.yaml", "config", "--quiet", VLLM_DIGEST=f"sha256:{'0' * 64}")
    return "examples/compose.yaml"


def workflows() -> str:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github/workflows").glob("*.yml"))
    run("actionlint", "-no-color", *files)
    run("zizmor", "--offline", "--quiet", "--no-progress", "--config", ".github/zizmor.yml", *files)
    return f"{len(files)} files"


def forms() -> str:
    issues = sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    run("check-jsonschema", "--builtin-schema", "vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml")
    issues.remove(".github/ISSUE_TEMPLATE/config.yml")
    run("check-jsonschema", "--builtin-schema", "vendor.github-issue-forms", *issues)
    run("check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")
    return f"{len(issues)} issue forms, dependabot"


CHECKS = (
    ("chart", "helm", chart), ("Kubernetes objects", "", kubernetes), ("operator's objects", "", operators_objects),
    ("alerts", "promtool", alerts), ("Dockerfiles", "hadolint", dockerfiles), ("Compose", "docker-compose", compose),
    ("workflows", "actionlint", workflows), ("forms", "check-jsonschema", forms),
)


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    failed = 0
    for name, tool, check in CHECKS:
        if tool and shutil.which(tool) is None:
            failed += os.environ.get("KVDOCK_NO_SKIPS") == "1"
            print(f"{name}: not checked, as there is no {tool} here")
            continue
        try:
            print(f"{name}: {check()}", flush=True)
        except Failed as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
