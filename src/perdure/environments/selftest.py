"""Does the sandbox hold on this host? Found out by trying, not by asking for versions."""

import secrets
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

from perdure.environments.processes import StillAlive, in_thread, settle
from perdure.environments.sandbox import SANDBOX_UID, SandboxMissing, find_bwrap, spawn_sandboxed
from perdure.environments.shell import Shell, ShellFailed

PROBE_WAIT_MS_MAX: Final = 10_000

_NAMESPACES_HINT: Final = (
    "; allow unprivileged user namespaces for the server (sysctl kernel.unprivileged_userns_clone=1,"
    " kernel.apparmor_restrict_unprivileged_userns=0; inside a container its seccomp and AppArmor profiles decide)"
)
# Each line it prints is a problem. The secret is a file of ours beside the workspace.
_PROBE: Final = """
[ -e {secret} ] && echo 'files of the host can be read in it'
for path in /root /home /etc/shadow /var/lib; do [ -e "$path" ] && echo "$path of the host is visible in it"; done
while IFS= read -r line; do
  name="${{line%%:*}}"; name="${{name// /}}"
  case "$line" in *:*) [ "$name" = lo ] || echo "it sees the network interface $name though networking is none" ;; esac
done < /proc/net/dev
[ "$UID" = {uid} ] || echo "it runs as uid $UID instead of {uid}"
[ -w /proc/sys/kernel/core_pattern ] && echo 'settings of the host kernel can be written in it'
IFS= read -r -d '' leaked < /proc/1/environ; [ -n "$leaked" ] && echo 'the environment of the server can be read in it'
printf %s {written} > /workspace/probe || echo '/workspace can not be written'
:
"""


async def find_sandbox(scratch: Path) -> Path | list[str]:
    """The bubblewrap to use, tried out in a folder below `scratch`; or the problems, each with what to do.

    Raises OSError where it can't be tried out now.
    """
    if sys.platform != "linux":
        return [f"the sandbox needs Linux; this is {sys.platform}"]
    try:
        bwrap = await in_thread(find_bwrap)
    except SandboxMissing as error:
        return [str(error)]
    probe = scratch / f"probe-{secrets.token_hex(8)}"
    workspace = probe / "workspace"
    try:
        workspace.mkdir(mode=0o700, parents=True)
        found = await _try_out(bwrap, probe, workspace)
    except (ShellFailed, StillAlive) as error:
        return [_explain(str(error))]
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return found or bwrap


async def _try_out(bwrap: Path, probe: Path, workspace: Path) -> list[str]:
    secret = probe / "secret"
    secret.write_text("not for tools")
    written = secrets.token_hex(8)
    shell = Shell(spawn_sandboxed(bwrap, workspace, "none"))
    await shell.start()
    try:
        script = _PROBE.format(secret=shlex.quote(str(secret)), uid=SANDBOX_UID, written=written)
        ran = await shell.run(script, PROBE_WAIT_MS_MAX)
    finally:
        await settle(shell.kill())
    if ran.end != "done":
        return [f"the sandbox did not answer within {PROBE_WAIT_MS_MAX} ms ({ran.end})"]
    found = [f"the sandbox does not hold: {line}" for line in ran.output.splitlines()]
    landed = workspace / "probe"
    if not found and not (landed.is_file() and landed.read_text() == written):
        found.append("the sandbox does not hold: what is written to /workspace does not reach the session's folder")
    return found


def _explain(reason: str) -> str:
    lowered = reason.lower()
    about_namespaces = any(word in lowered for word in ("namespace", "operation not permitted", "uid map", "userns"))
    return f"bubblewrap can't make a sandbox: {reason}{_NAMESPACES_HINT if about_namespaces else ''}"
