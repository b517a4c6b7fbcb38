"""``shmstage budget``: what a run would need, in bytes, against what this machine (or a given limit) leaves."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from shmstage.budget.bounds import bounds_from
from shmstage.budget.bundle_facts import bundle_facts
from shmstage.budget.fields import MANDATORY_WORDS, MicrobatchFields, words
from shmstage.budget.formula import MAX_LEAVES, Inputs, Platform
from shmstage.budget.inputs import PROCESS_NBYTES, fields_of_bundle, inputs_of
from shmstage.budget.platform import platform_here
from shmstage.budget.report import Report, as_json, print_report, report_on
from shmstage.budget.sizes import in_words, parse_size
from shmstage.errors import SettingsError, shown
from shmstage.launch.command import CommandParser, json_on_failure
from shmstage.launch.run_command import add_settings, resolve_args
from shmstage.launch.run_directory import DEMO_SOURCE, completed
from shmstage.operate.budget_settings import PARAM_DTYPES, add_budget_flags, name_of, take_table
from shmstage.packing.fields import late_fields
from shmstage.settings import Resolved, Settings

LOW_HEADROOM = 4
OF_THE_BUNDLE = ("layers", "top_k", "word_fields")


def main(argv: Sequence[str]) -> int:
    with json_on_failure("--json" in argv):
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.live is not None:
        if args.limit or args.device_memory or args.strict:
            raise SettingsError("--live judges nothing; --limit, --device-memory and --strict are of no use there")
        from shmstage.operate.budget_live import show_live

        return show_live(args.live, args)
    resolved = resolve_args(args)
    resolved = Resolved(completed(resolved.settings), resolved.origins, resolved.budget)
    take_table(args, resolved.budget, args.config)
    inputs, assumed = inputs_from(args, resolved)
    bounds = bounds_from(args.limit or [], args.device_memory)
    report = report_on(inputs, bounds, assumed, processes_assumed=args.process_bytes is None)
    if args.json:
        said = as_json(report)
        print(json.dumps({**said, **({"origins": origins(args, resolved, inputs)} if args.explain else {})}))
    else:
        _print(report, origins(args, resolved, inputs) if args.explain else None)
    return exit_code(report, strict=args.strict)


def exit_code(report: Report, *, strict: bool) -> int:
    """0 fits · 1 does not · 4 fits, but with less than a tenth to spare (only if that was asked about)."""
    if report.judgement.verdict == "does not fit":
        return 1
    return LOW_HEADROOM if strict and report.judgement.verdict == "low headroom" else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="shmstage budget",
        description="What a run needs at steady state, at a checkpoint and at a restart, and whether it fits. Takes "
        "the settings of `shmstage run`; nothing is allocated.",
    )
    add_settings(parser)
    add_budget_flags(parser)
    group = parser.add_argument_group("verdict and output")
    group.add_argument("--strict", action="store_true", help=f"less than a tenth to spare is exit {LOW_HEADROOM}")
    group.add_argument("--explain", action="store_true", help="also say where each value came from, and each formula")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout, sizes in bytes")
    group.add_argument("--live", metavar="RUN", help="beside the forecast, what a run (OUT, id or prefix) uses now")
    return parser


def inputs_from(
    args: argparse.Namespace, resolved: Resolved, *, journaled: bool | None = None
) -> tuple[Inputs, list[str]]:
    """The formula's input and, in words, what in it was assumed. Raises ``SettingsError``, ``BundleError``.

    ``take_table`` has been called on ``args``. ``journaled``: whether the source is known to be, ``None``: not known.
    """
    settings = resolved.settings
    assumed: list[str] = []
    own_source = bool(settings.source) and settings.source != DEMO_SOURCE
    if own_source and journaled is None:
        assumed.append("the source cannot be replayed, so it is journaled; one with replayable = True takes no journal")
    fields = _fields(args, resolved, assumed)
    trained = bundle_facts(settings.bundle) if settings.bundle is not None else None
    evaluation, evaluation_nbytes, longest = None, 0, trained.longest if trained is not None else 0
    if settings.eval_bundle is not None:
        facts = bundle_facts(settings.eval_bundle)
        evaluation, evaluation_nbytes = fields_of_bundle(facts, settings), facts.nbytes
        longest = max(longest, facts.longest) if longest else 0
    inputs = inputs_of(
        settings, fields, evaluation, evaluation_nbytes=evaluation_nbytes,
        held_input_nbytes=trained.nbytes if trained is not None else 0, longest=longest,
        fill=_fill(args), hosts=_at_least(args, "hosts") or 1, replay=bool(args.replay),
        journaled=own_source if journaled is None else journaled, process_nbytes=_process_nbytes(args),
        platform=_platform(args, assumed), **_state(args, assumed),
    )  # fmt: skip
    if inputs.weight_sync and inputs.param_leaves > MAX_LEAVES:
        raise SettingsError(
            f"{name_of(args, 'param_leaves')} {inputs.param_leaves}: weight_sync publishes at most {MAX_LEAVES}; "
            "let the engine's weights() stack them (layers into one array each), or use weight_sync = off"
        )
    _note_assumptions(args, inputs, assumed)
    return inputs, assumed


def _fields(args: argparse.Namespace, resolved: Resolved, assumed: list[str]) -> MicrobatchFields:
    settings = resolved.settings
    late = late_fields(settings)
    if settings.bundle is not None:
        for name in OF_THE_BUNDLE:
            if getattr(args, name) is not None:
                flag = name_of(args, name)
                raise SettingsError(f"{flag} {getattr(args, name)}: the bundle {settings.bundle} says it; drop {flag}")
        return fields_of_bundle(bundle_facts(settings.bundle), settings, late)
    if args.word_fields is None:
        assumed.append(
            f"word_fields = {MANDATORY_WORDS}: the mandatory fields and those the settings ask for; a bundle "
            "(--bundle) would say it exactly, --word-fields sets it"
        )
    optional, extra = words(args.word_fields if args.word_fields is not None else MANDATORY_WORDS)
    layers, top_k, experts = _routing(args, settings)
    if not layers:
        assumed.append("no routing is carried; --layers, --top-k and --experts say otherwise")
    return MicrobatchFields(optional, layers, top_k, experts, late, extra, settings.routing_encoding)


def _routing(args: argparse.Namespace, settings: Settings) -> tuple[int, int, int]:
    if args.layers is None and args.top_k is None:
        if args.experts is not None or args.routing_encoding not in (None, "dense"):
            raise SettingsError("--experts and --routing-encoding are about routing; give --layers and --top-k, too")
        return 0, 0, 0
    if args.layers is None or args.top_k is None:
        raise SettingsError("routing has layers and a top-k; give both --layers and --top-k")
    experts = settings.experts
    if experts and args.top_k > experts:
        raise SettingsError(f"--top-k {args.top_k} of --experts {experts}; a token cannot choose more than there are")
    return _at_least(args, "layers"), _at_least(args, "top_k"), experts


def _state(args: argparse.Namespace, assumed: list[str]) -> dict[str, Any]:
    """Parameters, gradient sums and optimizer state, as ``Inputs`` names them."""
    if args.param_bytes is None:
        for name in ("optimizer_bytes", "param_dtype", "param_leaves"):
            if getattr(args, name) is not None:
                raise SettingsError(f"{name_of(args, name)} without --param-bytes; give both")
        assumed.append("no parameters are counted; --param-bytes says how many bytes they have on one host")
        return {}
    params = parse_size(args.param_bytes, "param_bytes")
    if args.param_dtype is None:
        assumed.append("parameters are float32: gradients and their sums take as many bytes; --param-dtype sets it")
    found = {
        "param_nbytes": params,
        "param_leaves": _at_least(args, "param_leaves"),
        # the engine sums in float32 at least
        "sums_nbytes": params * 4 // PARAM_DTYPES[args.param_dtype or "float32"],
    }
    if args.optimizer_bytes is None:
        assumed.append(
            "the optimizer keeps two numbers of the parameters' dtype per parameter, as Adam does; --optimizer-bytes "
            "sets it"
        )
        return {**found, "optimizer_nbytes": 2 * params}
    return {**found, "optimizer_nbytes": parse_size(args.optimizer_bytes, "optimizer_bytes")}


def _process_nbytes(args: argparse.Namespace) -> int:
    return PROCESS_NBYTES if args.process_bytes is None else parse_size(args.process_bytes, "process_bytes")


def _platform(args: argparse.Namespace, assumed: list[str]) -> Platform:
    if args.platform == "cpu" and args.device_memory is not None:
        raise SettingsError("--device-memory is about an accelerator's memory; drop it or use --platform accelerator")
    if args.platform is None:
        if args.device_memory is not None:
            return "accelerator"
        found = platform_here(os.environ)
        assumed.append(f"platform = {found}: as it looks here; --platform sets it")
        return found
    platform: Platform = args.platform
    return platform


def _fill(args: argparse.Namespace) -> Fraction:
    if args.fill is None:
        return Fraction(1)
    name = f"{name_of(args, 'fill')} {args.fill[:80]!r}"
    try:
        fill = Fraction(args.fill)
    except (ValueError, ZeroDivisionError):
        raise SettingsError(f"{name} is no number; give a part above 0, up to 1") from None
    if not 0 < fill <= 1:
        raise SettingsError(f"{name}: give a part above 0, up to 1")
    return fill


def _at_least(args: argparse.Namespace, key: str, least: int = 1) -> int:
    """A count that was given, 0 if it was not."""
    value: int | None = getattr(args, key)
    if value is None:
        return 0
    if not least <= value <= 1 << 20:
        raise SettingsError(f"{name_of(args, key)} {shown(value)}: give {least} to {1 << 20}")
    return value


def _note_assumptions(args: argparse.Namespace, inputs: Inputs, assumed: list[str]) -> None:
    ragged = inputs.fields.has_routing and inputs.fields.encoding != "dense"
    if args.fill is None and not inputs.held_input_nbytes:
        assumed.append("fill = 1: every token is real; --fill sets it")
    elif ragged and inputs.capacity < inputs.host_rows * inputs.tokens and not inputs.max_real_tokens:
        assumed.append(f"max_real_tokens = {inputs.capacity}, as --fill says: a run needs it for slots of that size")
    if not inputs.held_input_nbytes:
        assumed.append(
            f"the trajectories of {inputs.held_microbatches} micro-batches are held; larger batches of a source only "
            "max_held_bytes stops"
        )
    if inputs.hosts > 1:
        assumed.append(f"{inputs.host_rows} of {inputs.rows} rows per host; every node holds all trajectories")
    if 0 < inputs.max_held_nbytes < inputs.row_nbytes:
        assumed.append(
            f"no group is larger than max_held_bytes = {inputs.max_held_nbytes}: a run refuses one that is, and a "
            f"single full row has {in_words(inputs.row_nbytes)}"
        )
    if inputs.saves_every != inputs.checkpoint_every:
        assumed.append("max_held_bytes may force a checkpoint at any step: counted as checkpoint_every = 1")
    if inputs.param_nbytes:
        assumed += _about_parameters(inputs)
    assumed.append("activations, compiled programs and what plug-ins keep are not counted")
    if args.process_bytes is None:
        assumed.append(
            f"the processes take {in_words(PROCESS_NBYTES)}, as measured on CPU: an accelerator's libraries take more; "
            "--process-bytes sets it"
        )


def _about_parameters(inputs: Inputs) -> list[str]:
    found = []
    if not inputs.scores:
        found.append(
            "nothing is scored, so nothing is kept to score with; an OptaxEngine with logps_fn keeps the parameters it "
            "began with all the same"
        )
    if inputs.weight_sync and not inputs.param_leaves:
        found.append(
            f"the weights pool is at least of that size: every array is padded to 64 bytes, and more than {MAX_LEAVES} "
            "of them weight_sync refuses; --param-leaves says how many there are"
        )
    return found


def origins(args: argparse.Namespace, resolved: Resolved, inputs: Inputs) -> dict[str, dict[str, object]]:
    """Every value and where it came from."""
    values = json.loads(resolved.settings.model_dump_json())
    found = {key: {"value": value, "origin": resolved.origins[key]} for key, value in values.items()}
    fields, bundle = inputs.fields, resolved.settings.bundle
    taken: dict[str, object] = {
        "layers": fields.layers, "top_k": fields.top_k,
        "word_fields": sum(len(field.shape) == 2 for field in fields.layout(1, 1).fields),
        "fill": str(inputs.fill), "platform": inputs.platform,
        "param_bytes": inputs.param_nbytes, "optimizer_bytes": inputs.optimizer_nbytes, "hosts": inputs.hosts,
        "param_dtype": args.param_dtype or "float32", "param_leaves": inputs.param_leaves, "replay": inputs.replay,
        "process_bytes": inputs.process_nbytes, "device_memory": args.device_memory, "limit": args.limit,
    }  # fmt: skip
    for name, value in taken.items():
        origin = f"bundle {bundle}" if bundle is not None and name in OF_THE_BUNDLE else "assumed"
        found[name] = {"value": value, "origin": args.spelled.get(name, origin)}
    return found


def _print(report: Report, shown: Mapping[str, Mapping[str, object]] | None) -> None:
    from shmstage.launch.progress import PatientConsole

    if shown is not None:
        width = max(map(len, shown))
        for key, item in shown.items():
            sys.stdout.write(f"{key:<{width}}  {json.dumps(item['value']):<28}  {item['origin']}\n")
    # tables are cut to a terminal's width; a file or a pipe has none
    console = PatientConsole(width=None if sys.stdout.isatty() else 200)
    print_report(report, console, explain=shown is not None)
