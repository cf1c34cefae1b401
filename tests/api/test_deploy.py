"""What is under deploy/: metrics, paths and settings that it names are those of the server."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import check_jsonschema
import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml

from penstock.config import ServeConfig, mistakes_in

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())
MANIFEST: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
COMPOSE_SCHEMA = Path(check_jsonschema.__file__).with_name("builtin_schemas") / (
    "vendor/compose-spec.json"
)
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))
_NAME = re.compile(r"penstock:[a-z0-9_]+")


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]


def exposed(text: str) -> tuple[set[str], set[str]]:
    """Names of series, and of labels."""
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        names |= (
            {name + end for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
        )
    return names, set(re.findall(r'[{,](\w+)="', text))


@pytest.mark.slow
def test_dashboard_and_rules_name_metrics_that_exist(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "one two three", "max_tokens": 30})
    names, labels = exposed(http.get("/metrics").text)
    labels |= {"reason"}  # Nothing has been refused.
    used = {name for text in expressions() for name in _NAME.findall(text)}
    assert len(used) > 20
    assert not used - names
    grouped = {
        label.strip()
        for text in expressions()
        for group in re.findall(r"by \(([^)]*)\)", text)
        for label in group.split(",")
    }
    assert not grouped - labels
    wrong = exposed("# TYPE penstock:other gauge\n")[0]
    assert used - wrong, "the comparison can fail"


def test_the_dashboard_can_be_imported() -> None:
    """As Grafana reads it: panels with ids and places of their own, data sources by variable."""
    panels = DASHBOARD["panels"]
    assert len({p["id"] for p in panels}) == len({str(p["gridPos"]) for p in panels}) == len(panels)
    assert all(p["datasource"]["uid"] == "${datasource}" for p in panels)
    assert {v["name"] for v in DASHBOARD["templating"]["list"]} == {"datasource", "model"}
    assert all(target["refId"] for p in panels for target in p["targets"])


def test_alerts_say_what_is_wrong() -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts)


@pytest.mark.slow
def test_the_manifests_settings_and_probes(http: httpx.Client) -> None:
    config, _, deployment, service = MANIFEST
    settings = yaml.safe_load(config["data"]["serve.yaml"])
    settings["engine"]["target"] = "bundled"
    assert mistakes_in(ServeConfig, settings) == []
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert http.get(container[probe]["httpGet"]["path"]).status_code == 200
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    assert (
        pod["terminationGracePeriodSeconds"] > ServeConfig.model_fields["shutdown_grace_s"].default
    )
    assert pod["enableServiceLinks"] is False, "else PENSTOCK_PORT is an address"
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_kubernetes_takes_the_manifest() -> None:
    for document in MANIFEST:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    wrong = deepcopy(MANIFEST[2])
    wrong["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["failures"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="'failures' was unexpected"):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_the_manifest_waits_for_a_download_into_its_volume() -> None:
    _, claim, deployment, _ = MANIFEST
    spec = deployment["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    probe = container["startupProbe"]
    waits_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert 3600 <= waits_s < spec["progressDeadlineSeconds"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    cache = mounts[environment["XDG_CACHE_HOME"]]
    claims = {
        v["name"]: v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["volumes"]
    }
    assert claims[cache["name"]] == claim["metadata"]["name"]
    assert not cache.get("readOnly")
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    assert spec["strategy"]["type"] == "Recreate", "two pods may be on two nodes"


def test_compose_takes_the_file() -> None:
    judge = jsonschema.Draft202012Validator(json.loads(COMPOSE_SCHEMA.read_text()))
    judge.validate(COMPOSE)
    assert not judge.is_valid(COMPOSE | {"services": {"penstock": {"volume": ["cache:/cache"]}}})
    declared = {"volumes": set(COMPOSE["volumes"]), "configs": set(COMPOSE["configs"])}
    used: dict[str, set[str]] = {"volumes": set(), "configs": set()}
    for service in COMPOSE["services"].values():
        used["volumes"] |= {volume.partition(":")[0] for volume in service.get("volumes", ())}
        used["configs"] |= {config["source"] for config in service.get("configs", ())}
    assert used == declared
    assert all(
        (DEPLOY / config["file"]).exists()
        for config in COMPOSE["configs"].values()
        if "file" in config
    )


def test_compose_serves_from_its_volume_and_shows_what_it_scrapes() -> None:
    services, configs = COMPOSE["services"], COMPOSE["configs"]
    penstock = services["penstock"]
    assert penstock["image"] == f"penstock:{PROJECT['version']}"
    volume = penstock["volumes"][0].partition(":")[2]
    assert f"XDG_CACHE_HOME={volume}\n" in (DEPLOY / "Dockerfile").read_text()
    assert f"install -d -o penstock {volume}\n" in (DEPLOY / "Dockerfile").read_text()
    told = {
        name: yaml.safe_load(config["content"])
        for name, config in configs.items()
        if "content" in config
    }
    (scraped,) = told["prometheus"]["scrape_configs"]
    port = penstock["ports"][0].rpartition(":")[2]
    assert scraped["static_configs"] == [{"targets": [f"penstock:{port}"]}]
    assert told["datasources"]["datasources"][0]["url"] == "http://prometheus:9090"
    mounted = {
        config["source"]: Path(config["target"])
        for service in services.values()
        for config in service.get("configs", ())
    }
    assert told["prometheus"]["rule_files"] == [mounted["rules"].name]
    assert mounted["rules"].parent == mounted["prometheus"].parent
    provider = told["dashboards"]["providers"][0]
    assert provider["options"]["path"] == str(mounted["dashboard"].parent)


def test_the_image_of_vllm_is_the_newest_that_is_taken() -> None:
    (needed,) = PROJECT["optional-dependencies"]["vllm"]
    end = int(re.fullmatch(r"vllm>=0\.\d+,<0\.(\d+)", needed).group(1))  # type: ignore[union-attr]
    assert f"\nARG VLLM=v0.{end - 1}." in (DEPLOY / "Dockerfile.vllm").read_text()


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint for this system")
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_hadolint_takes_the_container_files(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / name).read_text()
    for content, code in ((text, 0), (text.replace("ENTRYPOINT", "ENTERPOINT"), 1)):
        (tmp_path / "Dockerfile").write_text(content)
        done = subprocess.run(
            [str(HADOLINT), str(tmp_path / "Dockerfile")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_what_the_container_files_copy_and_install_exists(name: str) -> None:
    text = (DEPLOY / name).read_text()
    extras = (DEPLOY.parent / "pyproject.toml").read_text()
    for extra in re.search(r"\[(\w+,\w+)\]\"", text).group(1).split(","):  # type: ignore[union-attr]
        assert f"\n{extra} = [" in extras
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE):
        assert (DEPLOY.parent / source).exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "penstock.service").read_text()
    text = text.replace("/opt/penstock/bin/penstock", sys.executable)
    unit = tmp_path / "penstock.service"
    for content, is_right in ((text, True), (text.replace("Type=exec", "Tipe=exec"), False)):
        unit.write_text(content)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ("penstock.service" not in done.stderr) is is_right, done.stderr
