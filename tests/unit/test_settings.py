"""Each setting has a rule, and what breaks it is refused by its name, with where it came from."""

import re
from pathlib import Path

import pytest

from perdure.settings import RULES, BadSetting, Settings, load, make_data_directory, unknown_variables

ROOT = Path(__file__).parents[2]


def refusal(**given: object) -> str:
    with pytest.raises(BadSetting) as bad:
        load(given, {})
    return str(bad.value)


def test_every_setting_has_a_rule_and_every_default_keeps_it() -> None:
    assert set(RULES) == set(Settings.__struct_fields__)
    for name, rule in RULES.items():
        default = getattr(Settings(), name)
        assert default is None or rule.holds(default), name


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("port", 0, 65_535), ("concurrency", 1, 10_000), ("model_stall_ms", 1_000, 3_600_000)],
)
def test_a_number_is_within_its_range(name: str, least: int, most: int) -> None:
    for value in (least, most):
        assert getattr(load({name: value}, {}), name) == value
    for value in (least - 1, most + 1, -5, "abc", "", 1.5, True):
        assert f"The setting {name} can't be {value!r} (from the flag --{name.replace('_', '-')})" in refusal(
            **{name: value}
        )
        assert f"a whole number from {least} to {most}" in refusal(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("engine", "temporal", "it must be embedded, the only one."),
        ("bus", "foo", "it must be one of auto, inprocess, notify."),
        ("log_level", "loud", "it must be one of debug, info, warning, error."),
        ("log_json", "maybe", "it must be true or false."),
        ("host", "http://here", "without scheme and port"),
        ("host", "", "without scheme and port"),
        ("data", 7, "the path of a directory"),
        ("data", "~nobody-of-this-name/x", "the path of a directory"),
        ("data", "a\0b", "the path of a directory"),
        ("warm_model", " ", "the name of a model"),
        ("anthropic_base_url", "api.example.com", "https://HOST"),
        ("anthropic_base_url", "http://[", "https://HOST"),
    ],
)
def test_a_text_keeps_its_rule(name: str, value: object, rule: str) -> None:
    assert rule in refusal(**{name: value})


@pytest.mark.parametrize(
    "url", ["foo", "", "host:5432/db", "http://host/db", "postgresql:db", "postgresql://h:x/db", "postgresql://[/db"]
)
def test_a_malformed_database_url_is_told_its_form_and_not_repeated(url: str) -> None:
    message = refusal(database_url=url)
    assert "postgresql://USER:PASSWORD@HOST:PORT/DATABASE" in message
    assert "can't be used as it is" in message


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:secret@db:5432/perdure",
        "postgres://db",
        "postgresql:///perdure",
        "postgresql://perdure@/perdure?host=/run/pg&port=5433",
        "postgresql://[::1]:5432/perdure",
        "postgresql://one:5432,two/perdure",
    ],
)
def test_the_forms_of_a_database_url(url: str) -> None:
    assert load({"database_url": url}, {}).database_url == url


def test_a_key_that_can_be_no_header_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadSetting, match="ANTHROPIC_API_KEY") as bad:
        load({}, {"ANTHROPIC_API_KEY": "sk-secret\n"})
    assert "sk-secret" not in str(bad.value)


def test_the_data_directory_may_be_named_from_home_and_is_its_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    data = load({}, {"PERDURE_DATA": "~/of/perdure"}).data
    assert data == tmp_path / "of" / "perdure"
    make_data_directory(data)
    assert data.stat().st_mode & 0o777 == 0o700
    data.chmod(0o755)
    make_data_directory(data)
    assert data.stat().st_mode & 0o777 == 0o755, "its owner's choice"


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "perdure.toml"
    file.write_text('port = 1\nconcurrency = 2\nhost = "::1"\ndatabase_url = ""\n')
    loaded = load({"port": 3, "host": None}, {"PERDURE_PORT": "4", "PERDURE_CONCURRENCY": "5"}, file=file)
    assert (loaded.port, loaded.concurrency, loaded.host, loaded.database_url) == (3, 5, "::1", None)


def test_the_source_of_a_bad_setting_is_named(tmp_path: Path) -> None:
    file = tmp_path / "perdure.toml"
    file.write_text("port = 70000\n")
    with pytest.raises(BadSetting, match=re.escape(f"70000 (from the file {str(file)!r})")):
        load({}, {}, file=file)
    with pytest.raises(BadSetting, match="'70001' \\(from the environment variable PERDURE_PORT\\)"):
        load({}, {"PERDURE_PORT": "70001"}, file=file)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"prot = 1", "the key 'prot', which is no setting"), (b"port = ", "not valid TOML"), (b"\xff", "not valid TOML")],
)
def test_a_file_that_can_not_be_used_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "perdure.toml"
    file.write_bytes(content)
    with pytest.raises(BadSetting, match=message):
        load({}, {}, file=file)
    with pytest.raises(BadSetting, match="can't be read"):
        load({}, {}, file=tmp_path)


def test_misspelt_variables_are_found_and_those_of_other_programs_are_not() -> None:
    environ = {"PERDURE_PROT": "1", "PERDURE_PORT": "1", "PERDURE_URL": "x", "PERDURE_LONG_OUT": "x", "HOME": "/"}
    assert unknown_variables(environ) == ["PERDURE_PROT"]


def test_the_address_of_a_service_is_no_port() -> None:
    """Kubernetes names it like our setting, where the service is called `perdure`."""
    environ = {"PERDURE_PORT": "tcp://10.0.0.7:8700", "PERDURE_CONCURRENCY": "5"}
    loaded = load({}, environ)
    assert (loaded.port, loaded.concurrency) == (8700, 5)
    assert unknown_variables(environ) == ["PERDURE_PORT"]


def test_every_variable_that_our_own_programs_read_is_known() -> None:
    files = [path for room in ("src", "bench") for path in (ROOT / room).rglob("*.py")] + [ROOT / "Makefile"]
    names = {name for path in files for name in re.findall(r"PERDURE_[A-Z_]*[A-Z]", path.read_text("utf-8"))}
    assert "PERDURE_CRASH_AT" in names
    assert unknown_variables(dict.fromkeys(names, "")) == []
