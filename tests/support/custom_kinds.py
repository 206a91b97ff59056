"""Kinds that Kubernetes does not know by itself: what the chart may say in them, and nothing else.

Fields and types after the projects' own references, as far as the chart uses them:
https://cert-manager.io/docs/reference/api-docs/#cert-manager.io/v1.CertificateSpec
https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.ServiceMonitorSpec
https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PrometheusRuleSpec
https://docs.ray.io/en/master/cluster/kubernetes/references/api.html (RayClusterSpec, HeadGroupSpec, WorkerGroupSpec)
"""

from __future__ import annotations

from typing import Any

import jsonschema

_Schema = dict[str, Any]

TEXT: _Schema = {"type": "string", "minLength": 1}
DURATION: _Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d|w|y))+$"}
LABELS: _Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def obj(required: _Schema, optional: _Schema | None = None) -> _Schema:
    properties = {**required, **(optional or {})}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: _Schema) -> _Schema:
    return {"type": "array", "items": items, "minItems": 1}


_COUNT: _Schema = {"type": "integer", "minimum": 0}
# Its values are texts, numbers included; its pods are validated as pods.
_RAY_GROUP: _Schema = {"rayStartParams": LABELS, "template": {"type": "object"}}
_USAGES = ["digital signature", "key encipherment", "server auth", "client auth"]
_ALERT = obj(
    {"alert": TEXT, "expr": TEXT},
    {
        "for": DURATION,
        "labels": LABELS,
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
)

SPECS: dict[tuple[str, str], _Schema] = {
    ("cert-manager.io/v1", "Certificate"): obj(
        {
            "secretName": TEXT,
            "issuerRef": obj({"name": TEXT}, {"kind": TEXT, "group": TEXT}),
            "dnsNames": many(TEXT),
            "uris": many({"type": "string", "pattern": "^spiffe://"}),
        },
        {
            "duration": DURATION,
            "renewBefore": DURATION,
            "usages": many({"enum": _USAGES}),
            "privateKey": obj(
                {},
                {
                    "algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]},
                    "size": {"type": "integer"},
                    "rotationPolicy": {"enum": ["Never", "Always"]},
                },
            ),
        },
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): obj(
        {
            "selector": obj({"matchLabels": LABELS}),
            "endpoints": many(obj({"port": TEXT}, {"path": TEXT, "interval": DURATION})),
        },
        {"podTargetLabels": many(TEXT), "jobLabel": TEXT},
    ),
    ("ray.io/v1", "RayCluster"): obj(
        {
            "rayVersion": TEXT,
            "headGroupSpec": obj(_RAY_GROUP),
            "workerGroupSpecs": many(
                obj(
                    {**_RAY_GROUP, "groupName": TEXT},
                    {"replicas": _COUNT, "minReplicas": _COUNT, "maxReplicas": _COUNT},
                )
            ),
        },
        {
            "authOptions": obj({"mode": {"enum": ["disabled", "token"]}}),
            "enableInTreeAutoscaling": {"type": "boolean"},
        },
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): obj(
        {"groups": many(obj({"name": TEXT, "rules": many(_ALERT)}, {"interval": DURATION}))}
    ),
}


def check_custom(of: dict[str, Any]) -> None:
    """Raises ValidationError, or KeyError for a kind that nobody has described here."""
    schema = SPECS[of["apiVersion"], of["kind"]]
    whole = obj({"apiVersion": TEXT, "kind": TEXT, "metadata": {"type": "object"}, "spec": schema})
    jsonschema.Draft202012Validator(whole).validate(of)
