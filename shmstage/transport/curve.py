"""Who may talk over ``tcp://``: CURVE keys made per run, an allow-list at the bound end, ``AuthError`` at the other.

Every connection is encrypted, and each end proves that it holds the key the launcher handed out for it. The bound end
learns a client's public key in the handshake and answers from its list (ZAP, ZeroMQ's own question about admission,
asked inside the process). The connecting end watches its handshakes: ZeroMQ by itself would try for ever in silence.

Refused without a word: plain clients, and whatever is no ZeroMQ at all.
"""

from __future__ import annotations

import errno
import logging
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast, final

import zmq
from zmq.utils import z85

from shmstage.errors import AuthError, InputError
from shmstage.transport.zmq_socket import Context, Raw, ZmqSocket
from shmstage.wire.codec import FRAME_LIMIT_NBYTES

log = logging.getLogger(__name__)

#: The kernel does not tell that a host was cut off, so both ends ask each other. A connection on which nothing came
#: for the timeout is given up, and the connecting end makes another one.
HEARTBEAT_MS = 3_000
HEARTBEAT_TIMEOUT_MS = 12_000
#: of one attempt: the kernel's own limit is two minutes, and a host that is back would wait for its end
CONNECT_TIMEOUT_MS = 3_000
#: The server's is the longer one. So a server that is slow to let a client in is given up by the client, and a
#: handshake that ends because the other end closed the connection was refused.
HANDSHAKE_MS = 10_000
SERVER_HANDSHAKE_MS = 30_000
OVERHEAD_NBYTES = 33
"""What CURVE adds to a frame: name and nonce of the encrypted message, its tag, one byte of flags."""
REFUSALS = 3
"""Refused handshakes in a row that prove the server's key wrong; a server that dies in one refuses it, too."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"shmstage"
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_KEY = re.compile(f"[{re.escape(_Z85)}]{{40}}", re.ASCII)
_LOGGED_REFUSALS = 16
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)

_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_FAILED_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_FAILED_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_CONNECTED, _CLOSED, _DISCONNECTED = int(zmq.EVENT_CONNECTED), int(zmq.EVENT_CLOSED), int(zmq.EVENT_DISCONNECTED)
_WATCHED = _SUCCEEDED | _FAILED | _FAILED_PROTOCOL | _FAILED_AUTH | _CONNECTED | _CLOSED | _DISCONNECTED


@dataclass(frozen=True)
class CurveKeys:
    """A pair of keys, each as 40 characters of Z85. ``repr`` leaves the secret one out."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class ServerAuth:
    """The bound end's own keys, and the public keys of the clients that it lets in."""

    keys: CurveKeys
    allowed: frozenset[str]


@dataclass(frozen=True)
class ClientAuth:
    """The public key that the server has to prove, and the connecting end's own keys."""

    server_public: str
    keys: CurveKeys


