"""Workers as pods of two StatefulSets, which are scaled through the API with the pod's service account.

A StatefulSet's pods are named by it and a number, and so are the workers in them; the highest number goes first. So the
last pod of each set is the one that can be removed, whichever role its worker has by now. The service account needs
`get` and `patch` of `statefulsets/scale`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from headrace.directory.records import Role
from headrace.errors import InvalidRequest, NotFound, Unavailable

_TIMEOUT_S = 10.0
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Api:
    """Where the API is, and who we are there. The token is read anew for each call: Kubernetes replaces it."""

    url: str
    namespace: str
    token_file: Path
    ca_file: Path | None

    @classmethod
    def of_pod(cls, host: str, port: str, account: Path = _ACCOUNT) -> Api:
        """By what Kubernetes puts into each pod. Raises InvalidRequest outside of one."""
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise InvalidRequest(
                "planner.actuator", "kubernetes", f"needs a pod with a service account's token: {error}"
            ) from None
        if not host:
            raise InvalidRequest(
                "planner.actuator", "kubernetes", "needs a pod: there is no KUBERNETES_SERVICE_HOST"
            )
        shown_host = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown_host}:{port}", namespace, account / "token", account / "ca.crt")


@dataclass(frozen=True, slots=True)
class _Scale:
    replicas: int
    version: str


class KubernetesActuator:
    can_add = True

    def __init__(self, api: Api, prefill_set: str, decode_set: str) -> None:
        """Raises InvalidRequest when the authority's certificate can not be read."""
        self._api = api
        self._sets = {Role.PREFILL: prefill_set, Role.DECODE: decode_set}
        try:
            verify = ssl.create_default_context(cafile=api.ca_file)
        except OSError as error:
            raise InvalidRequest("planner.actuator", "kubernetes", f"{api.ca_file}: {error}") from None
        self._http = httpx2.AsyncClient(base_url=api.url, verify=verify, timeout=_TIMEOUT_S)

    async def removable(self) -> set[str]:
        scales = {name: await self._scale(name) for name in self._sets.values()}
        return {f"{name}-{scale.replicas - 1}" for name, scale in scales.items() if scale.replicas}

    async def add(self, role: Role) -> None:
        name = self._sets[role]
        await self._set(name, await self._scale(name), +1)

    async def remove(self, worker_id: str) -> None:
        """Raises NotFound unless it is the last pod of a set."""
        name = worker_id.rpartition("-")[0]
        if name not in self._sets.values():
            raise NotFound(f"{worker_id} is no pod of {', '.join(self._sets.values())}")
        scale = await self._scale(name)
        if worker_id != f"{name}-{scale.replicas - 1}":
            raise NotFound(f"{worker_id} is not the last of {name}'s {scale.replicas} pods")
        await self._set(name, scale, -1)

    async def close(self) -> None:
        await self._http.aclose()

    async def _scale(self, name: str) -> _Scale:
        answer = await self._call("GET", name)
        return _Scale(int(answer["spec"].get("replicas", 0)), answer["metadata"]["resourceVersion"])

    async def _set(self, name: str, scale: _Scale, change: int) -> None:
        """Refused by the API where somebody has changed the set meanwhile."""
        body = {
            "metadata": {"resourceVersion": scale.version},
            "spec": {"replicas": scale.replicas + change},
        }
        await self._call("PATCH", name, body)

    async def _call(self, method: str, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Of the set's scale. Raises Unavailable."""
        path = f"/apis/apps/v1/namespaces/{self._api.namespace}/statefulsets/{name}/scale"
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/merge-patch+json"
        try:
            headers["authorization"] = f"Bearer {self._api.token_file.read_text().strip()}"
            answer = await self._http.request(method, path, json=body, headers=headers)
            if answer.is_success:
                return answer.json()
            reason = f"{answer.status_code} {_message(answer)}"
        except (OSError, httpx2.HTTPError, ValueError) as error:
            reason = str(error) or type(error).__name__
        raise Unavailable(f"Kubernetes, {method} {path}: {reason}")


def _message(answer: httpx2.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase
