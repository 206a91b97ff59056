"""What may listen where, and how a process says that it is not protected."""

from __future__ import annotations

import pytest

from headrace.bench.certificates import Authority
from headrace.cluster.exposure import check_exposure, is_loopback
from headrace.config import Settings, load
from headrace.errors import InvalidRequest
from headrace.rpc.tls import Part


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def test_loopback_needs_nothing_and_the_rest_is_said():
    assert len(check_exposure(Settings(), Part.ROUTER, "router")) == 3
    assert check_exposure(Settings(), Part.WORKER, "d") == ["no TLS between processes (rpc.tls)"]


@pytest.mark.parametrize("part", [Part.ROUTER, Part.WORKER])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_addresses_need_protection_or_a_word(part, host):
    settings = Settings.model_validate({"rpc": {"host": host}})
    with pytest.raises(InvalidRequest, match=r"rpc\.host.*security\.allow_insecure"):
        check_exposure(settings, part, "x")
    allowed = Settings.model_validate({"rpc": {"host": host}, "security": {"allow_insecure": True}})
    assert check_exposure(allowed, part, "x")


def test_the_http_door_counts_too():
    with pytest.raises(InvalidRequest, match=r"http\.host"):
        check_exposure(Settings.model_validate({"http": {"host": "0.0.0.0"}}), Part.ROUTER, "router")


def test_with_tls_and_credentials_everything_is_allowed(authority, tmp_path):
    for part in (Part.ROUTER, Part.WORKER):
        settings = Settings.model_validate(
            {
                "rpc": {"host": "0.0.0.0", "tls": authority.member(part).tls()},
                "security": {"api_keys_file": tmp_path / "keys.yaml"},
            }
        )
        assert check_exposure(settings, part, "x") == []
    open_door = settings.model_copy(update={"security": Settings().security})
    with pytest.raises(InvalidRequest, match="no credentials"):
        check_exposure(
            open_door.model_copy(
                update={"rpc": open_door.rpc.model_copy(update={"tls": _tls(authority, Part.ROUTER)})}
            ),
            Part.ROUTER,
            "router",
        )


def _tls(authority, part):
    return Settings.model_validate({"rpc": {"tls": authority.member(part).tls()}}).rpc.tls


@pytest.mark.parametrize(
    ("member", "fits"),
    [
        ({"role": "worker"}, True),
        ({"role": "worker", "name": "decode-0"}, True),
        ({"role": "worker", "name": "decode-1"}, False),
        ({"role": "router"}, False),
        ({"role": "worker", "cluster": "other"}, False),
    ],
)
def test_a_certificate_has_to_be_good_for_its_process(authority, member, fits):
    settings = Settings.model_validate({"rpc": {"tls": authority.member(**member).tls()}})
    if fits:
        assert check_exposure(settings, Part.WORKER, "decode-0") == []
        return
    with pytest.raises(InvalidRequest, match=r"rpc\.tls\.cert_file"):
        check_exposure(settings, Part.WORKER, "decode-0")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_has_many_names(host):
    assert is_loopback(host)


def test_a_password_is_refused_as_an_argument_and_not_repeated():
    with pytest.raises(InvalidRequest, match=r"directory\.password_file") as error:
        load(None, ["directory.url=redis://:hunter2@h/0"], {})
    assert "hunter2" not in str(error.value)
    settings = load(None, [], {"HEADRACE_DIRECTORY__URL": "redis://:hunter2@h/0"})
    assert "hunter2" not in repr(settings) + str(settings.describe())
