"""Kubernetes, as far as it can be tested without a cluster: the manifest, and JAX's detection
against a fake API server.
"""

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import kubernetes.client
import pytest
import yaml
from jax._src.clusters import k8s_cluster
from jobs import DEPLOY

from optimus_jax.cluster.launch_detection import find_launch
from optimus_jax.config import DistributedConfig
from optimus_jax.errors import ConfigError
from optimus_jax.faults.stopping import EXIT_NOT_LEARNING, EXIT_USER_ERROR

NAMESPACE, JOB, JOBSET = "research", "optimus-train-0", "optimus"
POD = {
    "metadata": {
        "name": f"{JOB}-1-abcde",
        "labels": {"job-name": JOB},
        "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": JOB, "uid": "1", "controller": True}
        ],
    },
    "spec": {"containers": []},
}


def documents():
    return list(yaml.safe_load_all((DEPLOY / "jobset.yaml").read_text()))


def test_the_manifest_has_what_jax_detection_needs():
    """JAX takes the pods of one indexed Job as the processes of a run: as many as its
    parallelism.
    """
    by_kind = {document["kind"]: document for document in documents()}
    [replicated] = by_kind["JobSet"]["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert replicated["replicas"] == 1
    assert (job["completionMode"], job["parallelism"], job["backoffLimit"]) == (
        "Indexed",
        job["completions"],
        0,
    )
    account = job["template"]["spec"]["serviceAccountName"]
    assert (
        account
        == by_kind["ServiceAccount"]["metadata"]["name"]
        == by_kind["RoleBinding"]["subjects"][0]["name"]
    )
    assert by_kind["RoleBinding"]["roleRef"]["name"] == by_kind["Role"]["metadata"]["name"]
    allowed = {
        (resource, verb)
        for rule in by_kind["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed >= {("pods", "list"), ("jobs", "get"), ("services", "list")}


def test_user_mistakes_are_not_restarted():
    job_set = documents()[-1]["spec"]
    [rule] = job_set["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) == (
        "FailJob",
        "In",
        [EXIT_USER_ERROR, EXIT_NOT_LEARNING],
    )
    assert (
        rule["onExitCodes"]["containerName"]
        == job_set["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0][
            "name"
        ]
    )
    assert job_set["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


JOB_SET_FIELDS = {
    "failurePolicy": {"maxRestarts", "rules", "restartStrategy"},
    "replicatedJobs": {"name", "groupName", "replicas", "template", "dependsOn"},
    "rules": {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"},
}
"""Fields of JobSet v1alpha2, as far as the manifest has them:
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/.
"""


def unknown_fields(kind, value):
    """Fields of a manifest that Kubernetes does not know, by the classes generated from
    its schema.
    """
    if inner := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        return [name for each in value for name in unknown_fields(inner[1], each)]
    if (model := getattr(kubernetes.client, kind, None)) is None:  # a number, a text, a mapping
        return []
    kinds = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    return [name for name in value if name not in kinds] + [
        each for name in value.keys() & kinds for each in unknown_fields(kinds[name], value[name])
    ]


def test_every_field_of_the_manifest_is_known_to_kubernetes():
    *others, job_set = documents()
    for document in others:
        assert unknown_fields(f"V1{document['kind']}", document) == []
    template = job_set["spec"]["replicatedJobs"][0]["template"]
    assert unknown_fields("V1JobTemplateSpec", template) == []
    container = template["spec"]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    assert unknown_fields("V1JobTemplateSpec", template) == ["volumeMount"]
    assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert job_set["spec"].keys() == {"failurePolicy", "replicatedJobs"}
    assert job_set["spec"]["failurePolicy"].keys() <= JOB_SET_FIELDS["failurePolicy"]
    assert all(
        rule.keys() <= JOB_SET_FIELDS["rules"] for rule in job_set["spec"]["failurePolicy"]["rules"]
    )
    assert all(
        job.keys() <= JOB_SET_FIELDS["replicatedJobs"] for job in job_set["spec"]["replicatedJobs"]
    )


class Api(BaseHTTPRequestHandler):
    """Answers the three requests of JAX's detection."""

    parallelism, refuses = 4, False

    def do_GET(self):
        url = urlsplit(self.path)
        if self.refuses or self.headers["Authorization"].lower() != "bearer a-token":
            return self._answer(403, {"kind": "Status", "reason": "Forbidden"})
        if url.path == f"/api/v1/namespaces/{NAMESPACE}/pods" and parse_qs(url.query)[
            "fieldSelector"
        ] == ["status.podIP=127.0.0.1"]:
            return self._answer(200, {"kind": "PodList", "items": [POD]})
        if url.path == f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{JOB}":
            return self._answer(
                200,
                {
                    "kind": "Job",
                    "metadata": {"name": JOB, "labels": {"jobset.sigs.k8s.io/jobset-name": JOBSET}},
                    "spec": {
                        "parallelism": self.parallelism,
                        "template": {"spec": {"containers": []}},
                    },
                },
            )
        return self._answer(404, {"kind": "Status", "reason": "NotFound"})

    def _answer(self, code, body):
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *arguments):
        pass


@pytest.fixture
def api(tmp_path, monkeypatch):
    """An API server, in the environment of pod 1 of a Job; the class that answers."""
    incluster = pytest.importorskip(
        "kubernetes.config.incluster_config", reason="the package `kubernetes` is not installed"
    )
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here, to make the API server's certificate")
    key, certificate, token = tmp_path / "key.pem", tmp_path / "ca.crt", tmp_path / "token"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=api",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "keyUsage=digitalSignature,keyCertSign",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ],
        check=True,
        capture_output=True,
    )
    token.write_text("a-token")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    handler = type("Handler", (Api,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # The files of every pod, at other paths.
    monkeypatch.setattr(incluster, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster, "SERVICE_CERT_FILENAME", str(certificate))
    cluster = k8s_cluster.K8sCluster
    # JAX caches answers for the life of a process
    for name in ("_pod", "_job", "_headless_svc", "_controller"):
        monkeypatch.setattr(
            cluster, name, classmethod(cache(getattr(cluster, name).__func__.__wrapped__))
        )
    monkeypatch.setattr(cluster, "_namespace", classmethod(lambda cls: NAMESPACE))
    for name, value in {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.server_address[1]),
        "HOSTNAME": "localhost",
        "JOB_COMPLETION_INDEX": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert socket.gethostbyname("localhost") == "127.0.0.1"
    yield handler
    server.shutdown()
    server.server_close()


def test_a_pod_finds_the_others_of_its_job(api):
    launch = find_launch(DistributedConfig())
    assert (launch.launcher, launch.num_processes, launch.process_id) == ("Kubernetes", 4, 1)
    assert launch.coordinator == f"{JOB}-0.{JOBSET}:55527"
    assert launch.local_devices is None


def test_the_only_pod_of_a_job_is_a_single_process(api):
    api.parallelism = 1
    assert find_launch(DistributedConfig()).is_alone


def test_a_service_account_without_permission_is_reported(api):
    api.refuses = True
    with pytest.raises(
        ConfigError, match=r"Kubernetes has started this process, and does not say(.|\n)*permission"
    ):
        find_launch(DistributedConfig())
