"""What Kustomize renders is valid, fits together, and fits the server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import kubernetes_validate
import pytest
import yaml
from fastapi.routing import APIRoute

from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.config.server_config import ServerConfig
from octavo.server.cli import resolve
from octavo.server.context import Context
from octavo.server.launch import CLOSE_TIMEOUT_S, FLUSH_TIMEOUT_S
from octavo.server.routes_ops import ops_router

Document = dict[str, Any]
OVERLAYS = ["cpu", "gpu"]
OLDEST_KUBERNETES = "1.30"
CUSTOM = {
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("keda.sh/v1alpha1", "ScaledObject"),
}
KINDS = [
    *("ConfigMap", "ConfigMap", "Deployment", "NetworkPolicy", "PersistentVolumeClaim"),
    *("PodDisruptionBudget", "PodMonitor", "PrometheusRule", "ScaledObject", "Service"),
]
DURATION = re.compile(r"(\d+)s")


class Overlay:
    """The documents of one overlay, by kind."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.deployment = self.of("Deployment")
        self.pod: Document = self.deployment["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]

    def of(self, kind: str) -> Document:
        (found,) = [document for document in self.documents if document["kind"] == kind]
        return found

    def data(self, kind: str) -> dict[str, Document]:
        return {d["metadata"]["name"]: d for d in self.documents if d["kind"] == kind}

    @property
    def pod_labels(self) -> dict[str, str]:
        return dict(self.deployment["spec"]["template"]["metadata"]["labels"])

    @property
    def mounts(self) -> dict[str, Document]:
        """Path to volume."""
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        return {m["mountPath"]: volumes[m["name"]] for m in self.container["volumeMounts"]}

    def options(self, folder: Path) -> tuple[EngineConfig, ServerConfig]:
        """What the container's arguments mean, with the file that they name."""
        name = self.mounts["/etc/octavo"]["configMap"]["name"]
        path = folder / "options.yaml"
        path.write_text(self.data("ConfigMap")[name]["data"]["options.yaml"])
        args = [
            arg.replace("/etc/octavo/options.yaml", str(path)) for arg in self.container["args"]
        ]
        return resolve(args)


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, rendered: Callable[[str], list[Document]]) -> Overlay:
    return Overlay(rendered(request.param))


@pytest.fixture(scope="module")
def gets() -> set[str]:
    """Paths of the operators' GET routes."""
    routes = [r for r in ops_router(cast(Context, None)).routes if isinstance(r, APIRoute)]
    return {route.path for route in routes if "GET" in (route.methods or ())}


def test_there_is_a_test_for_every_overlay(deploy: Path) -> None:
    assert sorted(path.name for path in (deploy / "overlays").iterdir()) == OVERLAYS


def test_every_document_is_valid(overlay: Overlay) -> None:
    assert sorted(document["kind"] for document in overlay.documents) == KINDS
    for document in overlay.documents:
        if (document["apiVersion"], document["kind"]) in CUSTOM:
            _CHECKS[document["kind"]](document)
        else:
            _validate(document)


def test_the_pod_that_fills_the_volume_is_valid(deploy: Path) -> None:
    pod = yaml.safe_load((deploy / "fill-models.yaml").read_text())
    _validate(pod)
    volume = yaml.safe_load((deploy / "base" / "model-volume.yaml").read_text())
    claim = pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == volume["metadata"]["name"]


