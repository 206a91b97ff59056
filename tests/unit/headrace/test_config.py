"""Settings: where they come from, which source wins, and what is refused."""

import pytest

from headrace.config import DEFAULT_CACHE_DIR, DEFAULT_MODEL, Settings, load
from headrace.errors import InvalidRequest


@pytest.fixture
def file(tmp_path):
    """Writes the YAML file and returns its path."""

    def write(text):
        path = tmp_path / "headrace.yaml"
        path.write_text(text)
        return path

    return write


def refused(*assignments, environment=None, file=None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load(file, assignments, environment or {})
    return str(caught.value)


def test_without_any_source_all_is_default():
    settings = load(environment={})
    assert settings == Settings()
    assert (settings.model.ref, settings.model.cache_dir) == (DEFAULT_MODEL, DEFAULT_CACHE_DIR)


def test_each_source_wins_over_the_one_before(file):
    path = file("engine: {max_sequences: 1, max_waiting: 1, max_step_tokens: 1}\n")
    environment = {"HEADRACE_ENGINE__MAX_WAITING": "2", "HEADRACE_ENGINE__MAX_STEP_TOKENS": "2"}
    engine = load(path, ["engine.max_step_tokens=3"], environment).engine
    assert (engine.block_size_tokens, engine.max_sequences, engine.max_waiting, engine.max_step_tokens) == (
        32,
        1,
        2,
        3,
    )


def test_of_two_assignments_the_later_one_wins():
    assert load(None, ["rpc.port=1", "rpc.port=2"], {}).rpc.port == 2


def test_tenants_and_classes_are_settings_by_name(file):
    path = file("router: {tenants: {acme: {weight: 2}, '*': {max_running: 3}}}\n")
    router = load(
        path,
        [
            "router.tenants.acme.max_queued_requests=5",
            "router.classes.fast.ttft_target_s=0.5",
            "router.classes.fast.itl_target_s=0.05",
        ],
        {},
    ).router
    acme = router.tenants["acme"]
    assert (acme.weight, acme.max_queued_requests, acme.max_running) == (2.0, 5, None)
    assert router.tenants["*"].max_running == 3
    assert (router.classes["fast"].ttft_target_s, router.classes["fast"].priority) == (0.5, 0)
    assert "router.tenants.acme.weight: '0'" in refused("router.tenants.acme.weight=0")
    assert "router.classes.fast.priority: '9'" in refused(
        "router.classes.fast.priority=9",
        "router.classes.fast.ttft_target_s=1",
        "router.classes.fast.itl_target_s=1",
    )


def test_values_take_the_type_of_their_field(file):
    settings = load(
        file("log_level: debug\nmodel: {cache_dir: /var/x}\n"),
        ["kv.require_rdma=true", "kv.lease_ttl_s=1.5", "directory.url=redis://h:1/0?a=b"],
        {"HEADRACE_LOG_LEVEL": "error"},
    )
    assert settings.kv.require_rdma is True
    assert settings.kv.lease_ttl_s == 1.5
    assert settings.directory.url == "redis://h:1/0?a=b"
    assert str(settings.model.cache_dir) == "/var/x"
    assert settings.log_level == "error"


def test_other_variables_with_our_prefix_are_left_alone():
    """Kubernetes makes such names of services."""
    environment = {
        "HEADRACE_ROUTER_PORT": "tcp://10.0.0.1:1",
        "HEADRACE_ROUTER_SERVICE_HOST": "x",
        "PATH": "y",
    }
    assert load(environment=environment) == Settings()


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("HEADRACE_RPC__PORT", "4321")
    assert load().rpc.port == 4321


@pytest.mark.parametrize("key", ["engine.block_size", "engin.num_blocks", "nothing", "engine.", ".x"])
def test_unknown_keys_are_named(key):
    message = refused(f"{key}=1")
    assert "there is no such setting" in message
    assert key.split(".")[0] in message


def test_unknown_keys_are_named_in_full_from_every_source(file):
    unknown = "setting: 'engine.speed' is not allowed; there is no such setting"
    assert refused("engine.speed=1") == unknown
    assert refused(environment={"HEADRACE_ENGINE__SPEED": "1"}) == unknown
    assert refused(file=file("engine: {speed: 1}")) == unknown


def test_the_value_of_an_unknown_key_is_not_shown():
    assert "secret" not in refused("directory.ulr=redis://:secret@h/0")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("engine.num_blocks=-1", "engine.num_blocks: '-1'"),
        ("engine.block_size_tokens=0", "greater than 0"),
        ("engine.block_size_tokens=1.5", "valid integer"),
        ("kv.transport=pigeon", "'nixl' or 'local'"),
        ("kv.lease_ttl_s=nan", "kv.lease_ttl_s: 'nan'"),
        ("kv.lease_ttl_s=inf", "kv.lease_ttl_s: 'inf'"),
        ("kv.lease_ttl_s=0", "greater than 0"),
        ("rpc.port=65536", "65535"),
        ("directory.cluster=a:b", "directory.cluster: 'a:b'"),
        ("kv.require_rdma=perhaps", "kv.require_rdma: 'perhaps'"),
        ("engine=1", "engine: '1'"),
        ("engine.num_blocks.more=1", "engine.num_blocks"),
        ("engine.num_blocks", "write section.field=value"),
    ],
)
def test_bad_values_are_named_with_key_and_limit(assignment, words):
    assert words in refused(assignment)


def test_a_value_can_not_have_fields():
    assert "this is a section" in refused("rpc.port=1", "rpc.port.x=2")


@pytest.mark.parametrize("text", ["[1, 2]", "just text", "a: [", "engine: 3", "\x00"])
def test_files_that_hold_no_settings_are_refused(file, text):
    assert refused(file=file(text))


def test_a_missing_file_is_named(tmp_path):
    assert "absent.yaml" in refused(file=tmp_path / "absent.yaml")


def test_an_empty_file_changes_nothing(file):
    assert load(file("# nothing yet\n"), None, {}) == Settings()


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        Settings().rpc.port = 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:pass@h:1/0", "redis://:***@h:1/0"),
        ("redis://user:pass@h:1/0", "redis://user:***@h:1/0"),
        ("rediss://user:pa:ss@h/0", "rediss://user:***@h/0"),
        ("redis://user:pa@ss@h/0", "redis://user:***@h/0"),
        ("redis://h/0?username=u&password=pass&db=1", "redis://h/0?username=u&password=***&db=1"),
        ("redis://user@h/0", "redis://user@h/0"),
    ],
)
def test_passwords_are_masked_in_the_description(url, shown):
    described = load(None, [], {"HEADRACE_DIRECTORY__URL": url}).describe()
    assert described["directory"]["url"] == shown


def test_the_description_has_every_setting_as_plain_data():
    import json

    described = load(None, ["rpc.port=7"], {}).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["rpc"]["port"] == 7
    assert set(described) == set(Settings.model_fields)
