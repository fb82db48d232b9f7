"""Sessions over time: cancelling, other processes on the same root, idle shells, removal, hosts without a sandbox."""

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.environments.driving import Driver, children_with, in_sessions_of, running_with, text_of, until

from perdure.environments import local, selftest
from perdure.environments.local import FOLDER_LOST, SHELL_RESTARTED, LocalEnvironment
from perdure.environments.processes import ProcessMark, is_alive, mark_process, open_marked
from perdure.environments.sandbox import SandboxMissing, Spawned, find_bwrap, spawn_sandboxed
from perdure.environments.shell import Shell
from perdure.ports.environment import EnvironmentUnavailable, Networking


async def test_cancelling_kills_the_whole_tree_before_it_returns(driver: Driver) -> None:
    # The child left the shell's process group and session, and waits to do damage.
    command = "setsid bash -c 'touch ready; until [ -e go ]; do sleep 0.01; done; touch late; sleep 7777.5' & x=1; wait"
    running = asyncio.create_task(driver.bash(command))
    await until((driver.folder / "ready").exists, "the child waits")
    assert running_with("7777.5") != []
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert running_with("7777.5") == []
    (driver.folder / "go").touch()
    assert await driver.bash("ls; echo $x.") == f"{SHELL_RESTARTED}\ngo\nready\n."


async def test_cancelling_while_the_shell_starts_leaves_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await driver.environment.problems()
    started: list[int] = []

    def spawn(bwrap: Path, folder: Path, networking: Networking) -> Spawned:
        spawned = spawn_sandboxed(bwrap, folder, networking)
        started.append(spawned.process.pid)
        return spawned

    monkeypatch.setattr("perdure.environments.local.spawn_sandboxed", spawn)
    for turns in range(25):
        starting = asyncio.create_task(driver.bash("touch ran; sleep 8888.5"))
        # Later and later in the start, which takes some hundred rounds of the loop.
        for _ in range(turns * turns):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert in_sessions_of(started) == []
        assert running_with("8888.5") == []
        await until(lambda: driver.environment._slots == {}, "nothing is kept")  # pyright: ignore[reportPrivateUsage]
    assert len(started) > 5


async def test_a_later_environment_finds_the_files_and_says_that_the_shell_is_fresh(driver: Driver) -> None:
    await driver.bash("x=1; echo kept > note")
    await driver.environment.close()
    later = Driver(LocalEnvironment(driver.root), driver.root)
    assert await later.bash("cat note; echo $x.") == f"{SHELL_RESTARTED}\nkept\n."
    assert await later.bash("echo once") == "once"
    await later.environment.close()


async def test_without_an_earlier_shell_there_is_no_notice(driver: Driver) -> None:
    await driver.ok("write", file_path="note", content="kept")
    await driver.environment.close()
    later = Driver(LocalEnvironment(driver.root), driver.root)
    assert await later.bash("cat note") == "kept"
    await later.environment.close()


async def test_a_later_environment_kills_a_tree_that_still_runs(driver: Driver) -> None:
    await driver.bash("sleep 9999.25 & (until [ -e go ]; do sleep 0.01; done; touch late) & disown")
    await until(lambda: running_with("9999.25") != [], "the shell has begun it")
    later = Driver(LocalEnvironment(driver.root), driver.root)
    # Any tool: the old tree must not write beside the first call of the new process.
    await later.ok("write", file_path="go", content="")
    assert running_with("9999.25") == []
    assert not (driver.folder / "late").exists()
    assert await later.bash("ls") == f"{SHELL_RESTARTED}\ngo"
    # The earlier environment notices that its shell is gone.
    assert (await driver.bash("echo back")).startswith(SHELL_RESTARTED)
    await later.environment.close()


_SERVER = """
import asyncio, sys
from pathlib import Path
from perdure.environments.local import LocalEnvironment
from tests.unit.environments.driving import Driver

async def main():
    root = Path(sys.argv[1])
    driver = Driver(LocalEnvironment(root), root)
    await driver.bash("x=1; sleep 6666.25 & touch ready; wait")

asyncio.run(main())
"""


async def test_a_killed_server_leaves_no_tree_and_the_model_is_told(driver: Driver) -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", _SERVER, str(driver.root), cwd=Path.cwd())
    await until((driver.folder / "ready").exists, "the server's command runs")
    server.send_signal(signal.SIGKILL)
    await server.wait()
    assert await driver.bash("ls; echo $x.") == f"{SHELL_RESTARTED}\nready\n."
    assert running_with("6666.25") == []


