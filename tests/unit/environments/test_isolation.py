"""What a command in the sandbox can't see, reach or change."""

import asyncio
from pathlib import Path

import pytest
from tests.unit.environments.driving import Driver, text_of

from perdure.environments import sandbox
from perdure.environments.local import LocalEnvironment


async def test_the_self_test_finds_no_problem_where_the_sandbox_holds(driver: Driver) -> None:
    assert await driver.environment.problems() == []
    assert list((driver.root / ".state").iterdir()) == []


async def test_host_files_are_invisible(driver: Driver, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("for the server only")
    result = await driver.call("bash", command=f"cat {secret} /etc/shadow; ls /root /home {driver.root}")
    assert result.is_error
    assert "for the server only" not in text_of(result)
    assert text_of(result).count("No such file or directory") == 5
    assert set((await driver.bash("ls /")).split()) <= {
        *("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "tmp", "usr", "var"),
        "workspace",
    }


async def test_other_sessions_are_invisible(driver: Driver) -> None:
    other = Driver(driver.environment, driver.root, "s2")
    await other.bash("echo mine > note")
    assert await driver.bash("ls -A /workspace") == "(no output)"


async def test_the_servers_environment_does_not_reach_a_command(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-do-not-leak")
    seen = await driver.bash("env; cat /proc/*/environ | tr '\\0' '\\n'")
    assert "sk-do-not-leak" not in seen
    assert "HOME=/workspace" in seen
    assert str(driver.root) not in await driver.bash("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


async def test_only_the_workspace_and_temporary_folders_can_be_written(driver: Driver) -> None:
    for path in ("/usr/x", "/etc/x", "/x", "/dev/x", "/run/x", "/proc/sys/kernel/core_pattern", "/proc/self/comm"):
        assert "[exit code" in await driver.error("bash", command=f"echo core > {path}"), path
    assert await driver.bash("echo a > /workspace/x && echo b > /tmp/x && echo c > /dev/shm/x && cat /tmp/x") == "b"
    assert (driver.folder / "x").read_text() == "a\n"


async def test_a_command_has_no_privilege_and_can_not_make_namespaces(driver: Driver) -> None:
    assert await driver.bash("id -u; grep -h ^Cap /proc/self/status | sort -u | cut -f2 | uniq") == f"1000\n{'0' * 16}"
    assert "[exit code" in await driver.error("bash", command="unshare -U true")


async def test_network_is_there_only_when_unrestricted(driver: Driver) -> None:
    accepted: asyncio.Queue[bytes] = asyncio.Queue()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accepted.put(await reader.read())
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        connect = f"echo hello > /dev/tcp/127.0.0.1/{port}"
        assert "Connection refused" in await driver.error("bash", command=connect)
        assert await driver.bash("grep -o '[a-z0-9]*:' /proc/net/dev") == "lo:"
        assert "No such file" in await driver.error("bash", command="cat /etc/resolv.conf")
        # The other network is another sandbox, so the model hears that its shell is gone.
        assert "shell was restarted" in await driver.bash(connect, networking="unrestricted")
        assert await asyncio.wait_for(accepted.get(), 10) == b"hello\n"
        assert "nameserver" in await driver.bash("cat /etc/resolv.conf; ls /etc/ssl", networking="unrestricted")
        assert "certs" in await driver.bash("ls /etc/ssl", networking="unrestricted")
        assert "private" not in await driver.bash("ls /etc/ssl", networking="unrestricted")


async def test_limits_are_set_and_can_not_be_raised(driver: Driver) -> None:
    shown = await driver.bash("ulimit -Hv; ulimit -Ht; ulimit -Hf; ulimit -Hn; ulimit -Hc; ulimit -Hu")
    assert shown.split() == ["8388608", "600", "1048576", "4096", "0", "512"]
    assert "[exit code" in await driver.error("bash", command="ulimit -v unlimited")


async def test_a_file_above_the_limit_is_cut_off(driver: Driver) -> None:
    # Sparse: the write beyond the limit is refused without a byte on the disk.
    told = await driver.error("bash", command="dd if=/dev/zero of=big bs=1 count=1 seek=1073741824")
    assert "[exit code" in told
    assert (driver.folder / "big").stat().st_size <= 1024**3


async def test_a_program_that_leaks_memory_dies_alone(driver: Driver) -> None:
    await driver.error("bash", command="python3 -c \"bytearray(9 * 1024**3)\" || perl -e 'exit 1'")
    assert await driver.bash("echo still here") == "still here"


@pytest.mark.parametrize(
    ("added", "told"),
    [
        (["--share-net"], "sees the network interface"),
        (["--ro-bind", "/", "/var/lib"], "/var/lib of the host is visible"),
        (["--ro-bind", "/usr", "/home"], "/home of the host is visible"),
        (["--uid", "1001"], "runs as uid 1001"),
        (["--ro-bind", "/usr", "/workspace"], "/workspace can not be written"),
        (["--no-such-option"], "can't make a sandbox: bwrap: Unknown option"),
    ],
)
async def test_the_self_test_catches_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: list[str], told: str
) -> None:
    build = sandbox.build_options

    def with_hole(*arguments: object, **more: object) -> list[str]:
        options = build(*arguments, **more)  # pyright: ignore[reportArgumentType]
        at = options.index("--remount-ro")
        return options[:at] + added + options[at:]

    monkeypatch.setattr(sandbox, "build_options", with_hole)
    environment = LocalEnvironment(tmp_path / "root")
    assert told in "; ".join(await environment.problems())