def new_keys() -> CurveKeys:
    """A new pair, from the kernel's random numbers."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode("ascii"), secret.decode("ascii"))


def is_key(text: str) -> bool:
    """Whether ``text`` spells 32 bytes in Z85."""
    return _KEY.fullmatch(text) is not None and all(
        sum(_Z85.index(letter) * 85 ** (4 - place) for place, letter in enumerate(text[begin : begin + 5])) < 1 << 32
        for begin in range(0, 40, 5)
    )


def are_a_pair(keys: CurveKeys) -> bool:
    """Whether both are keys and the public one belongs to the secret one."""
    return (
        is_key(keys.public)
        and is_key(keys.secret)
        and zmq.curve_public(keys.secret.encode("ascii")) == keys.public.encode("ascii")
    )


def secure_server(socket: ZmqSocket, auth: ServerAuth, where: str) -> None:
    """To be done before ``bind``: only clients of the list get in. Raises ``InputError`` for what is no key."""
    _check_keys(auth.keys, where)
    for public in auth.allowed:
        if not is_key(public):
            raise InputError(f"the allow-list of {where} holds {public[:60]!r}, which is no public key; use new_keys()")
    raw = socket.raw
    raw.setsockopt(zmq.CURVE_SERVER, 1)
    raw.setsockopt(zmq.CURVE_SECRETKEY, auth.keys.secret.encode("ascii"))
    raw.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    # without it ZeroMQ lets everyone in whenever nobody answers its questions
    raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    _limit(raw, SERVER_HANDSHAKE_MS)
    socket.attended_by(Doorkeeper(socket.context, auth.allowed, where))


def secure_client(socket: ZmqSocket, auth: ClientAuth, endpoint: str) -> None:
    """To be done before ``connect``. Raises ``InputError`` for what is no key."""
    _check_keys(auth.keys, f"the client of {endpoint}")
    if not is_key(auth.server_public):
        raise InputError(f"{auth.server_public[:60]!r} is no public key of a server at {endpoint}; use new_keys()")
    raw = socket.raw
    raw.setsockopt(zmq.CURVE_SERVERKEY, auth.server_public.encode("ascii"))
    raw.setsockopt(zmq.CURVE_PUBLICKEY, auth.keys.public.encode("ascii"))
    raw.setsockopt(zmq.CURVE_SECRETKEY, auth.keys.secret.encode("ascii"))
    raw.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    _limit(raw, HANDSHAKE_MS)
    socket.attended_by(HandshakeWatch(socket.context, raw, auth, endpoint))


def _check_keys(keys: CurveKeys, whose: str) -> None:
    if not are_a_pair(keys):
        raise InputError(f"the keys of {whose} are no pair: public {keys.public[:60]!r} and a secret; use new_keys()")


def _limit(raw: Raw, handshake_ms: int) -> None:
    # applied to the encrypted frame; one over it ends a client's connection for good
    raw.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT_NBYTES + OVERHEAD_NBYTES)
    raw.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    raw.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    raw.setsockopt(zmq.HANDSHAKE_IVL, handshake_ms)


@final
class Doorkeeper:
    """Answers ZeroMQ's question whom to let in. A context has one, hence one allow-list per bound end."""

    def __init__(self, context: Context, allowed: frozenset[str], where: str) -> None:
        self._allowed = frozenset(public.encode("ascii") for public in allowed)
        self._where = where
        self._refused: set[tuple[bytes, bytes]] = set()
        self.raw = context.socket(zmq.REP)
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.bind(_ZAP_ENDPOINT)
        self._events = cast("Callable[[int], int]", self.raw.get)

    def attend(self) -> None:
        while self._events(_EVENTS) & _POLLIN:
            version, number, domain, address, _, mechanism, *credentials = self.raw.recv_multipart(_NOBLOCK)
            key = z85.encode(credentials[0]) if [len(c) for c in credentials] == [32] else b""
            is_known = (version, domain, mechanism) == (b"1.0", _DOMAIN, b"CURVE") and key in self._allowed
            status = [b"200", b"OK"] if is_known else [b"400", b"not on the allow-list"]
            self.raw.send_multipart([version, number, *status, b"", b""], _NOBLOCK)
            if not is_known:
                self._note(key, address)

    def check(self) -> None:
        """Who is refused is no trouble of the server's."""

    def _note(self, key: bytes, address: bytes) -> None:
        # each once, and not without end: a stranger must not fill the log
        if len(self._refused) < _LOGGED_REFUSALS and (key, address) not in self._refused:
            self._refused.add((key, address))
            log.warning(
                "%s refused a client from %s: its key %s is not on the allow-list", self._where,
                address.decode("ascii", "replace"), key.decode("ascii") or "of another kind",
            )  # fmt: skip


@final
class HandshakeWatch:
    """Learns from ZeroMQ's monitor why no handshake succeeds, and tells a wrong key from a server that is not there.

    ZeroMQ tries again by itself after most failures. Whatever it does not try again (refused by the allow-list,
    another mechanism, no ZeroMQ at all) is final here, too. A server whose key is another one than ours cannot even
    read the first message and closes the connection, as does a server that dies: several of those in a row, without
    one attempt at which nobody listened, are a wrong key.
    """

    def __init__(self, context: Context, main: Raw, auth: ClientAuth, endpoint: str) -> None:
        self._main = main
        self._auth = auth
        self._endpoint = endpoint
        self._in_handshake = False
        self._refusals = 0
        self._failure = ""
        main.monitor("inproc://handshakes", _WATCHED)
        self.raw = context.socket(zmq.PAIR)
        self.raw.setsockopt(zmq.LINGER, 0)
        # at a mark, the thread of ZeroMQ that reports would wait until somebody reads
        self.raw.setsockopt(zmq.RCVHWM, 0)
        self.raw.connect("inproc://handshakes")
        self._events = cast("Callable[[int], int]", self.raw.get)

    def attend(self) -> None:
        while self._events(_EVENTS) & _POLLIN:
            event, value = struct.unpack("=HI", self.raw.recv_multipart(_NOBLOCK)[0])
            if not self._failure:
                self._failure = self._take(event, value)
                if self._failure:
                    self._main.disconnect(self._endpoint)  # or a server with another key is asked for ever

    def check(self) -> None:
        if self._failure:
            raise AuthError(self._failure)

    def _take(self, event: int, value: int) -> str:
        """Why it is hopeless, or ""."""
        own, wanted = self._auth.keys.public, self._auth.server_public
        was_in_handshake, self._in_handshake = self._in_handshake, event == _CONNECTED
        if event in (_SUCCEEDED, _CLOSED):
            self._refusals = 0
        elif event == _FAILED:
            self._refusals += value in (errno.EPIPE, errno.ECONNRESET)
            if self._refusals >= REFUSALS:
                return (
                    f"{self._endpoint} closed {self._refusals} handshakes in a row: it does not hold the server key "
                    f"{wanted} that this process expects; both ends need the peers files of the same attempt"
                )
        elif event == _FAILED_AUTH:
            return (
                f"{self._endpoint} refused this process ({value}): its key {own} is not on the allow-list there; "
                "both ends need the peers files of the same attempt"
            )
        elif event == _FAILED_PROTOCOL or (event == _DISCONNECTED and was_in_handshake):
            return (
                f"what listens at {self._endpoint} does not prove the server key {wanted}: it speaks no CURVE, or is "
                "another program; both ends need the peers files of the same attempt"
            )
        return ""
