"""API keys and tokens: who is let in, as whom, and what is kept of them."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.config import SecuritySettings
from headrace.errors import InvalidRequest, Unauthenticated, Unavailable
from router.callers import Anyone, Credentials, make_callers
from router.key_set import RemoteKeys

ISSUER, AUDIENCE = "https://id.example.org", "headrace"


def new_key(file, tenant: str, *options: str) -> str:
    result = CliRunner().invoke(app, ["keys", "new", "--tenant", tenant, "--file", str(file), *options])
    assert result.exit_code == 0, result.output
    return next(line for line in result.stdout.splitlines() if line.startswith("hr_"))


async def refusal(callers, credential: str) -> str:
    with pytest.raises(Unauthenticated) as error:
        await callers.caller(credential)
    return str(error.value)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.yaml"


async def test_a_key_names_its_tenant_and_only_its_hash_is_kept(file):
    a, b = new_key(file, "a"), new_key(file, "b")
    callers = Credentials(SecuritySettings(api_keys_file=file))
    assert (await callers.caller(f"Bearer {a}")).tenant == "a"
    assert (await callers.caller(f"bearer {b}")).tenant == "b"
    for key in (a, b):
        secret = key.split("_", 2)[2]
        assert secret not in file.read_text()
        assert hashlib.sha256(secret.encode()).hexdigest() in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


async def test_wrong_keys_are_refused_alike(file):
    key = new_key(file, "a")
    prefix, key_id, secret = key.split("_", 2)
    callers = Credentials(SecuritySettings(api_keys_file=file))
    wrong = [
        f"{prefix}_{key_id}_{secret[:-1]}",
        f"{prefix}_{key_id}_",
        f"{prefix}_{'0' * 12}_{secret}",
        "hr_",
        f"hr_{key_id}_{hashlib.sha256(secret.encode()).hexdigest()}",  # whoever steals the file
        f"hr_{key_id}_\udc80",
    ]
    assert {await refusal(callers, f"Bearer {each}") for each in wrong} == {"the API key is not known"}
    for header in ("", "Bearer", "Bearer ", f"Basic {key}", key):
        assert "a credential is needed" in await refusal(callers, header)
    assert "longer than" in await refusal(callers, "Bearer hr_" + "x" * 20_000)
    assert await refusal(callers, "Bearer something") == "the credential is not known"


async def test_keys_end_are_disabled_and_come_while_the_router_runs(file):
    key, lasting = new_key(file, "a"), new_key(file, "a", "--days", "1")
    callers = Credentials(SecuritySettings(api_keys_file=file))
    await callers.caller(f"Bearer {key}")
    assert CliRunner().invoke(app, ["keys", "disable", key.split("_")[1], "--file", str(file)]).exit_code == 0
    assert "not known" in await refusal(callers, f"Bearer {key}")
    await callers.caller(f"Bearer {lasting}")
    later = new_key(file, "b")
    assert (await callers.caller(f"Bearer {later}")).tenant == "b"
    content = file.read_text()
    year = content[content.index("expires: ") + 9 :][:4]
    file.write_text(content.replace(f"expires: {year}", "expires: 2020"))
    assert "expired" in await refusal(callers, f"Bearer {lasting}")
    listed = CliRunner().invoke(app, ["keys", "list", "--file", str(file)]).output
    assert "disabled" in listed and key.split("_")[2] not in listed


async def test_a_file_that_is_broken_later_changes_nothing_and_one_broken_at_the_start_is_named(file):
    key = new_key(file, "a")
    callers = Credentials(SecuritySettings(api_keys_file=file))
    good = file.read_text()
    for broken in ("keys: [", "keys: [{id: 1}]", good + good.removeprefix("keys:\n"), "- x"):
        file.write_text(broken)
        assert (await callers.caller(f"Bearer {key}")).tenant == "a"
        with pytest.raises(InvalidRequest, match=r"security\.api_keys_file"):
            Credentials(SecuritySettings(api_keys_file=file))
    file.write_text("keys: []")
    await refusal(callers, f"Bearer {key}")


async def test_the_salt_is_the_tenants_and_with_a_secret_nobody_can_make_it(file, tmp_path):
    a, also_a, b = new_key(file, "a"), new_key(file, "a"), new_key(file, "b")
    salts = []
    for number, content in enumerate((None, b"x" * 32, b"y" * 32)):
        secret = None
        if content is not None:
            secret = tmp_path / f"secret{number}"
            secret.write_bytes(content)
        callers = Credentials(SecuritySettings(api_keys_file=file, cache_secret_file=secret))
        of_a, again, of_b = [(await callers.caller(f"Bearer {key}")).cache_salt for key in (a, also_a, b)]
        assert of_a == again != of_b
        salts.append(of_a)
    assert len(set(salts)) == 3
    (tmp_path / "short").write_text("secret")
    with pytest.raises(InvalidRequest, match="32 bytes at least"):
        Credentials(SecuritySettings(api_keys_file=file, cache_secret_file=tmp_path / "short"))


async def test_without_credentials_all_are_the_default_tenant():
    callers = make_callers(SecuritySettings())
    assert isinstance(callers, Anyone)
    assert (await callers.caller("Bearer whatever")).tenant == ""


# --- tokens


class Provider:
    """Keys and tokens of an identity provider."""

    def __init__(self) -> None:
        self.keys = {
            "rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
        }
        self.published = ["rsa", "ec"]

    def jwks(self) -> str:
        keys = []
        for kid in self.published:
            algorithm = jwt.get_algorithm_by_name("ES256" if kid == "ec" else "RS256")
            keys.append(
                {**json.loads(algorithm.to_jwk(self.keys[kid].public_key())), "kid": kid, "use": "sig"}
            )
        return json.dumps({"keys": keys})

    def token(self, kid: str = "rsa", key=None, alg: str = "", **changes) -> str:
        claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "tenant": "a", **changes}
        claims = {name: value for name, value in claims.items() if value is not None}
        algorithm = alg or ("ES256" if kid == "ec" else "RS256")
        key = self.keys[kid] if key is None else key
        return jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid} if kid else {})


@pytest.fixture(scope="module")
def provider():
    return Provider()


def settings(jwks: str, **changes) -> SecuritySettings:
    return SecuritySettings.model_validate(
        {"jwt": {"jwks": jwks, "issuer": ISSUER, "audience": AUDIENCE, **changes}}
    )


@pytest.fixture
def jwks_file(provider, tmp_path):
    path = tmp_path / "jwks.json"
    path.write_text(provider.jwks())
    return path


async def test_tokens_name_their_tenant(provider, jwks_file):
    callers = Credentials(settings(str(jwks_file)))
    assert (await callers.caller(f"Bearer {provider.token()}")).tenant == "a"
    assert (await callers.caller(f"Bearer {provider.token('ec', tenant='b')}")).tenant == "b"
    assert (await callers.caller(f"Bearer {provider.token(aud=['x', AUDIENCE])}")).tenant == "a"
    within_leeway = provider.token(exp=time.time() - 5)
    assert (await callers.caller(f"Bearer {within_leeway}")).tenant == "a"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"aud": "another"}, "not accepted"),
        ({"aud": None}, "not accepted"),
        ({"iss": "https://evil.example.org"}, "not accepted"),
        ({"iss": None}, "not accepted"),
        ({"exp": 1_000_000_000}, "not accepted"),
        ({"exp": None}, "not accepted"),
        ({"nbf": 9_000_000_000}, "not accepted"),
        ({"tenant": None}, "not accepted"),
        ({"tenant": ""}, "no name of a tenant"),
        ({"tenant": ["a"]}, "no name of a tenant"),
        ({"tenant": "a\nb"}, "no name of a tenant"),
        ({"kid": "", "key": "rsa"}, "key is not known"),
        ({"kid": "none", "key": "rsa"}, "key is not known"),
        ({"kid": "ec", "key": "rsa", "alg": "RS256"}, "not accepted"),
        ({"alg": "HS256", "key": b"k" * 32}, "must be signed with"),
        ({"alg": "RS512"}, "must be signed with"),
        ({"alg": "PS256"}, "must be signed with"),
        ({"alg": "none", "key": ""}, "must be signed with"),
        ({"key": "stranger"}, "not accepted"),
    ],
)
async def test_other_tokens_are_refused(provider, jwks_file, changes, said):
    if changes.get("key") == "stranger":
        changes = {**changes, "key": rsa.generate_private_key(public_exponent=65537, key_size=2048)}
    if changes.get("key") == "rsa":
        changes = {**changes, "key": provider.keys["rsa"]}
    callers = Credentials(settings(str(jwks_file)))
    assert said in await refusal(callers, f"Bearer {provider.token(**changes)}")


async def test_the_public_key_is_no_secret_to_sign_with(provider, jwks_file):
    """The oldest trick: HS256 with the published key as its secret."""
    header, payload = (
        jwt.utils.base64url_encode(json.dumps(part).encode()).decode()
        for part in ({"alg": "HS256", "kid": "rsa"}, {"iss": ISSUER, "aud": AUDIENCE, "tenant": "a"})
    )
    callers = Credentials(settings(str(jwks_file)))
    assert "must be signed with" in await refusal(callers, f"Bearer {header}.{payload}.AAAA")
    for junk in ("a.b.c", "x", "e30.e30.", "eyJhbGciOiJSUzI1NiJ9"):
        await refusal(callers, f"Bearer {junk}")


async def test_keys_and_tokens_side_by_side(provider, jwks_file, file):
    key = new_key(file, "of-key")
    both = settings(str(jwks_file)).model_copy(update={"api_keys_file": file})
    callers = Credentials(both)
    assert (await callers.caller(f"Bearer {key}")).tenant == "of-key"
    assert (await callers.caller(f"Bearer {provider.token(tenant='of-token')}")).tenant == "of-token"


class KeyServer:
    """Publishes a provider's keys over HTTP. `answer` replaces them."""

    def __init__(self, provider: Provider) -> None:
        self.fetches, self.answer, self.redirect = 0, provider.jwks, ""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                owner.fetches += 1
                self.send_response(302 if owner.redirect else 200)
                if owner.redirect:
                    self.send_header("Location", owner.redirect)
                self.end_headers()
                self.wfile.write(owner.answer().encode())

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/jwks"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


