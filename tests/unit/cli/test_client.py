"""Requests that are sent again, refusals that say why, and streams that go on where they broke."""

import itertools

import pytest
from tests.unit.cli.answering import KEY, SESSION, Answering, event, text

from perdure.cli.client import ApiError, Client, Unreachable
from perdure.cli.credentials import Target
from perdure.cli.exits import CommandFailed
from perdure.cli.following import Following

BUSY = (503, {"type": "api_error", "message": "The database can't be reached."})


def test_a_change_is_sent_again_under_the_same_idempotency_key(server: Answering, client: Client) -> None:
    server.refusals += [BUSY, BUSY]
    assert client.post(f"/v1/sessions/{SESSION}/events", {"events": [{"type": "user.interrupt"}]})["data"]
    keys = [headers["idempotency-key"] for method, _, headers in server.requests if method == "POST"]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert len(server.sent) == 1


def test_two_changes_have_two_keys(server: Answering, client: Client) -> None:
    client.post("/v1/agents", {"name": "a"})
    client.post("/v1/agents", {"name": "a"})
    assert len({headers["idempotency-key"] for _, _, headers in server.requests}) == 2


def test_a_refusal_keeps_its_code_and_names_the_request(server: Answering, client: Client) -> None:
    server.refusals.append((400, {"type": "x", "message": "It rests.", "details": {"error_code": "not_running"}}))
    with pytest.raises(ApiError, match=r"400: It rests\. \(request req_1\)") as refused:
        client.post("/v1/agents")
    assert (refused.value.status, refused.value.error_code) == (400, "not_running")


def test_a_wrong_key_says_where_keys_come_from(server: Answering) -> None:
    stranger = Client(Target(server.url, "pk_other"), sleep=lambda _: None)
    with pytest.raises(ApiError, match="PERDURE_API_KEY"):
        stranger.get("/v1/sessions")
    assert not stranger.is_answering()
    stranger.close()


def test_what_is_no_text_is_refused_before_it_is_sent(server: Answering, client: Client) -> None:
    """An argument in another encoding than the terminal's comes with lone surrogates."""
    with pytest.raises(CommandFailed, match="no UTF-8"):
        client.post("/v1/agents", {"name": "\udcff"})
    assert server.requests == []


def test_a_server_that_was_never_there_is_missed_soon() -> None:
    pauses: list[float] = []
    lonely = Client(Target("http://127.0.0.1:9", KEY), sleep=pauses.append)
    with pytest.raises(Unreachable, match="perdure up"):
        lonely.get("/v1/sessions")
    assert len(pauses) == 2
    assert not lonely.is_answering()
    lonely.close()


def test_a_stream_that_never_was_is_not_said_to_be_lost() -> None:
    lonely = Client(Target("http://127.0.0.1:9", KEY), sleep=lambda _: None)
    with pytest.raises(CommandFailed, match=r"no answer from .* Start it with `perdure up`") as failed:
        Following(lonely, SESSION, sleep=lambda _: None).__enter__()
    assert "lost" not in str(failed.value)
    lonely.close()


def test_a_busy_server_is_there_and_another_program_at_its_address_is_none(server: Answering, client: Client) -> None:
    assert client.is_answering()
    server.refusal = BUSY
    assert client.is_answering()
    server.refusal = (404, {"type": "not_found_error"})
    assert not client.is_answering()


def test_a_broken_stream_goes_on_behind_the_last_event(server: Answering, client: Client) -> None:
    with Following(client, SESSION, sleep=lambda _: None) as following:
        events = iter(following)
        server.publish(event("session.status_running", "sevt_1"), event("agent.message", "sevt_2", content=text("hi")))
        assert [next(events).data["id"] for _ in range(2)] == ["sevt_1", "sevt_2"]
        server.cut()
        server.publish(event("agent.thinking", "sevt_3"))
        assert next(events).data["id"] == "sevt_3"
    assert server.resumed_from == [None, "3.0"]
    assert following.cursor == "4.0"


def test_a_stream_that_broke_before_its_first_event_misses_nothing_and_repeats_nothing_older(
    server: Answering, client: Client
) -> None:
    server.publish(event("agent.thinking", "sevt_old"))
    with Following(client, SESSION, sleep=lambda _: None) as following:
        following.began_with("sevt_ours")
        # The first stream is cut before anything comes on it.
        server.cut()
        server.publish(event("user.message", "sevt_ours", content=text("x")), event("agent.thinking", "sevt_new"))
        seen = [e.data["id"] for e in itertools.islice(following, 2)]
    assert seen == ["sevt_ours", "sevt_new"]


def test_a_deleted_session_ends_the_stream(server: Answering, client: Client) -> None:
    with Following(client, SESSION, sleep=lambda _: None) as following:
        server.publish(event("session.deleted", "sevt_1"))
        assert [e.type for e in following] == ["session.deleted"]
