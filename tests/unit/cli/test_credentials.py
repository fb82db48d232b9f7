"""Which server and which key a client verb uses."""

import json
from pathlib import Path

import pytest

from perdure.cli.credentials import Target, find_target, read_credentials
from perdure.cli.exits import CommandFailed


def keep(data: Path, **fields: object) -> None:
    (data / "credentials.json").write_text(json.dumps(fields))


def test_the_data_directory_is_the_last_resort(tmp_path: Path) -> None:
    keep(tmp_path, url="http://127.0.0.1:8700", api_key="pk_file", pid=7)
    assert find_target(tmp_path, {}) == Target("http://127.0.0.1:8700", "pk_file")


def test_the_environment_beats_the_file_and_flags_beat_the_environment(tmp_path: Path) -> None:
    keep(tmp_path, url="http://127.0.0.1:8700", api_key="pk_file")
    environ = {"PERDURE_URL": "http://one/", "PERDURE_API_KEY": "pk_environ"}
    assert find_target(tmp_path, environ) == Target("http://one", "pk_environ")
    assert find_target(tmp_path, environ, url="http://two", api_key="pk_flag") == Target("http://two", "pk_flag")


def test_the_key_of_the_file_goes_to_no_other_server(tmp_path: Path) -> None:
    keep(tmp_path, url="http://127.0.0.1:8700/", api_key="pk_file")
    assert find_target(tmp_path, {}, url="http://127.0.0.1:8700").api_key == "pk_file"
    with pytest.raises(CommandFailed, match="No API key for http://elsewhere"):
        find_target(tmp_path, {}, url="http://elsewhere")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"url": 1, "api_key": null}',
        '{"url": "http://[", "api_key": "pk"}',
        '{"url": null, "api_key": "é"}',
        '{"url": "http://one\\n", "api_key": "pk"}',
    ],
)
def test_a_damaged_file_is_said_to_be_damaged_and_is_no_obstacle(tmp_path: Path, content: str) -> None:
    (tmp_path / "credentials.json").write_text(content)
    assert read_credentials(tmp_path).url is None
    with pytest.raises(CommandFailed, match=r"credentials\.json' is damaged .* `perdure up --data ") as refused:
        find_target(tmp_path, {})
    assert refused.value.code == 2
    assert find_target(tmp_path, {}, url="http://one", api_key="pk") == Target("http://one", "pk")


def test_a_key_that_can_be_no_header_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="API key can't be used") as refused:
        find_target(tmp_path, {}, url="http://one", api_key="pk_\u00e9secret")
    assert refused.value.code == 2 and "secret" not in str(refused.value)


def test_a_server_that_stopped_is_told_apart_from_one_that_never_was(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="No server is known"):
        find_target(tmp_path, {})
    keep(tmp_path, url=None, api_key="pk_file", pid=None)
    with pytest.raises(CommandFailed, match="No server runs in"):
        find_target(tmp_path, {})


@pytest.mark.parametrize("url", ["localhost:8700", "http://[", "http://", "http://host:x"])
def test_a_url_that_can_not_be_one_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(CommandFailed, match="must start with http"):
        find_target(tmp_path, {}, url=url, api_key="pk_flag")
