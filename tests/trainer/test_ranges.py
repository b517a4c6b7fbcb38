from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    flags = "--xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-m", "trainer.ranges_on_devices"],
        cwd=TESTS,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    output: dict[str, Any] = json.loads(result.stdout)
    return output


def part(rows: list[int], tokens: list[int]) -> dict[str, Any]:
    return {"completion_ids": [rows, tokens], "row": [rows], "scale": []}


def test_rows_over_all_devices_give_each_host_whole_rows(found: dict[str, Any]) -> None:
    assert [host["ranges"] for host in found["rows.2"]] == [part([0, 4], [0, 32]), part([4, 8], [0, 32])]
    assert [host["tiles"] for host in found["rows.2"]] == [[8, 1]] * 2


def test_a_host_that_has_all_token_parts_of_its_rows_holds_them_whole(found: dict[str, Any]) -> None:
    wanted = [part([begin, begin + 2], [0, 32]) for begin in (0, 2, 4, 6)]
    assert [host["ranges"] for host in found["grid.4"]] == wanted
    assert found["grid.4"][0]["tiles"] == [4, 2]


def test_tokens_can_be_cut_between_hosts(found: dict[str, Any]) -> None:
    assert [host["ranges"] for host in found["tokens.2"]] == [part([0, 8], [0, 16]), part([0, 8], [16, 32])]
    assert found["tokens.2"][0]["tiles"] == [4, 2]


def test_what_is_not_cut_lies_whole_on_every_host(found: dict[str, Any]) -> None:
    assert [host["ranges"] for host in found["replicated.2"]] == [part([0, 8], [0, 32])] * 2
    assert found["replicated.2"][0]["tiles"] == [1, 1]


def test_packed_fields_are_cut_by_rows_and_tokens(found: dict[str, Any]) -> None:
    assert found["packed.2"] == [[4, 8], [0, 32]]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("odd rows", ["'completion_ids' [6, 32]", "axis 0 of size 6", "4 devices along data", "a multiple of 4"]),
        ("odd tokens", ["'completion_ids' [8, 31]", "axis 1 of size 31", "2 devices along seq", "a multiple of 2"]),
        ("diagonal", ["no rectangle", "((0, 2), (0, 16))", "((2, 4), (16, 32))"]),
        ("no device", ["lies on no device of process 0"]),
        ("wrong part", ["(2, 16)", "(4, 32)", "ask for ``ranges`` again"]),
    ],
)
def test_what_cannot_be_cut_is_refused_with_values_and_remedy(
    found: dict[str, Any], what: str, words: list[str]
) -> None:
    for word in words:
        assert word in found[what]


@pytest.mark.parametrize("cut", ["rows", "tokens"])
def test_every_device_is_given_its_own_part_of_what_its_host_holds(found: dict[str, Any], cut: str) -> None:
    assert found[f"spread {cut}"] == ""


def test_a_host_copies_what_it_holds_whichever_replica_that_is(found: dict[str, Any]) -> None:
    assert found["copied"] == ["", ""]
    assert "of the wanted 16 elements this process's devices hold 8" in found["not all here"]


def test_tiles_of_routing_are_cut_like_rows_and_tokens_and_routing_without_tiles_is_not(found: dict[str, Any]) -> None:
    assert len(found["tiled"]) == 4
    for name, (tiles, flat) in found["tiled"].items():
        assert (tiles, flat) == (["data", "seq"], []), name
