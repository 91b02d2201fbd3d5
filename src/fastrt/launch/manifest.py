"""Manifests of a job for Kubernetes: a Secret, a headless Service and an indexed Job. Pure: no I/O, no clock.

Every string is written between quotes with all special characters escaped, so no name or argument can become another
part of the document. Kubernetes expands `$(NAME)` in commands, so each `$` of a command is doubled.

Source: the reference of Kubernetes' API, `batch/v1 Job` and `core/v1 Pod`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastrt.errors import ConfigError

NODES_MAX = 10_000
_NAME_MAX = 50  # of at most 63 characters, of which "-INDEX" and the suffix of a pod's name need some
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_RESOURCE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)
_END_S = 30  # after the grace, until Kubernetes kills the pod
_START_TRIES, _START_EVERY_S, _READY_EVERY_S = 60, 5, 30
_IS_UP = ["fastrt", "status", "--check"]
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # keys that YAML takes for values
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


@dataclass(frozen=True)
class ManifestOptions:
    """The options of `fastrt manifest`.

    Attributes:
        name: of the Job, the Service and the Secret.
        nodes: pods of the job.
        image: of the container, which has fastrt and the program.
        words: arguments of `fastrt run`.
        token: of the job's cluster.
        namespace: empty: that of kubectl.
        cpu, memory: of each pod, as Kubernetes' quantities; empty: not limited.
        gpus: of each pod; 0: none.
        gpu_resource: the name under which the cluster offers them.
        shm: size of `/dev/shm`, which counts as memory of the pod; empty: half of the memory, or not limited.
        grace_s: as for `fastrt run`.
        pull_secret: name of a Secret with which the image is pulled; empty: none.
    """

    name: str
    nodes: int
    image: str
    words: Sequence[str]
    token: str = field(repr=False)
    namespace: str = ""
    cpu: str = ""
    memory: str = ""
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: str = ""
    grace_s: float = 30.0
    pull_secret: str = ""

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: one cannot be used in a manifest; the message says which.
        """
        if len(self.name) > _NAME_MAX or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name is {self.name!r}; it must have 1 to {_NAME_MAX} of a-z, 0-9 and -, begin with a letter, and "
                "not end with -"
            )
        if not 1 <= self.nodes <= NODES_MAX:
            raise ConfigError(f"--nodes is {self.nodes}; it must be from 1 to {NODES_MAX}")
        if not self.image or not self.image.isprintable() or " " in self.image:
            raise ConfigError(f"--image is {self.image!r}; it must be the name of an image")
        for option in ("cpu", "memory", "shm"):
            value = getattr(self, option)
            if value and not _QUANTITY.fullmatch(value):
                raise ConfigError(f"--{option} is {value!r}; give a quantity of Kubernetes, such as 4 or 8Gi")
        if not _RESOURCE.fullmatch(self.gpu_resource):
            raise ConfigError(f"--gpu-resource is {self.gpu_resource!r}; give a name such as nvidia.com/gpu")
        for option in ("namespace", "pull_secret"):
            value = getattr(self, option)
            if value and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", value):
                raise ConfigError(f"--{option.replace('_', '-')} is {value!r}; it must be a name of Kubernetes")
        for word in self.words:
            if not all(ch.isprintable() or ch in "\n\t" for ch in word):
                raise ConfigError(f"the argument {word!r} has characters that cannot be written into a manifest")


def name_of(program: str, suffix: str) -> str:
    """Make a name for the job of a program.

    Args:
        program: path of a file, or name of a module.
        suffix: distinguishes jobs of the same program.
    """
    stem = re.sub(r"\.py\Z", "", program.rpartition("/")[2].lower())
    words = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")
    words = words if words[:1].isalpha() else f"job-{words}"
    return f"{words[: _NAME_MAX - 1 - len(suffix)].strip('-')}-{suffix}"


def objects(options: ManifestOptions) -> list[dict[str, Any]]:
    """Return the objects of a job: its Secret, Service and Job.

    Raises:
        ConfigError: an option cannot be used.
    """
    options.check()
    labels = {"app.kubernetes.io/name": options.name, "app.kubernetes.io/managed-by": "fastrt"}
    about: dict[str, Any] = {"name": options.name, "labels": labels}
    if options.namespace:
        about["namespace"] = options.namespace
    secret = {"type": "Opaque", "immutable": True, "stringData": {"token": options.token}}
    # Names of pods resolve before the pods are ready: their nodes meet before that.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    job = {
        "completions": options.nodes,
        "parallelism": options.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a failed program fails the Job
        # A pod that is evicted is replaced: its node joins again under the same name.
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"metadata": {"labels": labels}, "spec": _pod(options)},
    }
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": about, **secret},
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": job},
    ]


def _pod(options: ManifestOptions) -> dict[str, Any]:
    token = {"secretKeyRef": {"name": options.name, "key": "token"}}
    words = ["fastrt", "run", "--grace", f"{options.grace_s:g}", *options.words]
    shared: dict[str, Any] = {"medium": "Memory"}
    shm = options.shm or _half(options.memory)
    if shm:
        shared["sizeLimit"] = shm
    container: dict[str, Any] = {
        "name": "fastrt",
        "image": options.image,
        "command": [word.replace("$", "$$") for word in words],
        "env": [
            {"name": "FASTRT_SIZE", "value": str(options.nodes)},
            {"name": "FASTRT_SERVICE", "value": options.name},
            {"name": "FASTRT_TOKEN", "valueFrom": token},
        ],
        "startupProbe": _probe(_START_EVERY_S, _START_TRIES),
        "readinessProbe": _probe(_READY_EVERY_S, 3),
        # Reaches `fastrt run` also where the image puts another process before it, which may keep SIGTERM to itself.
        "lifecycle": {"preStop": {"exec": {"command": ["fastrt", "stop", "--all"]}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    wanted = {"cpu": options.cpu, "memory": options.memory}
    amounts: dict[str, str] = {name: amount for name, amount in wanted.items() if amount}
    if options.gpus:
        amounts[options.gpu_resource] = str(options.gpus)
    if amounts:
        container["resources"] = {"requests": amounts, "limits": amounts}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": options.name,
        "terminationGracePeriodSeconds": round(options.grace_s) + _END_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": shared}],
    }
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": options.pull_secret}]
    return spec


def _probe(every_s: int, tries: int) -> dict[str, Any]:
    return {"exec": {"command": _IS_UP}, "periodSeconds": every_s, "timeoutSeconds": 20, "failureThreshold": tries}


def _half(memory: str) -> str:
    """Half of a whole quantity, in the unit below it; empty where it has none."""
    found = re.fullmatch(r"([0-9]+)(Ki|Mi|Gi|Ti)", memory)
    if found is None:
        return ""
    below = {"Ki": "", "Mi": "Ki", "Gi": "Mi", "Ti": "Gi"}[found[2]]
    return f"{int(found[1]) * 512}{below}"


def to_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Write objects as YAML documents, which are valid YAML 1.1 and 1.2.

    Args:
        documents: of dictionaries, lists, strings, whole numbers and truth values.
    """
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> list[str]:
    """The lines of a dictionary or list that is not empty."""
    items = [(f"{_key(key)}:", one) for key, one in value.items()] if isinstance(value, Mapping) else None
    lines = []
    for head, one in items if items is not None else [("-", one) for one in value]:
        if not isinstance(one, (Mapping, list)):
            lines.append(f"{head} {_scalar(one)}")
        elif head == "-":
            first, *rest = _lines(one)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        else:
            lines += [head, *(f"  {line}" for line in _lines(one))]
    return lines


def _key(text: str) -> str:
    return text if text.isascii() and text.isidentifier() and text.lower() not in _WORDS else _scalar(text)


def _scalar(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return '"' + "".join(_ESCAPES.get(ch) or (ch if " " <= ch <= "~" else f"\\U{ord(ch):08X}") for ch in value) + '"'
