"""The parts of the benchmarks that compute: what is reported, what is refused, and how a load's answers are read and checked."""

import importlib
import json
from pathlib import Path

import pytest
from bench import __main__ as program
from bench import b12_kill, floor, load, pairs, sampler, subject
from bench.pairs import Figure, Pair


def pair(subject: float, floor: float, disk_ms: float = 1.0) -> Pair:
    return Pair(subject=subject, floor=floor, disk_ms=disk_ms)


@pytest.mark.parametrize(
    "module", [*program.BENCHES.values(), "bench.run", "bench.floor", "bench.load", "bench.subject"]
)
def test_every_module_can_be_imported(module: str) -> None:
    assert importlib.import_module(module).__doc__


def test_the_figure_is_the_median_of_the_ratios_of_pairs() -> None:
    rows = [pair(2, 1), pair(30, 10), pair(1, 1), pair(8, 2), pair(5, 1)]
    value, steady = pairs.median_ratio(rows)
    assert value == 3 and len(steady) == 5


def test_nothing_is_reported_while_the_disk_moves() -> None:
    rows = [pair(1, 1, 1.0), pair(1, 1, 4.0), pair(1, 1, 1.0), pair(1, 1, 4.0), pair(1, 1, 1.0)]
    figure = pairs.of_pairs("B1", "x", rows, target=1, sense="at most", unit="ms")
    assert figure.value is None and figure.met is None
    assert "the disk moved from 1.00 to 4.00 ms" in figure.detail


def test_neighbours_with_a_steady_disk_count_wherever_they_stand() -> None:
    rows = [pair(9, 1, 4.0), *[pair(2, 1, 1.0 + n / 10) for n in range(5)], pair(9, 1, 4.0)]
    value, steady = pairs.median_ratio(rows)
    assert value == 2 and [p.disk_ms for p in steady] == [1.0, 1.1, 1.2, 1.3, 1.4]


