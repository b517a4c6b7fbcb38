"""``shmstage bundle``: import, record, show and verify frozen trajectories."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shmstage.errors import InputError, named, shown

if TYPE_CHECKING:
    from shmstage.packing.bundle import Bundle

#: this layer must not know the demo; what records is found by name when it is asked for
RECORDER = "shmstage.demo.record:main"

IMPORT_HELP = """\
Makes a bundle from records: JSON lines, a Parquet file (pip install 'shmstage[parquet]') or a .npz file, told by what
it begins with. --format auto takes the names from the first record. Our own, the fields of a trajectory:

  tokens          list of token ids, prompt and completion          required
  loss_mask       list of 0 and 1, or one for all tokens            required
  advantages      list of numbers, or one number for all tokens     required
  old_logprobs    list of numbers, 0.0 for the prompt               required
  ref_logprobs    list of numbers                                   all records or none
  returns         list of numbers                                   all records or none
  old_values      list of numbers                                   all records or none
  routing         [tokens or tokens - 1][layers][top_k] expert ids  all records or none
  experts         number of experts that routing chooses from       0, not known
  trajectory_id   text                                              line-<line number>
  group_id        text, the same for all answers to one prompt      the trajectory_id
  batch_index     prompts consumed between two weight syncs         of its group's first record,
                                                                    else (number - 1) // 64
  policy_version  weights that sampled it                           0
  length          how many tokens are real, the rest is padding     required in .npz, else all

An unknown key is an error. verl's names (DataProto): prompts, responses, attention_mask, response_mask,
rollout_log_probs or old_log_probs, token_level_rewards or advantages, uid. TRL's (GRPO): prompt_ids, prompt_mask,
completion_ids, completion_mask, logprobs or old_per_token_logps, rewards or advantages, group_id. Other keys of those
are left out, and named. Padding goes by the masks. In a .npz file every array has a row per record.

