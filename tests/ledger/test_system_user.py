"""As root, two first starts at once on a fresh machine: one system user, and both find it."""

import os
import pwd
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perdure.postgres import system_user as module
from perdure.postgres.system_user import SYSTEM_USER, system_user
from perdure.postgres.waiting import EmbeddedPostgresError, FileLock, Patience

PATIENCE_S = 20.0


class Users:
    """A list of users beside the system's own: `useradd` on the path appends to it with the next id."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.list = folder / "users"
        self.list.touch()
        self.useradd = folder / "useradd"
        self.after_miss: Callable[[], object] = lambda: None
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(pwd, "getpwnam", self.getpwnam)
        monkeypatch.setattr(module, "_USERS", str(folder))

    def let_create(self, *, works: bool = True) -> None:
        last = f'for name; do :; done\necho "$name" >> "{self.list}"' if works else "exit 1"
        self.useradd.write_text(f"#!/bin/sh\n{last}\n")
        self.useradd.chmod(0o755)

    @property
    def names(self) -> list[str]:
        return self.list.read_text().split()

    def getpwnam(self, name: str) -> pwd.struct_passwd:
        if name not in self.names:
            self.after_miss()
            raise KeyError(name)
        number = 900 + len(self.names)
        return pwd.struct_passwd((name, "x", number, number, "", "/", "/usr/sbin/nologin"))


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Users:
    return Users(tmp_path, monkeypatch)


def test_two_first_starts_at_once_create_one_user(users: Users) -> None:
    users.let_create()
    both_missed = threading.Barrier(2, timeout=PATIENCE_S)
    missed = threading.local()

    def wait_for_the_other() -> None:
        if not getattr(missed, "before", False):
            missed.before = True
            both_missed.wait()

    users.after_miss = wait_for_the_other
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: system_user(Patience.of(PATIENCE_S)), range(2)))
    assert users.names == [SYSTEM_USER]
    assert found == [(901, 901), (901, 901)]


def test_a_user_that_is_there_needs_no_lock(users: Users) -> None:
    users.list.write_text(f"{SYSTEM_USER}\n")
    held = FileLock(os.open(users.list.parent, os.O_RDONLY))
    try:
        assert held.try_exclusive()
        assert system_user(Patience.of(0.0)) == (901, 901)
    finally:
        held.close()


def test_another_creator_that_never_ends_is_named(users: Users) -> None:
    users.let_create()
    held = FileLock(os.open(users.list.parent, os.O_RDONLY))
    try:
        assert held.try_exclusive()
        with pytest.raises(EmbeddedPostgresError, match="has been creating system user 'pgserver' for too long"):
            system_user(Patience.of(0.0))
    finally:
        held.close()
    assert users.names == []


def test_where_nobody_can_be_created_postgres_serves(users: Users) -> None:
    users.let_create(works=False)
    with pytest.raises(EmbeddedPostgresError, match="could not be created: create it, or run as a normal user"):
        system_user(Patience.of(PATIENCE_S))
    users.list.write_text("postgres\n")
    assert system_user(Patience.of(PATIENCE_S)) == (901, 901)