def test_pairs_go_on_until_enough_were_steady_and_no_longer() -> None:
    disks = iter([1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert len(pairs.run_pairs(lambda: pair(1, 1, next(disks)), pairs_min=5)) == 7
    moving = iter([1.0, 4.0] * 10)
    assert len(pairs.run_pairs(lambda: pair(1, 1, next(moving)), pairs_min=3)) == 6


@pytest.mark.parametrize(
    ("value", "sense", "met"), [(1.0, "at most", True), (1.1, "at most", False), (1.1, "at least", True)]
)
def test_a_target_is_met_in_its_own_sense(value: float, sense: pairs.Sense, met: bool) -> None:
    assert Figure(bench="B1", name="x", value=value, target=1.0, sense=sense).met is met


def test_the_table_has_a_line_for_each_figure_and_shows_what_is_missing() -> None:
    text = pairs.table(
        [Figure(bench="B1", name="one", value=None), Figure(bench="B2", name="two", value=1.5, target=1)]
    )
    lines = text.splitlines()
    assert len(lines) == 3
    assert "NO" in lines[2] and "<= 1" in lines[2]


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (pairs.percentile(values, 0.5), pairs.percentile(values, 0.99), pairs.percentile([7.0], 0.5)) == (50, 99, 7)


def test_pgbench_is_asked_through_the_socket_of_the_url() -> None:
    arguments = floor.where("postgresql://postgres@/perdure?host=/tmp/a%20b/socket&port=5432")
    assert arguments == ["-h", "/tmp/a b/socket", "-p", "5432", "-U", "postgres", "perdure"]


def test_only_admissions_count_in_the_log_of_pgbench() -> None:
    lines = ["0 1 4000 0 100 0", "0 2 9000000 1 100 500000", "1 1 2000 0 101 0", "1 2 6000 0 102 0"]
    found = floor.read_log(lines)
    assert (found.count, found.p50_ms, found.per_s) == (3, 4.0, 1.5)


def test_an_answer_is_read_once_it_is_whole() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    assert load.split_answer(answer[:10]) is None
    assert load.split_answer(answer[:-1]) is None
    assert load.split_answer(answer + b"HTTP") == (200, b"{}", b"HTTP")


def test_what_was_acknowledged_must_be_listed_once_and_in_order() -> None:
    acks = [("a", 0.0, 1.0), ("b", 2.0, 3.0), ("c", 2.5, 3.5)]
    assert load.check_order(acks, ["a", "b", "c"]) == (0, 0, 0)
    assert load.check_order(acks, ["a", "c", "b"]) == (0, 0, 0), "b and c were under way together: either may be first"
    assert load.check_order(acks, ["b", "a", "c"]) == (0, 0, 1)
    assert load.check_order(acks, ["a", "b"]) == (1, 0, 0)
    assert load.check_order(acks, ["a", "b", "b", "c"]) == (0, 1, 0)


def order(*, clients: int, shared: bool, sessions: list[str]) -> load.Order:
    return load.Order(url="http://x:1", api_key="k", sessions=sessions, clients=clients, shared=shared)


def test_writers_of_one_session_go_on_with_the_next_before_its_mailbox_is_full() -> None:
    plan = load.Plan(order(clients=2, shared=True, sessions=["a", "b"]), ends_s=float("inf"))
    given = [plan.next_session(n % 2) for n in range(2 * load.SESSION_POSTS_MAX + 1)]
    assert given[: load.SESSION_POSTS_MAX] == ["a"] * load.SESSION_POSTS_MAX
    assert given[-2:] == ["b", None]


def test_a_client_of_its_own_session_stays_with_it_and_ends_in_time() -> None:
    plan = load.Plan(order(clients=2, shared=False, sessions=["a", "b"]), ends_s=float("inf"))
    assert [plan.next_session(0), plan.next_session(1), plan.next_session(0)] == ["a", "b", "a"]
    assert load.Plan(order(clients=1, shared=False, sessions=["a"]), ends_s=0).next_session(0) is None


def test_only_what_came_in_the_counted_time_makes_the_rate() -> None:
    acks = [load.Ack("a", 0.0, at, status, b"{}") for at, status in ((0.5, 200), (1.5, 200), (1.75, 429), (2.5, 200))]
    found = load.summarise(acks, counted=(1.0, 2.0), spent=(4e-6, 8e-6, 0.0))
    assert (found.acked, found.refused, found.per_s, found.client_cpu_us, found.server_cpu_us) == (3, 1, 1.0, 1.0, 2.0)


def test_listeners_stay_below_the_ports_of_outgoing_connections() -> None:
    assert subject.free_port() in subject.PORTS and max(subject.PORTS) < 32_768


def test_the_shares_of_a_profile_add_up() -> None:
    assert sampler.shares(["a;b 3", "a 1"]) == [("a", 25.0, 100.0), ("b", 75.0, 75.0)]
    assert sampler.shorten("/x/site-packages/uvicorn/a.py") == "uvicorn/a.py"


def test_the_model_asks_for_its_tool_once_and_then_says_that_it_is_done() -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "do marker-model-001"}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ran"}]}
    assert b12_kill.marker_of({"messages": [said, {"role": "assistant", "content": []}, result]}) == "marker-model-001"


def fate(**fields: object) -> b12_kill.Fate:
    usual = {
        "phase": "model", "acked": True, "lost": 0, "doubled_inputs": 0, "doubled_replies": 0, "repeated_tools": 0,
        "finished": True, "was_over": False, "resume_s": 1.0, "restart_s": 0.5,
    }  # fmt: skip
    return b12_kill.Fate(**(usual | fields))  # pyright: ignore[reportArgumentType]


def test_one_turn_that_did_not_go_on_shows() -> None:
    figures = {f.name: f for f in b12_kill.figures_of([fate(), fate(finished=False, lost=1, resume_s=4.0)], 1.0)}
    assert figures["turns that went on"].value == 50 and figures["turns that went on"].met is False
    assert figures["acknowledged inputs lost"].met is False
    assert figures["replies doubled"].met is True
    assert figures["/readyz until it went on, worst"].value == 4.0


def test_a_name_that_is_no_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.read_arguments(["B99"])
    assert "unknown benchmark B99" in capsys.readouterr().err
    assert program.read_arguments(["b2", "--quick"]).only == ["B2"]
    assert program.read_arguments([]).only == list(program.BENCHES)


def test_what_was_measured_is_kept_with_its_pairs(tmp_path: Path) -> None:
    path = tmp_path / "results" / "one.json"
    figure = pairs.of_pairs("B1", "x", [pair(2, 1)] * 5, target=3, sense="at most", unit="ms")
    program.write(path, program.about(), [figure], {"B2": "RuntimeError: x"})
    kept = json.loads(path.read_text())
    assert kept["figures"][0]["met"] is True and len(kept["figures"][0]["raw"]["pairs"]) == 5
    assert kept["failed"] == {"B2": "RuntimeError: x"}


def test_a_median_of_writes_is_measured(tmp_path: Path) -> None:
    assert floor.fdatasync_ms(tmp_path, writes=3) > 0
    assert list(tmp_path.iterdir()) == []
