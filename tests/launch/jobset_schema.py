"""What `examples/launch/jobset.yaml` may and must say: the part of Kubernetes' and JobSet's schemas that it uses.

Field names are those of core/v1, batch/v1 and jobset.x-k8s.io/v1alpha2. Anything else is refused, as `kubectl apply`
with strict validation would: a field that is spelt wrong is a field that does nothing.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT: Schema = {"type": "string", "minLength": 1}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(m|Ki|Mi|Gi|Ti)?$"}
COUNT: Schema = {"type": "integer", "minimum": 1}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def record(required: str = "", **fields: Schema) -> Schema:
    return {
        "type": "object", "properties": fields, "required": required.split(), "additionalProperties": False
    }  # fmt: skip


def each(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


ENVIRONMENT = record(
    "name",
    name=TEXT,
    value={"type": "string"},  # numbers have to be quoted
    valueFrom=record(
        secretKeyRef=record("name key", name=NAME, key=TEXT), fieldRef=record("fieldPath", fieldPath=TEXT)
    ),
)
CONTAINER = record(
    "name image command args env resources volumeMounts",
    name=NAME,
    image=TEXT,
    command=each(TEXT),
    args=each(TEXT),
    env=each(ENVIRONMENT),
    resources=record(
        "limits", requests=record(cpu=QUANTITY, memory=QUANTITY), limits=record("memory", memory=QUANTITY)
    ),
    volumeMounts=each(record("name mountPath", name=NAME, mountPath=TEXT)),
)
VOLUME = record(
    "name",
    name=NAME,
    emptyDir=record("medium sizeLimit", medium={"const": "Memory"}, sizeLimit=QUANTITY),
    persistentVolumeClaim=record("claimName", claimName=NAME),
)
AFFINITY = record(
    podAntiAffinity=record(
        requiredDuringSchedulingIgnoredDuringExecution=each(
            record("topologyKey labelSelector", topologyKey=TEXT, labelSelector=record(matchLabels=LABELS))
        )
    )
)
POD = record(
    "restartPolicy containers volumes",
    restartPolicy={"enum": ["Never", "OnFailure"]},  # what a Job may have
    containers=each(CONTAINER),
    volumes=each(VOLUME),
    affinity=AFFINITY,
)
JOB = record(
    "completionMode parallelism completions template",
    completionMode={"const": "Indexed"},  # else a pod has no hostname
    parallelism=COUNT,
    completions=COUNT,
    backoffLimit={"type": "integer", "minimum": 0},
    template=record("spec", spec=POD),
)
JOBSET = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=record("name", name=NAME),
    spec=record(
        "network successPolicy failurePolicy replicatedJobs",
        network=record(
            "enableDNSHostnames subdomain",
            enableDNSHostnames={"const": True},
            subdomain=NAME,
            publishNotReadyAddresses={"type": "boolean"},
        ),
        successPolicy=record(
            "operator targetReplicatedJobs", operator={"enum": ["All", "Any"]}, targetReplicatedJobs=each(NAME)
        ),
        failurePolicy=record("maxRestarts", maxRestarts={"type": "integer", "minimum": 0}),
        replicatedJobs=each(
            record("name replicas template", name=NAME, replicas=COUNT, template=record("spec", spec=JOB))
        ),
    ),
)
SERVICE = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "v1"},
    kind={"const": "Service"},
    metadata=record("name", name=NAME),
    spec=record(
        "clusterIP selector",
        clusterIP={"const": "None"},  # headless
        publishNotReadyAddresses={"type": "boolean"},
        selector=LABELS,
    ),
)