async def test_a_reused_pid_is_never_killed() -> None:
    mine = mark_process(os.getpid())
    assert mine is not None
    assert is_alive(mine)
    for other in (
        ProcessMark(pid=mine.pid, start_ticks=mine.start_ticks - 1, host=mine.host),
        ProcessMark(pid=mine.pid, start_ticks=mine.start_ticks, host="another boot"),
    ):
        assert open_marked(other) is None
        assert not is_alive(other)


async def test_the_marker_is_out_of_the_sandboxs_reach(driver: Driver) -> None:
    await driver.bash("true")
    marker = driver.root / ".state" / "s1.json"
    assert marker.stat().st_mode & 0o777 == 0o600
    assert driver.folder.stat().st_mode & 0o777 == 0o700
    assert "leads out" in await driver.error("read", file_path="../.state/s1.json")
    marker.write_bytes(b"{torn")
    later = Driver(LocalEnvironment(driver.root), driver.root)
    assert (await later.bash("true")).startswith(SHELL_RESTARTED)
    await later.environment.close()


async def test_an_idle_shell_is_closed_and_nothing_is_kept(tmp_path: Path) -> None:
    driver = Driver(LocalEnvironment(tmp_path / "root", shell_idle_ms=50), tmp_path / "root")
    await driver.bash("sleep 5555.25 & x=1")
    await until(lambda: running_with("5555.25") == [], "the shell is closed")
    await until(lambda: driver.environment._slots == {}, "nothing is kept")  # pyright: ignore[reportPrivateUsage]
    assert await driver.bash("echo $x.") == f"{SHELL_RESTARTED}\n."
    await driver.environment.close()


async def test_a_session_without_a_shell_is_not_kept(driver: Driver) -> None:
    await driver.ok("write", file_path="note", content="x")
    await driver.error("bash", command="exit 1")
    assert driver.environment._slots == {}  # pyright: ignore[reportPrivateUsage]


