"""API keys: their form, whether one is valid now, and how soon a revoked one stops.

A key is looked up at most once a second, so a revoked one is refused within that time; keys that hold streams open are looked up each
second, once a key, and their streams are told.
"""

import asyncio
import re
from base64 import urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final
from uuid import UUID

import msgspec

from perdure.domain.errors import Unavailable
from perdure.ports.catalog import Catalog, KeyRecord

PREFIX: Final = "pk_"
SECRET_BYTES: Final = 32
"""256 bits: nothing to guess, so a plain digest of it may be stored."""

HINT_CHARS: Final = 8
FORM: Final = re.compile(r"pk_[A-Za-z0-9_-]{43}")

CACHE_S: Final = 1.0
"""How long an answer of the catalog is believed: with the stream check, a revoked key stops within two seconds."""

CACHE_MAX: Final = 4_096
"""Keys, known or not, that are remembered for that second."""

CHECK_S: Final = 1.0
TOUCH_S: Final = 30.0
"""The last use of a key is written at most this often."""


class NewKey(msgspec.Struct, frozen=True):
    """A key at its birth: the only time its secret is at hand."""

    secret: str
    digest: bytes
    hint: str


def make_key(entropy: bytes) -> NewKey:
    """A key from 32 random bytes."""
    assert len(entropy) == SECRET_BYTES
    secret = PREFIX + urlsafe_b64encode(entropy).rstrip(b"=").decode()
    return NewKey(secret, digest_of(secret), secret[:HINT_CHARS])


def digest_of(secret: str) -> bytes:
    """What is stored of a key."""
    return sha256(secret.encode()).digest()


class _Cached(msgspec.Struct, frozen=True):
    record: KeyRecord | None
    until_s: float


class Watch:
    """Tells the holder of a stream when its key is revoked. Always `close`."""

    def __init__(self, authenticator: "Authenticator", key_id: UUID, on_revoked: Callable[[], None]) -> None:
        self._authenticator = authenticator
        self.key_id = key_id
        self.on_revoked = on_revoked

    def close(self) -> None:
        """Stop watching. Repeatable."""
        self._authenticator.unwatch(self)


class Authenticator:
    """Knows the valid keys of the last second. `run` must be running for watches and for the time of last use."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        cache_s: float = CACHE_S,
        check_s: float = CHECK_S,
        on_trouble: Callable[[Exception], None] | None = None,
    ) -> None:
        """`on_trouble` is told of errors that no outage explains; the checks go on all the same."""
        self._catalog = catalog
        self._on_trouble = on_trouble
        self._now = now
        self._cache_s = cache_s
        self._check_s = check_s
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self._looking: dict[bytes, asyncio.Task[KeyRecord | None]] = {}
        self._digests: dict[UUID, bytes] = {}
        self._watches: dict[UUID, set[Watch]] = {}
        self._touched: dict[UUID, datetime] = {}
        self._used: dict[UUID, datetime] = {}

    async def authenticate(self, secret: str) -> KeyRecord | None:
        """The valid key behind a secret, or None. Raises Unavailable when it can't be looked up."""
        if FORM.fullmatch(secret) is None:
            return None
        digest = digest_of(secret)
        record = await self._find(digest)
        if record is not None:
            self._note_use(record.id)
        return record

    async def still_valid(self, key_id: UUID) -> bool:
        """Whether a key that authenticated before is valid, by an answer at most a second old."""
        digest = self._digests.get(key_id)
        return digest is not None and await self._find(digest) is not None

    async def _find(self, digest: bytes) -> KeyRecord | None:
        cached = self._cache.get(digest)
        if cached is not None and cached.until_s > asyncio.get_running_loop().time():
            return cached.record
        looking = self._looking.get(digest)
        if looking is None:
            looking = self._looking[digest] = asyncio.create_task(self._look_up(digest))
            looking.add_done_callback(lambda _: self._looking.pop(digest, None))
        # Shielded: a client that goes away must not take the answer from those who wait for the same.
        return await asyncio.shield(looking)

    async def _look_up(self, digest: bytes) -> KeyRecord | None:
        asked_s = asyncio.get_running_loop().time()
        record = await self._catalog.find_key(digest)
        if record is not None and record.revoked_at is not None:
            record = None
        self._cache[digest] = _Cached(record, asked_s + self._cache_s)
        self._cache.move_to_end(digest)
        if len(self._cache) > CACHE_MAX:
            self._cache.popitem(last=False)
        if record is not None:
            self._digests[record.id] = digest
        return record

    def _note_use(self, key_id: UUID) -> None:
        now = self._now()
        last = self._touched.get(key_id)
        if last is None or (now - last).total_seconds() >= TOUCH_S:
            self._touched[key_id] = now
            self._used[key_id] = now

    def watch(self, key_id: UUID, on_revoked: Callable[[], None]) -> Watch:
        """Call `on_revoked` once the key is found revoked."""
        watch = Watch(self, key_id, on_revoked)
        self._watches.setdefault(key_id, set()).add(watch)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Forget a watch."""
        watches = self._watches.get(watch.key_id)
        if watches is None:
            return
        watches.discard(watch)
        if not watches:
            del self._watches[watch.key_id]

    async def run(self) -> None:
        """Check watched keys and write last uses, each second, until cancelled. Runs in every process that serves requests."""
        while True:
            await asyncio.sleep(self._check_s)
            for work in (self.check_watched, self.flush):
                try:
                    await work()
                except Unavailable:
                    # Nobody is cut off because the catalog is away: requests are refused meanwhile, and streams carry no news.
                    pass
                except Exception as error:  # noqa: BLE001  a supervised loop
                    if self._on_trouble is not None:
                        self._on_trouble(error)

    async def check_watched(self) -> None:
        """Look up every key that holds a stream open, and tell the streams of those that are revoked."""
        for key_id in list(self._watches):
            digest = self._digests.get(key_id)
            if digest is not None and await self._look_up(digest) is not None:
                continue
            for watch in list(self._watches.get(key_id, ())):
                watch.on_revoked()

    async def flush(self) -> None:
        """Write the uses noted since the last time."""
        if not self._used:
            return
        used, self._used = self._used, {}
        try:
            await self._catalog.touch_keys(used)
        except BaseException:
            self._used = used | self._used
            raise
