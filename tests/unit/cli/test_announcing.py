"""Which server `credentials.json` names, from the first start to the last end."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.answering import KEY, Answering

from perdure.bootstrap import Server
from perdure.cli.announcing import announced, find_neighbour, still_there

OURS = "http://127.0.0.1:1"


def kept(data: Path) -> dict[str, Any]:
    return json.loads((data / "credentials.json").read_text())


def keep(data: Path, url: str, key: str = KEY) -> None:
    (data / "credentials.json").write_text(json.dumps({"url": url, "api_key": key, "pid": 7}))


def ours(url: str = OURS) -> Server:
    return Server(url=url, database_url="postgresql:///x", api_key="pk_ours")


def test_a_server_is_named_while_it_runs_and_its_key_is_kept_for_the_next_start(tmp_path: Path) -> None:
    server = ours()
    data = tmp_path / "data"
    with announced(data, server, find_neighbour(data)):
        assert kept(data) == {
            "url": OURS,
            "api_key": "pk_ours",
            "database_url": "postgresql:///x",
            "pid": server.pid,
        }
        assert (data / "credentials.json").stat().st_mode & 0o777 == 0o600
    assert kept(data) == {"url": None, "api_key": "pk_ours", "database_url": "postgresql:///x", "pid": None}
    assert [path.name for path in data.iterdir()] == ["credentials.json"]


def test_a_file_that_names_a_living_server_is_left_alone(server: Answering, tmp_path: Path) -> None:
    keep(tmp_path, server.url)
    before = (tmp_path / "credentials.json").read_bytes()
    neighbour = find_neighbour(tmp_path)
    assert neighbour is not None
    assert (neighbour.url, neighbour.api_key) == (server.url, KEY)
    with announced(tmp_path, ours(), neighbour):
        assert (tmp_path / "credentials.json").read_bytes() == before
    assert (tmp_path / "credentials.json").read_bytes() == before


def test_a_server_that_went_while_another_started_is_named_no_more(server: Answering, tmp_path: Path) -> None:
    keep(tmp_path, server.url)
    neighbour = find_neighbour(tmp_path)
    assert still_there(neighbour) == neighbour
    server.refusal = (404, {"type": "not_found_error"})
    assert still_there(neighbour) is None
    with announced(tmp_path, ours(), still_there(neighbour)):
        assert kept(tmp_path)["url"] == OURS


@pytest.mark.parametrize("key", ["pk_other", KEY])
def test_an_address_without_a_server_of_this_directory_is_replaced(server: Answering, tmp_path: Path, key: str) -> None:
    # One that does not know the key has only got the old address.
    keep(tmp_path, server.url if key == "pk_other" else "http://127.0.0.1:9", key)
    assert find_neighbour(tmp_path) is None


@pytest.mark.parametrize("content", ["{", '{"url": "nonsense", "api_key": "k"}', '{"url": "http://[", "api_key": "k"}'])
def test_a_damaged_file_names_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "credentials.json").write_text(content)
    assert find_neighbour(tmp_path) is None


def test_who_goes_takes_nothing_of_another_back(tmp_path: Path) -> None:
    with announced(tmp_path, ours(), None):
        keep(tmp_path, "http://127.0.0.1:3")
    assert kept(tmp_path)["url"] == "http://127.0.0.1:3"


def test_a_directory_that_was_removed_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with announced(data, ours(), None):
        (data / "credentials.json").unlink()
        data.rmdir()
    assert not data.exists()
