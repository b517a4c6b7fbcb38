"""What a bundle's manifest and first header say about micro-batches, and who lies is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "packing"))
from trajectory_making import make_trajectory

from shmstage.budget.bundle_facts import BundleFacts, bundle_facts
from shmstage.budget.formula import forecast
from shmstage.budget.inputs import fields_of_bundle, fields_of_trajectory, inputs_of
from shmstage.errors import BundleError
from shmstage.orchestrator.layouts import layout_of
from shmstage.packing.bundle import read_bundle, write_bundle
from shmstage.settings import ROUTING_ENCODINGS, Settings


def make_bundle(path: Path, optional: frozenset[str] = frozenset({"routing", "returns"})) -> Path:
    made = [make_trajectory(n, name=f"t{n}", seed=n, optional=optional, layers=5, top_k=3) for n in (7, 12, 9)]
    write_bundle(path, made, provenance={})
    return path


def test_a_bundle_says_exactly_what_its_micro_batches_are(tmp_path: Path) -> None:
    """L2: the layout from the manifest is the one the orchestrator makes from the trajectories themselves."""
    path = make_bundle(tmp_path / "b")
    facts = bundle_facts(path)
    nbytes = sum(file.stat().st_size for file in path.glob("shard-*"))
    assert facts == BundleFacts(frozenset({"routing", "returns"}), 5, 3, 16, tokens=28, longest=12, nbytes=nbytes)
    first = read_bundle(path).trajectories[0]
    for encoding in ROUTING_ENCODINGS:
        settings = Settings(rows=3, tokens=64, routing_encoding=encoding, max_real_tokens=100)
        for late in ((), ("ref_per_token_logps",)):
            want = layout_of(first, settings, late=late)
            for fields in (fields_of_bundle(facts, settings, late), fields_of_trajectory(first, settings, late)):
                assert forecast(inputs_of(settings, fields)).layout == want


def test_a_bundle_without_routing_has_none(tmp_path: Path) -> None:
    facts = bundle_facts(make_bundle(tmp_path / "b", frozenset()))
    assert (facts.layers, facts.top_k, facts.experts) == (0, 0, 0)


def header(*, length: int | None = None, text: bytes = b"{}") -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (b"", "a header of 0 bytes"),
        (header(length=1 << 40), r"a header of 1099511627776 bytes, at most 1048576"),
        (header(text=b"not json"), "names no routing"),
        (header(text=b"[" * 100_000), "names no routing"),
        (header(), "names no routing"),
        (header(text=json.dumps({"routing": {"shape": [1, 2]}}).encode()), "names no routing"),
        (header(text=json.dumps({"routing": {"shape": [1, 0, 2]}}).encode()), "layers and top-k"),
        (header(text=json.dumps({"routing": {"shape": [1, 2, 1 << 60]}}).encode()), "layers and top-k"),
        (header(text=json.dumps({"routing": {"shape": [1, 2.5, True]}}).encode()), "layers and top-k"),
    ],
    ids=["empty", "huge", "no-json", "deep", "nothing", "two-sizes", "zero", "beyond", "no-integers"],
)
def test_a_shard_that_lies_about_its_routing_is_refused(shard: bytes, said: str, tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b")
    (path / "shard-00000.safetensors").write_bytes(shard)
    with pytest.raises(BundleError, match=said):
        bundle_facts(path)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read: No such file or directory; give the directory of a bundle"):
        bundle_facts(tmp_path)
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(BundleError, match="not a regular file"):
        bundle_facts(tmp_path)
