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


@pytest.mark.parametrize("content", ["", "{", "[]", '{"url": 1, "api_key": null}'])
def test_a_file_that_says_nothing_is_no_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "credentials.json").write_text(content)
    assert read_credentials(tmp_path).url is None
    with pytest.raises(CommandFailed, match="perdure up") as refused:
        find_target(tmp_path, {})
    assert refused.value.code == 2


def test_a_url_without_a_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="must start with http"):
        find_target(tmp_path, {}, url="localhost:8700", api_key="pk_flag")