async def test_keys_are_fetched_once_and_again_for_a_new_one_but_not_for_each_stranger(monkeypatch):
    provider = Provider()
    provider.published = ["rsa"]
    now = 1000.0
    monkeypatch.setattr("router.key_set.time.monotonic", lambda: now)
    with KeyServer(provider) as server:
        callers = Credentials(settings(server.url))
        for _ in range(3):
            await callers.caller(f"Bearer {provider.token()}")
        assert server.fetches == 1
        provider.published = ["rsa", "ec"]  # rotated
        for _ in range(20):
            await refusal(callers, f"Bearer {provider.token('ec')}")
        assert server.fetches == 1  # too soon
        now += 11
        assert (await callers.caller(f"Bearer {provider.token('ec')}")).tenant == "a"
        assert server.fetches == 2
        server.answer = lambda: "down for maintenance"
        now += 1000
        assert (await callers.caller(f"Bearer {provider.token()}")).tenant == "a"  # what is known serves on
        assert server.fetches == 3
        now += 2 * 86400
        with pytest.raises(Unavailable):
            await callers.caller(f"Bearer {provider.token()}")


@pytest.mark.parametrize("answer", ["", "[]", '{"keys": []}', '{"keys": 1}', "x" * (2 << 20)])
async def test_what_is_no_key_set_is_not_used(provider, answer):
    with KeyServer(provider) as server:
        server.answer = lambda: answer
        with pytest.raises(Unavailable):
            await RemoteKeys(server.url).find("rsa")
        assert server.fetches == 1


async def test_redirects_are_not_followed(provider):
    with KeyServer(provider) as other, KeyServer(provider) as server:
        server.redirect = other.url
        with pytest.raises(Unavailable):
            await RemoteKeys(server.url).find("rsa")
        assert (server.fetches, other.fetches) == (1, 0)


@pytest.mark.parametrize("where", ["http://id.example.org/jwks", "ftp://x/y", "/no/such/file"])
def test_keys_from_elsewhere_are_refused_at_the_start(where):
    with pytest.raises(InvalidRequest, match=r"security\.jwt\.jwks"):
        Credentials(settings(where))


def test_a_token_needs_an_issuer_and_an_audience():
    with pytest.raises(ValueError, match="audience must be set, too"):
        settings("/x", audience="")