--advantages auto takes advantages that are there, else makes them of the rewards of a group: normalised,
(r - mean) / (std + epsilon), as GRPO does, with the epsilon of verl (1e-6) or TRL (1e-4); centred, r - mean (Dr. GRPO);
rewards, as they are. OUT must not exist."""

#: `packing/import_bundle.py` knows them; not imported to show the help
FORMATS = ("auto", "jsonl", "parquet", "npz", "verl", "trl")
ADVANTAGES = ("auto", "given", "normalised", "centred", "rewards")


def main(argv: Sequence[str]) -> int:
    """Run `shmstage bundle` with these arguments; returns the exit code, raises `ShmstageError`."""
    if argv and argv[0] == "record":
        # before argparse, which would take the recorder's options for ours
        module, _, name = RECORDER.partition(":")
        code: int = getattr(importlib.import_module(module), name)(list(argv[1:]))
        return code
    arguments = _parser().parse_args(argv)
    run = {"import": _import, "show": _show, "verify": _verify}[arguments.action]
    return run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shmstage bundle", description="Frozen trajectories on disk.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    importing = actions.add_parser(
        "import",
        help="make a bundle from JSON lines, Parquet or .npz, with our names, verl's or TRL's",
        description=IMPORT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    importing.add_argument("file", metavar="FILE")
    importing.add_argument("out", metavar="OUT", help="directory to make")
    importing.add_argument("--format", choices=FORMATS, default="auto", help="default: told by the file")
    importing.add_argument("--advantages", choices=ADVANTAGES, default="auto", help="of verl and trl records")
    actions.add_parser("record", help="make the demo bundle: real rollouts of the demo model")
    showing = actions.add_parser("show", help="counts, lengths and fields of a bundle")
    showing.add_argument("bundle", metavar="BUNDLE")
    verifying = actions.add_parser("verify", help="recompute every hash and digest; exit 2 if anything differs")
    verifying.add_argument("bundle", metavar="BUNDLE")
    for action in (importing, showing, verifying):
        action.add_argument("--json", action="store_true", help="exactly one JSON object on stdout")
    return parser


def _import(arguments: argparse.Namespace) -> int:
    from shmstage.packing.import_bundle import import_bundle

    imported = import_bundle(arguments.file, arguments.out, format=arguments.format, advantages=arguments.advantages)
    bundle = imported.bundle
    if arguments.json:
        _print_json({"path": str(bundle.path), **bundle.manifest["counts"], "notes": list(imported.notes)})
    else:
        print("\n".join([f"{bundle.path}: {_counts(bundle)}", *(named(note, 2000) for note in imported.notes)]))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from shmstage.packing.bundle import read_bundle

    bundle = read_bundle(arguments.bundle)
    summary = _summary(bundle)
    if arguments.json:
        _print_json(summary)
    else:
        _print_table(summary)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from shmstage.packing.bundle import read_bundle

    try:
        bundle = read_bundle(arguments.bundle)
    except InputError as error:
        if not arguments.json:
            raise
        _print_json({"path": arguments.bundle, "ok": False, "error": str(error)})
        return error.exit_code
    if arguments.json:
        _print_json({"path": str(bundle.path), "ok": True, **bundle.manifest["counts"]})
    else:
        print(f"{bundle.path}: every sha256 and digest is right; {_counts(bundle)}")
    return 0


def _counts(bundle: Bundle) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in bundle.manifest["counts"].items())


def _summary(bundle: Bundle) -> dict[str, Any]:
    import numpy as np

    from shmstage.packing.fields import carried_fields

    lengths = np.array([trajectory.length for trajectory in bundle.trajectories])
    fields: dict[str, dict[str, Any]] = {}
    for field in carried_fields(bundle.manifest["optional"]):
        arrays = [getattr(trajectory, field.source) for trajectory in bundle.trajectories]
        tail = list(arrays[0].shape[1:])
        fields[field.source] = {
            "packed": field.packed,
            "dtype": field.dtype,
            "shape": ["tokens", *tail],
            "nbytes": sum(array.nbytes for array in arrays),
        }
    versions = [trajectory.policy_version for trajectory in bundle.trajectories]
    percentiles = np.percentile(lengths, [0, 50, 90, 99, 100], method="higher")
    return {
        "path": str(bundle.path),
        "schema": bundle.manifest["schema"],
        "counts": bundle.manifest["counts"],
        "length": dict(zip(("min", "p50", "p90", "p99", "max"), percentiles.tolist(), strict=True)),
        "policy_versions": [min(versions), max(versions)],
        "experts": bundle.manifest["experts"],
        "fields": fields,
        "shards": len(bundle.manifest["shards"]),
        "nbytes": sum(shard["nbytes"] for shard in bundle.manifest["shards"]),
        "provenance": bundle.manifest["provenance"],
    }


def _print_table(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=Text(named(summary["path"], 4096)), show_header=False)
    for name, count in summary["counts"].items():
        table.add_row(name.replace("_", " "), f"{count:,}")
    table.add_row("length in tokens", "  ".join(f"{name} {value:,}" for name, value in summary["length"].items()))
    low, high = summary["policy_versions"]
    table.add_row("policy versions", f"{low}" if low == high else f"{low} to {high}")
    table.add_row("shards", f"{summary['shards']}, {summary['nbytes']:,} bytes")
    table.add_section()
    for name, field in summary["fields"].items():
        shape = ", ".join(map(str, field["shape"]))
        text = f"{field['dtype']} [{shape}] → {field['packed']}, {field['nbytes']:,} bytes"
        table.add_row(name, Text(text))  # Text: brackets are no markup
    table.add_section()
    for name, value in summary["provenance"].items():  # anybody's text: it must not move the cursor
        text = named(value, 2000) if isinstance(value, str) else shown(value, 2000)
        table.add_row(Text(named(name, 200)), Text(text))
    Console().print(table)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))