async def test_the_longest_idle_shell_makes_room(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.environments.local.SHELLS_MAX", 2)
    for session in ("a", "b", "c"):
        await Driver(driver.environment, driver.root, session).bash("x=1")
    assert sorted(driver.environment._slots) == ["b", "c"]  # pyright: ignore[reportPrivateUsage]
    assert await Driver(driver.environment, driver.root, "c").bash("echo $x") == "1"


async def test_destroy_kills_and_removes_and_may_be_repeated(driver: Driver) -> None:
    await driver.bash("sleep 3333.25 & mkdir -p deep/locked; echo x > deep/locked/f; chmod 000 deep/locked deep")
    await driver.environment.destroy("s1")
    assert running_with("3333.25") == []
    assert not driver.folder.exists()
    assert sorted(path.name for path in driver.root.rglob("*")) == [".state", ".trash"]
    await driver.environment.destroy("s1")
    await driver.environment.destroy("never_seen")
    assert await driver.bash("ls -A") == "(no output)"


async def test_folder_that_can_not_be_removed_is_its_own_sessions_trouble_until_it_can(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was moved out of the way already, so the next try must know it again."""
    await driver.bash("touch stuck")
    other = Driver(driver.environment, driver.root, "s2")
    await other.bash("touch free")
    whole = local._run_quietly

    async def run_quietly(*command: str) -> int:
        return 1 if "/.trash/s1-" in command[-1] else await whole(*command)

    with monkeypatch.context() as patched:
        patched.setattr(local, "_run_quietly", run_quietly)
        for _ in range(2):
            with pytest.raises(OSError, match="remove it by hand"):
                await driver.environment.destroy("s1")
            await driver.environment.destroy("s2")
            assert not other.folder.exists()
    await driver.environment.destroy("s1")
    assert list((driver.root / ".trash").iterdir()) == []


async def test_destroy_removes_a_tree_too_deep_for_recursion(driver: Driver) -> None:
    await driver.bash("mkdir d")
    here = os.open(driver.folder / "d", os.O_RDONLY)
    for _ in range(2_000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        await driver.environment.destroy("s1")
        assert not driver.folder.exists()
        assert list((driver.root / ".trash").iterdir()) == []
    finally:
        # What is left of such a tree would break pytest's own cleaning up.
        await asyncio.to_thread(subprocess.run, ["rm", "-rf", "--", str(driver.root)], check=True)


async def test_destroy_ends_a_running_command_and_refuses_the_waiting_one(driver: Driver) -> None:
    running = asyncio.create_task(driver.call("bash", command="touch busy; sleep 600"))
    await until((driver.folder / "busy").exists, "the command runs")
    waiting = asyncio.create_task(driver.call("bash", command="touch again"))
    await asyncio.sleep(0)
    await driver.environment.destroy("s1")
    assert (await running).is_error
    assert "workspace was removed" in text_of(await waiting)
    assert not driver.folder.exists()


async def test_close_kills_every_shell_and_refuses_further_calls(driver: Driver) -> None:
    await driver.bash("sleep 2222.25 &")
    running = asyncio.create_task(driver.call("bash", command="touch busy; sleep 2222.75"))
    await until((driver.folder / "busy").exists, "the command runs")
    await driver.environment.close()
    assert running_with("2222.") == []
    assert (await running).is_error
    with pytest.raises(EnvironmentUnavailable, match="closed"):
        await driver.bash("true")
    await driver.environment.close()


@pytest.mark.parametrize("session", ["", "../x", ".state", "A", "a/b", "a" * 129])
async def test_a_session_name_can_not_lead_elsewhere(driver: Driver, session: str) -> None:
    with pytest.raises(ValueError, match="lower-case letters"):
        await Driver(driver.environment, driver.root, session).call("bash", command="true")
    with pytest.raises(ValueError, match="lower-case letters"):
        await driver.environment.destroy(session)


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise SandboxMissing("no working bubblewrap was found: install it")

    monkeypatch.setattr(selftest, "find_bwrap", missing)


@pytest.mark.rule("MA-D1.15")
@pytest.mark.usefixtures("no_bwrap")
async def test_without_a_sandbox_tools_are_refused_with_the_reason(driver: Driver) -> None:
    assert await driver.environment.problems() == ["no working bubblewrap was found: install it"]
    with pytest.raises(EnvironmentUnavailable, match=r"no working bubblewrap was found: install it.*unsafe_no_sandbox"):
        await driver.bash("touch ran")
    assert not driver.folder.exists()


@pytest.mark.usefixtures("no_bwrap")
async def test_the_unsafe_override_runs_and_says_so_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-do-not-leak")
    driver = Driver(LocalEnvironment(tmp_path / "root", unsafe_no_sandbox=True), tmp_path / "root")
    [warning, reason] = await driver.environment.problems()
    assert warning.startswith("UNSAFE: TOOLS RUN WITHOUT A SANDBOX")
    assert reason.startswith("no working bubblewrap")
    assert await driver.bash("x=1; pwd") == str(driver.folder)
    assert await driver.bash("echo $x; env | grep -c ANTHROPIC || true") == "1\n0"
    running = asyncio.create_task(driver.bash("touch busy; setsid sleep 1111.25 & sleep 1111.75"))
    await until(lambda: len(running_with("1111.")) >= 2, "the command runs")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: running_with("1111.") == [], "killed processes vanish")
    assert (await driver.bash("true")).startswith(SHELL_RESTARTED)
    later = Driver(LocalEnvironment(tmp_path / "root", unsafe_no_sandbox=True), tmp_path / "root")
    assert (await later.bash("true")).startswith(SHELL_RESTARTED)
    await later.environment.close()
    await driver.environment.close()


async def test_where_the_sandbox_holds_the_unsafe_override_changes_nothing(tmp_path: Path) -> None:
    driver = Driver(LocalEnvironment(tmp_path / "root", unsafe_no_sandbox=True), tmp_path / "root")
    assert await driver.environment.problems() == []
    assert await driver.bash("pwd") == "/workspace"
    await driver.environment.close()


@pytest.mark.rule("MA-C13.2")
async def test_folder_that_was_lost_is_not_replaced_silently(tmp_path: Path) -> None:
    """One that a new process finds missing is told of once, with the next result; one that was removed on purpose is not."""
    first = Driver(LocalEnvironment(tmp_path), tmp_path)
    await first.ok("write", file_path="a.txt", content="kept")
    await first.environment.close()
    shutil.rmtree(first.folder)

    second = Driver(LocalEnvironment(tmp_path), tmp_path)
    told = await second.call("glob", pattern="*")
    assert told.content[0]["text"] == FOLDER_LOST
    assert len((await second.call("glob", pattern="*")).content) == 1
    await second.environment.destroy(second.session)
    assert len((await second.call("glob", pattern="*")).content) == 1
    await second.environment.close()


async def test_no_other_user_of_the_host_comes_near_what_commands_leave(tmp_path: Path) -> None:
    """Also where an earlier version left the folders open."""
    driver = Driver(LocalEnvironment(tmp_path / "data" / "workspaces"), tmp_path / "data" / "workspaces")
    driver.root.mkdir(parents=True, mode=0o755)
    (driver.root / ".state").mkdir(mode=0o755)
    await driver.bash("chmod 755 .; cp /bin/true su; chmod 4755 su")
    assert (driver.folder / "su").stat().st_mode & 0o4000
    for folder in (driver.root, driver.root / ".state"):
        assert folder.stat().st_mode & 0o077 == 0
    await driver.environment.close()


@pytest.mark.rule("MA-D1.4")
async def test_shell_that_another_worker_followed_is_not_used_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model was told that it is gone, and worked on in another one. A container beside this one can't kill ours."""
    await driver.bash("where=here")
    beside = Driver(LocalEnvironment(driver.root), driver.root)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("perdure.environments.processes.read_host", lambda: "another host")
        assert await beside.bash("where=there; echo $where") == f"{SHELL_RESTARTED}\nthere"
    assert await driver.bash("echo $where.") == f"{SHELL_RESTARTED}\n."
    assert await driver.bash("echo $where.") == "."
    assert await beside.bash("echo $where.") == f"{SHELL_RESTARTED}\n."
    await driver.ok("bash", restart=True)
    assert await driver.bash("echo $where.") == "."
    await beside.environment.close()


async def test_late_end_of_an_older_shell_is_not_the_end_of_the_latest(driver: Driver) -> None:
    """A worker that froze, or lost the database alone, may learn of its shell's end when another one has long gone on."""
    late = asyncio.create_task(driver.call("bash", command="touch begun; sleep 7777.25"))
    await until((driver.folder / "begun").exists, "the command runs")
    beside = Driver(LocalEnvironment(driver.root), driver.root)
    assert (await beside.bash("where=there; echo $where")).endswith("there")
    ended = await late
    assert ended.is_error and "shell ended" in text_of(ended)
    assert await beside.bash("echo $where") == "there"
    await beside.environment.close()


@pytest.mark.parametrize("unsafe", [False, True])
async def test_what_passes_is_not_kept_and_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsafe: bool
) -> None:
    """A disk that is full while the sandbox is tried says nothing of the sandbox."""
    driver = Driver(LocalEnvironment(tmp_path, unsafe_no_sandbox=unsafe), tmp_path)

    def fail(*_: object) -> Spawned:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(selftest, "spawn_sandboxed", fail)
        with pytest.raises(EnvironmentUnavailable, match="No space left"):
            await driver.bash("true")
    assert await driver.bash("pwd") == "/workspace"
    assert await driver.environment.problems() == []
    await driver.environment.close()


async def test_spawn_that_runs_out_of_descriptors_leaks_none(tmp_path: Path) -> None:
    [soft, hard] = resource.getrlimit(resource.RLIMIT_NOFILE)
    bwrap = await asyncio.to_thread(find_bwrap)
    started = 0
    with contextlib.ExitStack() as fillers:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        while (filler := os.dup(0)) < highest:
            # The limit is one of numbers, and the holes below are room as well.
            fillers.callback(os.close, filler)
        os.close(filler)
        before = len(os.listdir("/proc/self/fd"))
        for room in range(2, 32):
            spawned: Spawned | None = None
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + room, hard))
            try:
                with contextlib.suppress(OSError):
                    spawned = spawn_sandboxed(bwrap, tmp_path, "none")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if spawned is not None:
                shell = Shell(spawned)
                await shell.start()
                await shell.kill()
                started += 1
            assert len(os.listdir("/proc/self/fd")) == before, f"with room for {room}"
    assert 0 < started < 30, "some had room and some had none"


