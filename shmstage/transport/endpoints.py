"""Where a role of a run listens: the same short path, computed by both ends from run id and role alone."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shmstage.errors import TransportError, shown

PATH_LIMIT_NBYTES = 107
"""What ``sockaddr_un`` holds besides its final zero byte."""

_TCP = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([1-9][0-9]{0,4})", re.ASCII)
_FALLBACK_BASE = Path("/tmp")
# "/shmstage-<uid>/<8 of role>-<16 of hash>": what comes after the base directory, at its longest.
_TAIL_NBYTES = len("/shmstage-4294967295/12345678-0123456789abcdef.lock")


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """This user's directory for sockets, mode 0700: under ``XDG_RUNTIME_DIR`` or the temporary directory.

    A base directory too long for a socket path is passed over for ``/tmp``, at both ends alike. Raises
    ``TransportError`` if the directory belongs to someone else or is a link.
    """
    named = environ.get("XDG_RUNTIME_DIR", "")
    base = Path(named) if named and os.path.isdir(named) else Path(environ.get("TMPDIR") or tempfile.gettempdir())
    if len(os.fsencode(base)) + _TAIL_NBYTES > PATH_LIMIT_NBYTES or not base.is_dir():
        base = _FALLBACK_BASE
    path = base / f"shmstage-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise TransportError(
                f"{path} is not a directory of user {os.getuid()}; remove it or set XDG_RUNTIME_DIR to one that is"
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise TransportError(f"cannot make {path}: {error.strerror}; set XDG_RUNTIME_DIR to a writable one") from error
    return path


def endpoint_for(run_id: str, role: str) -> str:
    """``ipc://`` and a path of at most 107 bytes for this run's ``role``, whatever their lengths."""
    digest = hashlib.sha256(f"{run_id}\0{role}".encode(errors="surrogatepass")).hexdigest()[:16]
    readable = "".join(letter for letter in role[:8] if letter.isascii() and letter.isalnum())
    return f"ipc://{runtime_dir()}/{readable}-{digest}"


def socket_path(endpoint: str) -> Path:
    """The path of an ``ipc://`` endpoint. Raises ``TransportError`` for another scheme or a path too long."""
    scheme, separator, name = endpoint.partition("://")
    if not separator or scheme != "ipc" or not name.startswith("/"):
        raise TransportError(f"endpoint {endpoint!r} is refused; only ipc:// with an absolute path is open to anyone")
    nbytes = len(os.fsencode(name))
    if nbytes > PATH_LIMIT_NBYTES:
        raise TransportError(
            f"socket path {name!r} has {nbytes} bytes; the limit is {PATH_LIMIT_NBYTES}; use endpoint_for()"
        )
    return Path(name)


def tcp_base(address: str) -> str:
    """``tcp://`` and one numeric address, without a port. Raises ``TransportError`` for a name or no single host."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        parsed = None
    if parsed is None or parsed.is_unspecified or parsed.is_multicast or "%" in address:
        raise TransportError(
            f"{shown(address)} is no address of one host; give a numeric one, as 10.0.0.1, that its peers can reach"
        )
    return f"tcp://[{parsed}]" if parsed.version == 6 else f"tcp://{parsed}"


def check_tcp_endpoint(endpoint: str) -> str:
    """The endpoint as it is. Raises ``TransportError`` unless it is ``tcp://``, one numeric address and a port."""
    found = _TCP.fullmatch(endpoint)
    if found is None or int(found[3]) > 65535:
        raise TransportError(f"endpoint {shown(endpoint)} is refused; a host's is tcp://ADDRESS:PORT, in numbers")
    tcp_base(found[1] or found[2])
    return endpoint