def _validate(document: Document) -> None:
    for version in (OLDEST_KUBERNETES, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(document, version, strict=True)


def test_validation_refuses_what_kubernetes_would(overlay: Overlay) -> None:
    wrong = {**overlay.deployment, "spec": {**overlay.deployment["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        _validate(wrong)


# Custom resources: required fields, and no field that is not known here.


def _check_pod_monitor(document: Document) -> None:
    spec = document["spec"]
    assert set(spec) == {"jobLabel", "selector", "podMetricsEndpoints"}
    assert spec["selector"]["matchLabels"]
    for endpoint in spec["podMetricsEndpoints"]:
        assert set(endpoint) == {"port", "path", "interval", "scrapeTimeout"}
        assert isinstance(endpoint["port"], str)
        assert _seconds(endpoint["scrapeTimeout"]) <= _seconds(endpoint["interval"])


def _check_prometheus_rule(document: Document) -> None:
    assert set(document["spec"]) == {"groups"}
    for group in document["spec"]["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert {"alert", "expr", "labels", "annotations"} <= set(rule)
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert all(isinstance(v, str) for v in (*rule["labels"].values(), rule["expr"]))


def _check_scaled_object(document: Document) -> None:
    spec = document["spec"]
    assert set(spec["scaleTargetRef"]) == {"name"}
    assert 0 < spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
    assert spec["fallback"]["failureThreshold"] > 0
    assert len({trigger["name"] for trigger in spec["triggers"]}) == len(spec["triggers"])
    for trigger in spec["triggers"]:
        assert trigger["type"] == "prometheus"
        assert trigger["metricType"] in ("AverageValue", "Value")
        assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
        assert float(trigger["metadata"]["threshold"]) > 0
    # The fallback is defined for averages alone.
    assert "AverageValue" in [trigger["metricType"] for trigger in spec["triggers"]]


_CHECKS: dict[str, Callable[[Document], None]] = {
    "PodMonitor": _check_pod_monitor,
    "PrometheusRule": _check_prometheus_rule,
    "ScaledObject": _check_scaled_object,
}


def _seconds(text: str) -> int:
    found = DURATION.fullmatch(text)
    assert found is not None, text
    return int(found[1])


# How they fit together.


def test_everything_means_the_same_pods(overlay: Overlay) -> None:
    spec = {kind: overlay.of(kind)["spec"] for kind in set(KINDS) - {"ConfigMap"}}
    selectors = [
        spec["Deployment"]["selector"]["matchLabels"],
        spec["Deployment"]["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"][
            "matchLabels"
        ],
        spec["Service"]["selector"],
        spec["PodDisruptionBudget"]["selector"]["matchLabels"],
        spec["NetworkPolicy"]["podSelector"]["matchLabels"],
        spec["PodMonitor"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= overlay.pod_labels.items() for selector in selectors)
    assert all(selectors)
    assert spec["ScaledObject"]["scaleTargetRef"]["name"] == overlay.deployment["metadata"]["name"]
    assert overlay.pod_labels[spec["PodMonitor"]["jobLabel"]] == "octavo"


def test_ports_are_named_after_the_containers(overlay: Overlay, root_port: int) -> None:
    (port,) = overlay.container["ports"]
    assert port["containerPort"] == root_port
    named = [
        overlay.of("Service")["spec"]["ports"][0]["targetPort"],
        overlay.of("NetworkPolicy")["spec"]["ingress"][0]["ports"][0]["port"],
        overlay.of("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"],
        *(probe["httpGet"]["port"] for probe in _probes(overlay)),
    ]
    assert set(named) == {port["name"]}


@pytest.fixture(scope="module")
def root_port(deploy: Path) -> int:
    """The port that the image exposes."""
    found = re.search(r"^EXPOSE (\d+)$", (deploy.parent / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_volumes_exist_and_are_mounted(overlay: Overlay) -> None:
    mounted = [mount["name"] for mount in overlay.container["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in overlay.pod["volumes"])
    claim = overlay.mounts["/models"]["persistentVolumeClaim"]["claimName"]
    assert claim in overlay.data("PersistentVolumeClaim")
    assert overlay.mounts["/etc/octavo"]["configMap"]["name"] in overlay.data("ConfigMap")


def test_the_autoscaler_asks_for_its_own_namespace(overlay: Overlay) -> None:
    scaled = overlay.of("ScaledObject")
    wanted = f'namespace="{scaled["metadata"]["namespace"]}"'
    assert all(wanted in t["metadata"]["query"] for t in scaled["spec"]["triggers"])
    assert len({document["metadata"]["namespace"] for document in overlay.documents}) == 1


# How they fit the server.


def _probes(overlay: Overlay) -> list[Document]:
    return [overlay.container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]


def test_probes_and_scrapes_ask_real_routes(overlay: Overlay, gets: set[str]) -> None:
    paths = [probe["httpGet"]["path"] for probe in _probes(overlay)]
    assert paths == ["/startup", "/ready", "/health"]
    scraped = overlay.of("PodMonitor")["spec"]["podMetricsEndpoints"][0]["path"]
    assert {*paths, scraped} <= gets


def test_arguments_and_options_are_real(overlay: Overlay, tmp_path: Path) -> None:
    engine, server = overlay.options(tmp_path)
    model = engine.model.model
    assert model is not None
    assert model.startswith("/models/")
    assert server.served_model_name
    assert server.port == 8000
    is_gpu = "nvidia.com/gpu" in overlay.container["resources"]["limits"]
    assert engine.execution.device == ("cuda" if is_gpu else "cpu")


def test_the_grace_period_is_longer_than_the_server_needs(overlay: Overlay, tmp_path: Path) -> None:
    _, server = overlay.options(tmp_path)
    # The server itself waits until gateways have noticed.
    assert "lifecycle" not in overlay.container
    assert server.drain_delay > 0
    assert server.shutdown_timeout > 0
    needed = server.drain_delay + server.shutdown_timeout + CLOSE_TIMEOUT_S + FLUSH_TIMEOUT_S
    assert needed <= overlay.pod["terminationGracePeriodSeconds"]


def test_gateways_notice_within_the_delay(overlay: Overlay, tmp_path: Path) -> None:
    """One failed readiness probe is enough, and the next one comes before anything is refused."""
    _, server = overlay.options(tmp_path)
    probe = overlay.container["readinessProbe"]
    assert probe["failureThreshold"] == 1
    assert 2 * probe["periodSeconds"] < server.drain_delay


def test_memory_is_limited_and_holds_the_cache(overlay: Overlay, tmp_path: Path) -> None:
    engine, _ = overlay.options(tmp_path)
    resources = overlay.container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert resources["requests"]["cpu"]
    limit = int(resources["limits"]["memory"].removesuffix("Gi")) << 30
    assert limit >= 2 * (engine.cache.kv_cache_memory_bytes or 0)


def test_the_pod_is_restricted(overlay: Overlay) -> None:
    """The Pod Security Standard "restricted", any uid, and a root file system that nobody writes to."""
    assert overlay.pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert overlay.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert overlay.pod["automountServiceAccountToken"] is False
    assert overlay.pod["enableServiceLinks"] is False


def test_every_folder_that_is_written_to_is_an_empty_volume(overlay: Overlay, deploy: Path) -> None:
    """The image's environment and the pod's name them; sockets and temporary files are in /tmp."""
    of_image = dict(
        re.findall(r"^\s+(?:ENV )?(\w+)=(/\S+?)(?: \\)?$", _last_stage(deploy), re.MULTILINE)
    )
    of_pod = {entry["name"]: entry.get("value", "") for entry in overlay.container["env"]}
    merged = {"TMPDIR": "/tmp", **of_image, **of_pod}
    assert {"HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"} <= set(merged)
    writable = [path for path, volume in overlay.mounts.items() if "emptyDir" in volume]
    for name, value in merged.items():
        if value.startswith("/"):
            assert any(f"{value}/".startswith(f"{path}/") for path in writable), name
    assert all("sizeLimit" in overlay.mounts[path]["emptyDir"] for path in writable)


def _last_stage(deploy: Path) -> str:
    return (deploy.parent / "Dockerfile").read_text().rpartition("\nFROM ")[2]


def test_nothing_is_downloaded_and_nothing_goes_out(overlay: Overlay) -> None:
    values = {entry["name"]: entry.get("value") for entry in overlay.container["env"]}
    assert values["HF_HUB_OFFLINE"] == "1"
    policy = overlay.of("NetworkPolicy")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["egress"] == []


def test_the_key_is_a_secret_that_has_to_exist(overlay: Overlay) -> None:
    (entry,) = [one for one in overlay.container["env"] if one["name"] == "OCTAVO_API_KEY"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "octavo-api-key", "key": "key"}
    assert not any("api-key" in argument for argument in overlay.container["args"])