async def test_shell_whose_marker_can_not_be_written_is_ended(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    await driver.ok("write", file_path="a", content="")

    def fail(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = children_with("bash")
    with monkeypatch.context() as full:
        full.setattr("perdure.environments.marker.os.replace", fail)
        for _ in range(3):
            with pytest.raises(EnvironmentUnavailable, match="No space left"):
                await driver.bash("true")
    assert children_with("bash") == before
    assert [f.name for f in (driver.root / ".state").iterdir()] == ["s1.made"]
    assert await driver.bash("echo well") == "well"


async def test_shell_that_can_not_be_watched_is_ended(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    await driver.ok("write", file_path="a", content="")

    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before, descriptors = children_with("bash"), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as exhausted:
        exhausted.setattr("perdure.environments.sandbox.os.pidfd_open", fail)
        with pytest.raises(EnvironmentUnavailable, match="Too many open files"):
            await driver.bash("true")
        fresh = LocalEnvironment(driver.root.with_name("fresh"))
        [problem] = await fresh.problems()
        assert "Too many open files" in problem
    assert (children_with("bash"), len(os.listdir("/proc/self/fd"))) == (before, descriptors)


async def test_root_that_can_not_be_made_is_a_problem_until_it_can(tmp_path: Path) -> None:
    (tmp_path / "workspaces").write_text("in the way")
    environment = LocalEnvironment(tmp_path / "workspaces")
    [problem] = await environment.problems()
    assert problem.startswith("tools can't run now: [Errno 17]")
    with pytest.raises(EnvironmentUnavailable, match="File exists"):
        await Driver(environment, tmp_path / "workspaces").bash("true")
    (tmp_path / "workspaces").unlink()
    assert await environment.problems() == []
    await environment.close()
