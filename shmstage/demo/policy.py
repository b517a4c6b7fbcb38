"""Parameters on disk: one safetensors file of bfloat16 arrays named by their path in the tree."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from shmstage.demo.model import Params
from shmstage.errors import BundleError

POLICY_FILE = "policy.safetensors"
_REMEDY = "record the bundle again with `shmstage bundle record`"


def rounded(params: Params) -> Params:
    """``params`` as they come back from disk: float32 arrays of values that bfloat16 holds exactly."""
    return {
        name: rounded(leaf) if isinstance(leaf, dict) else leaf.astype(jnp.bfloat16).astype(jnp.float32)
        for name, leaf in params.items()
    }


def encode_policy(params: Params) -> bytes:
    """The file's bytes; the same parameters give the same bytes."""
    flat = {
        f"{outer}/{inner}" if inner else outer: np.asarray(leaf).astype(ml_dtypes.bfloat16)
        for outer, value in params.items()
        for inner, leaf in (value.items() if isinstance(value, dict) else [("", value)])
    }
    data: bytes = safetensors_numpy.save(dict(sorted(flat.items())))
    return data


def read_policy(directory: Path) -> Params:
    """The float32 parameters that sampled the bundle in ``directory``.

    Raises ``BundleError`` if they are missing or are not the ones that the bundle's manifest names.
    """
    file = directory / POLICY_FILE
    try:
        data = file.read_bytes()
        provenance = json.loads((directory / "manifest.json").read_bytes())["provenance"]
        want = provenance["policy"]["sha256"]
    except OSError as error:
        raise BundleError(f"{error.filename}: {error.strerror}; {_REMEDY}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError(f"{directory} does not say which policy sampled it; {_REMEDY}") from None
    got = hashlib.sha256(data).hexdigest()
    if got != want:
        raise BundleError(f"{file} has sha256 {got}, the manifest says {want}; {_REMEDY}")
    try:
        # The library's numpy reader does not know bfloat16, though its writer does; its raw reader hands out bytes.
        flat: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise BundleError(f"{file} is not a safetensors file: {error}; {_REMEDY}") from None
    params: Params = {}
    for name, entry in flat:
        if entry["dtype"] != "BF16":
            raise BundleError(f"{file}: {name} has dtype {entry['dtype']}, wants BF16; {_REMEDY}")
        outer, _, inner = name.partition("/")
        array = np.frombuffer(entry["data"], ml_dtypes.bfloat16).reshape(entry["shape"])
        leaf = jnp.asarray(array.astype(np.float32))
        if inner:
            params.setdefault(outer, {})[inner] = leaf
        else:
            params[outer] = leaf
    return params
