"""Uploads on a real device: what registering the pool is worth, what runs beside computing, what a boundary costs.

Runs from a checkout in under 8 minutes (``--budget-s``), on a machine with an NVIDIA device and the packages of a CUDA
image; the native module is built with ``python setup.py build_ext --inplace``. Without a device it says so and exits 0;
``--cpu`` rehearses all of it on the CPU backend with tiny sizes, where figures mean nothing.

    python bench/gpu_upload.py [--cpu] [--budget-s 420] [--only rig] [--json]

* uploads: GB/s of ``device_put`` from a pool's slot, registered with the driver and not, alternating. XLA copies what
  is smaller than 1 GiB to pinned memory of its own first, whatever we register; *direct* is a client created with
  ``should_stage_host_to_device_transfers`` off. ``driver`` is the bound: the driver's own copy from registered memory.
* overlap: a chain of matrix products alone, an upload alone, both together: 1 is perfect, 0 is one after the other.
* poison: a producer overwrites each slot as soon as it is released; the device digests what arrived. The *control*
  releases when ``device_put`` returns, to show that this check can fail; its count is told and not judged.
* rig: real orchestrator, pool and trainer; the engine computes for a known time; idle from the step lines.

Exit 1: a wrong digest, a refused registration, a part that crashed or ran out of time. 2: packages are missing.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from results import RESULTS, keep, machine, print_targets, spread, verdict  # noqa: E402

NEEDED = ("numpy", "ml_dtypes", "msgpack", "psutil", "xxhash", "jax", "shmstage._native")
NEEDED_BY_RIG = ("zmq", "pydantic", "rich", "safetensors")
MIB = 1 << 20
#: (real, rehearsal)
SIZES = ([16 * MIB, 128 * MIB, 512 * MIB, 1024 * MIB, 2048 * MIB], [MIB // 16, MIB])
ROUNDS = (7, 2)
POISON = ({"nbytes": 256 * MIB, "count": 16}, {"nbytes": MIB, "count": 8})
MATRIX = (8192, 64)
RIG = (
    {"rows": 64, "tokens": 14336, "layers": 60, "top_k": 10, "experts": 512, "steps": 8, "rounds": 2,
     "microbatch_s": 0.25, "update_s": 0.03, "bookkeeping_s": 0.1},
    {"rows": 8, "tokens": 64, "layers": 2, "top_k": 2, "experts": 16, "steps": 4, "rounds": 1,
     "microbatch_s": 0.01, "update_s": 0.001, "bookkeeping_s": 0.01},
)  # fmt: skip
MODES = ("serial", "staged_before_update")
#: seconds a part may take at most: the first upload part, the rig, the second upload part
LIMITS_S = {"staged by XLA": 120.0, "rig": 200.0, "direct": 100.0}
EXACT = ("param_digest", "losses", "denominators")


# --- on the device: these run in processes of their own, so that none can take the others down ---------------------


def device_of(given: Mapping[str, Any]) -> Any:
    import jax

    if given.get("direct") and not given["cpu"]:
        jax.config.update("jax_pjrt_client_create_options", {"should_stage_host_to_device_transfers": False})
    return jax.local_devices()[0]


def timed(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def registering(device: Any) -> Callable[[], Any]:
    from shmstage.trainer.host_registry import registry_for

    # a rehearsal registers with nobody, so that it goes both ways
    return Mock if device.platform == "cpu" else lambda: registry_for([device])


@contextmanager
def slots_of(run: str, fields: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[tuple[Any, Any, Any]]:
    """A pool of two slots, its layout, and a reader of it."""
    from shmstage.errors import PoolError
    from shmstage.memory.identity import ProcessIdentity
    from shmstage.memory.layout import Layout
    from shmstage.memory.pool import Pool
    from shmstage.memory.reader import PoolReader

    with ExitStack() as stack:
        identity = ProcessIdentity.create(run, "bench")
        stack.callback(identity.close)
        layout = Layout.of(dict(fields))
        pool = Pool.create(run, epoch=1, layouts=[layout], slots=2, identity=identity)
        stack.callback(pool.close)
        reader = PoolReader.attach(pool.name, run_id=run, epoch=1)
        reader.register(layout)
        yield pool, layout, reader
        with suppress(PoolError):  # JAX may hold a view until its next garbage collection; the process ends soon
            reader.close()


def part_uploads(given: Mapping[str, Any]) -> dict[str, Any]:
    """Bandwidth, overlap and poison with one kind of client."""
    device = device_of(given)
    found: dict[str, Any] = {"uploads": {}, "overlap": {}, "poison": {}, "problems": []}
    with slots_of(given["run"], {"words": ("uint32", (max(given["sizes"]) // 4,))}) as (pool, layout, reader):
        measure_uploads(device, pool, layout, reader, given, found)
    for arm in ("pageable", "registered", "control"):
        fields = {"words": ("uint32", (given["poison"]["nbytes"] // 4,)), "tail": ("uint32", (1000,))}
        with slots_of(given["run"], fields) as (pool, layout, reader):
            found["poison"][arm] = poisoned(device, pool, layout, reader, given["poison"]["count"], arm)
    return found


def measure_uploads(
    device: Any, pool: Any, layout: Any, reader: Any, given: Mapping[str, Any], found: dict[str, Any]
) -> None:
    import numpy as np

    from shmstage.trainer.registration import RegisteredMemory

    leases = {}
    for number, arm in enumerate(("registered", "pageable")):
        slot = pool.acquire(layout, timeout_s=30.0)
        words = slot.views["words"]
        tile = np.random.default_rng(number).integers(0, 2**32, min(words.size, 4 * MIB), np.uint32)
        for begin in range(0, words.size, tile.size):
            words[begin : begin + tile.size] = tile[: words.size - begin]
        lease = reader.lease(slot.publish(step=1, index=number, rows=1))
        leases[lease.handle.slot, arm] = lease
    slot_of = {arm: slot for slot, arm in leases}
    views = {arm: lease.views["words"] for (_, arm), lease in leases.items()}
    memory = RegisteredMemory([reader.slot_ranges()[slot_of["registered"]]], registering(device))
    try:
        found["registration"] = memory.registration.as_facts()
        if memory.registration.why_not:
            found["problems"].append(f"not registered: {memory.registration.why_not}")
            del views["registered"]
        for nbytes in given["sizes"]:
            found["uploads"][str(nbytes)] = bandwidth(device, views, nbytes, given["rounds"], found["problems"])
        if device.platform != "cpu" and "registered" in views:
            found["driver_gbps"] = driver_bound(memory, views["registered"])
        for arm, view in views.items():
            found["overlap"][arm] = overlap(device, view, given)
    finally:
        memory.close()
        for lease in leases.values():
            lease.end()


def bandwidth(device: Any, views: Mapping[str, Any], nbytes: int, rounds: int, problems: list[str]) -> dict[str, Any]:
    import jax

    from shmstage.testing.engines_timed import digest_on_device, digest_on_host

    gbps: dict[str, list[float]] = {arm: [] for arm in views}
    issue_s: dict[str, list[float]] = {arm: [] for arm in views}
    for number in range(-1, rounds):  # the first is not counted: it allocates, and its content is looked at
        for arm, view in views.items():
            words = view[: nbytes // 4]
            begin = time.perf_counter()
            array = jax.device_put(words, device)
            issued = time.perf_counter()
            array.block_until_ready()
            ready = time.perf_counter()
            if number >= 0:
                gbps[arm].append(nbytes / (ready - begin) / 1e9)
                issue_s[arm].append(issued - begin)
            elif int(digest_on_device([array])) != digest_on_host([words]):
                problems.append(f"{arm}, {nbytes} bytes: other bytes arrived than lie in the slot")
            del array
    return {arm: {"gbps": spread(gbps[arm]), "issue_s": spread(issue_s[arm])} for arm in views}


def driver_bound(memory: Any, view: Any) -> float | None:
    """GB/s of ``cuMemcpyHtoD`` from registered memory: nothing of JAX in between."""
    cuda, pointer, times = memory._registry._cuda, ctypes.c_uint64(), []
    with memory._registry._current():
        if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(view.nbytes)):
            return None
        for _ in range(5):
            source = (pointer, ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes))
            times.append(timed(lambda source=source: cuda.cuMemcpyHtoD_v2(*source)))
        cuda.cuMemFree_v2(pointer)
    return float(view.nbytes / median(times) / 1e9)


def overlap(device: Any, view: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    import jax
    from jax.sharding import SingleDeviceSharding

    from shmstage.testing.engines_timed import count_for, matmul_chain, square_matrix

    matrix = square_matrix(given["matrix"], SingleDeviceSharding(device))
    put = functools.partial(jax.device_put, view, device)
    count = count_for(matrix, median(timed(lambda: put().block_until_ready()) for _ in range(3)))

    def both() -> None:
        token = matmul_chain(matrix, count)
        put().block_until_ready()
        token.block_until_ready()

    ways = {
        "compute": lambda: matmul_chain(matrix, count).block_until_ready(),
        "upload": lambda: put().block_until_ready(),
        "both": both,
    }
    ways["compute"]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given["rounds"]):
        for name, act in ways.items():
            times[name].append(timed(act))
    compute, upload, together = (median(times[name]) for name in ("compute", "upload", "both"))
    share = (compute + upload - together) / min(compute, upload)
    return {"nbytes": view.nbytes, "share": share, **{f"{name}_s": spread(values) for name, values in times.items()}}


def poisoned(device: Any, pool: Any, layout: Any, reader: Any, count: int, arm: str) -> dict[str, Any]:
    """How many of ``count`` micro-batches arrived wrong although, or because, their slots were overwritten at once."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from shmstage.testing.engines_timed import digest_on_device, digest_on_host
    from shmstage.trainer.device_buffers import DeviceBuffers
    from shmstage.trainer.registration import RegisteredMemory
    from shmstage.trainer.tokens import TokenWatcher

    handles: queue.SimpleQueue[Any] = queue.SimpleQueue()
    expected: list[int] = []

    def produce() -> None:
        try:
            for number in range(count):
                slot = pool.acquire(layout, timeout_s=60.0)
                for view in slot.views.values():
                    view.fill(0xFFFFFFFF)
                for view in slot.views.values():
                    view[...] = np.arange(view.size, dtype=np.uint32) * np.uint32(2 * number + 3)
                expected.append(digest_on_host(slot.views.values()))
                handles.put(slot.publish(step=1, index=number, rows=1))
        except Exception as error:
            handles.put(error)

    sharding = SingleDeviceSharding(device)
    shardings = dict.fromkeys(layout.views(np.empty(layout.nbytes, np.uint8), 0), sharding)
    uploads, computes = TokenWatcher("bench-uploads", at_once=True), TokenWatcher("bench-computes")
    buffers = DeviceBuffers(2, uploads.watch, timeout_s=60.0)
    memory = RegisteredMemory(reader.slot_ranges() if arm == "registered" else [], registering(device))
    producer = threading.Thread(target=produce)
    tokens: list[Any] = []
    errors: list[str] = []
    producer.start()
    try:
        for _ in range(count):
            handle = handles.get(timeout=60.0)
            if isinstance(handle, Exception):
                raise handle
            lease = reader.lease(handle)
            if arm == "control":
                arrays = jax.device_put(list(lease.views.values()), sharding)
                lease.end()
                tokens.append(digest_on_device(arrays))
                continue
            batch = buffers.upload(lease, shardings, lambda ready_ns, error: errors.append(error) if error else None)
            resolved = buffers.resolver(batch.buffer)
            buffers.settled(batch.buffer)
            tokens.append(digest_on_device(list(batch.take().values())))
            computes.watch(tokens[-1], lambda ready_ns, error, resolved=resolved: resolved())
        wrong = sum(int(token) != want for token, want in zip(tokens, expected, strict=True))
    finally:
        producer.join(90.0)
        arrays = None
        uploads.close()
        computes.close()
        memory.close()
    if arm == "registered" and memory.registration.why_not:
        errors.append(f"not registered: {memory.registration.why_not}")
    return {"microbatches": count, "wrong": wrong, "errors": errors}


class _Quiet:
    def poll(self) -> None:
        return


def part_rig(given: Mapping[str, Any]) -> dict[str, Any]:
    """Each order of the commands in turn; what is done by the deadline is kept."""
    from shmstage.launch.run_directory import completed
    from shmstage.launch.single_host import run
    from shmstage.settings import Settings

    shape = given["rig"]
    runs: list[dict[str, Any]] = []
    longest, cut_short = 0.0, False
    for number in range(shape["rounds"] * len(MODES)):
        mode = MODES[number % len(MODES)]
        if cut_short := number >= len(MODES) and time.time() + 1.2 * longest > given["deadline"]:
            break
        out = Path(given["work"]) / f"rig-{number}"
        source = {name: shape[name] for name in ("rows", "tokens", "layers", "top_k", "experts")}
        settings = Settings(
            run=f"{given['run']}-{number}", out=out, boundary=mode,  # type: ignore[arg-type]
            rows=shape["rows"], tokens=shape["tokens"], steps=shape["steps"], aux_slots=0, latch=False,
            engine="shmstage.testing.engines_timed:make_engine",
            engine_settings={"side": given["matrix"], **{n: shape[n] for n in ("microbatch_s", "update_s")}},
            source="shmstage.testing.simulated_input:make_source", source_settings={**source, "microbatches": 2},
            hooks="shmstage.testing.simulated_input:make_hooks",
            hooks_settings={"bookkeeping_s": shape["bookkeeping_s"]},
        )  # fmt: skip
        begin = time.time()
        summary = run(completed(settings), _Quiet())
        longest = max(longest, time.time() - begin)
        log = (out / "trainer.log").read_text().splitlines()
        lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
        runs.append({
            "mode": mode, "seconds": time.time() - begin, **{name: summary[name] for name in EXACT},
            "idle_s": [line["boundary_idle_s"] for line in lines[1:] if line["boundary_idle_s"] is not None],
            "step_s": [line["step_s"] for line in lines[1:]], "staged": summary["staged_boundaries"],
            "host_memory": next((line.split("INFO ")[-1] for line in log if "host memory" in line), ""),
        })  # fmt: skip
        Path(given["result"]).write_text(json.dumps({"runs": runs, "cut_short": True}))
    return {"runs": runs, "cut_short": cut_short}


def part_probe(given: Mapping[str, Any]) -> dict[str, Any]:
    device = device_of(given)
    return {"platform": device.platform, "kind": device.device_kind, "jax": __import__("jax").__version__}


PARTS = {"probe": part_probe, "uploads": part_uploads, "rig": part_rig}


# --- the parent: touches no device ----------------------------------------------------------------------------------


def run_part(name: str, given: dict[str, Any], limit_s: float, work: Path) -> tuple[dict[str, Any] | None, str]:
    """Its result, as far as it came, and what went wrong; it gets an environment in which it finds this checkout."""
    result = work / f"{name}-{len(list(work.iterdir()))}.json"
    given = {**given, "result": str(result), "work": str(work), "deadline": time.time() + limit_s - 15.0}
    path = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if given["cpu"]:
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--given", json.dumps(given)]
    error = ""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=max(limit_s, 1.0))
        if done.returncode:
            error = " | ".join([f"exit {done.returncode}", *done.stderr.strip().splitlines()[-4:]])[-1500:]
    except subprocess.TimeoutExpired:
        error = f"not done after {limit_s:.0f} s"
    return (json.loads(result.read_text()) if result.exists() else None), error


def sizes_that_fit(cpu: bool) -> tuple[list[int], dict[str, Any], list[str]]:
    """Sizes and rig shape for this machine's ``/dev/shm`` and free memory: two slots, four payloads."""
    sizes, rig = SIZES[cpu], dict(RIG[cpu])
    stat = os.statvfs("/dev/shm")
    free = int(next(x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x).split()[1]) << 10
    room = 0.8 * min(stat.f_bavail * stat.f_frsize, free / 3)
    fitting = [nbytes for nbytes in sizes if 2 * nbytes <= room]
    notes = [f"left out, /dev/shm or memory is too small: {n} bytes" for n in sizes if n not in fitting]
    row_nbytes = rig["rows"] * (24 + 2 * rig["layers"] * rig["top_k"])
    tokens = min(rig["tokens"], int(room / 4 / row_nbytes))
    if tokens < rig["tokens"]:
        notes.append(f"the rig's rows are cut from {rig['tokens']} to {tokens} tokens: /dev/shm or memory is too small")
    return fitting, {**rig, "tokens": tokens}, notes


def in_mib(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB"


def figures_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for client in ("staged by XLA", "direct"):
        found = parts.get(client) or {}
        for nbytes, arms in found.get("uploads", {}).items():
            figures.update({f"upload {client}, {arm}, {in_mib(int(nbytes))}": f for arm, f in arms.items()})
        figures.update({f"overlap {client}, {arm}": f for arm, f in found.get("overlap", {}).items()})
        figures.update({f"poison {client}, {arm}": f for arm, f in found.get("poison", {}).items()})
        figures.update({f"{k} {client}": found[k] for k in ("driver_gbps", "registration") if found.get(k) is not None})
    runs = (parts.get("rig") or {}).get("runs", [])
    for mode in dict.fromkeys(r["mode"] for r in runs):
        of_mode = [r for r in runs if r["mode"] == mode]
        idle, step = [v for r in of_mode for v in r["idle_s"]], [v for r in of_mode for v in r["step_s"]]
        figures[f"rig {mode}"] = {
            "idle_s": spread(idle), "step_s": spread(step), "idle_share": median(idle) / median(step),
            "staged": [r["staged"] for r in of_mode], "host_memory": of_mode[0]["host_memory"],
        }  # fmt: skip
    return figures


def targets_of(figures: Mapping[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    found = []
    for client in ("staged by XLA", "direct"):
        last = in_mib(max(sizes, default=0))
        arms = [figures.get(f"upload {client}, {arm}, {last}") for arm in ("registered", "pageable")]
        if arms[0] and arms[1]:
            ratio = arms[0]["gbps"]["median"] / arms[1]["gbps"]["median"]
            found.append(verdict(f"upload {client}, registered / pageable, {last}", ratio, 1.0, at_least=True))
        for name, figure in figures.items():
            if name.startswith(f"overlap {client}"):
                found.append(verdict(name, figure["share"], 0.8, at_least=True))
            if name.startswith(f"poison {client}") and "control" not in name:
                found.append(verdict(f"{name}, wrong", figure["wrong"], 0))
    if figure := figures.get("rig staged_before_update"):
        found.append(verdict("rig, idle share of the step, staged before", figure["idle_share"], 0.002))
    return found


def tidy(runs: list[str]) -> None:
    from shmstage.memory.sweep import sweep

    for run in runs:
        sweep(run)


def measure(args: argparse.Namespace, work: Path) -> tuple[dict[str, Any], list[int]]:
    sizes, rig, notes = sizes_that_fit(args.cpu)
    base = {"cpu": args.cpu, "sizes": sizes, "rounds": ROUNDS[args.cpu], "poison": POISON[args.cpu], "rig": rig,
            "matrix": MATRIX[args.cpu], "run": f"gpu-upload-{os.getpid()}"}  # fmt: skip
    parts: dict[str, Any] = {}
    problems: list[str] = []
    plan: dict[str, tuple[str, dict[str, Any]]]
    plan = {"staged by XLA": ("uploads", {}), "rig": ("rig", {}), "direct": ("uploads", {"direct": True})}
    plan = {title: part for title, part in plan.items() if title in args.only.split(",")}
    if missing := [name for name in NEEDED_BY_RIG if importlib.util.find_spec(name) is None]:
        notes.append(f"the rig is left out, packages are missing: {', '.join(missing)}")
        plan.pop("rig", None)
    for title, (part, more) in plan.items():
        limit_s = min(LIMITS_S[title], args.until - time.monotonic() - 10.0)
        print(f"{title}: at most {limit_s:.0f} s", file=sys.stderr)
        if limit_s < 20.0:
            problems.append(f"{title}: no time left of --budget-s {args.budget_s:g}")
            continue
        parts[title], error = run_part(part, {**base, **more}, limit_s, work)
        if error:  # who was killed could not tidy up
            tidy([base["run"], *(f"{base['run']}-{number}" for number in range(rig["rounds"] * len(MODES)))])
        # that client is an experiment: this JAX may not know the option
        if error:
            (notes if title == "direct" and "create_option" in error else problems).append(f"{title}: {error}")
        problems += [f"{title}: {problem}" for problem in (parts[title] or {}).get("problems", [])]
        for arm, figure in (parts[title] or {}).get("poison", {}).items():
            if arm != "control" and (figure["wrong"] or figure["errors"]):
                problems.append(f"{title}, poison, {arm}: {figure}")
    runs = (parts.get("rig") or {}).get("runs", [])
    if len({json.dumps([r[key] for key in EXACT]) for r in runs}) > 1:
        problems.append("rig: the runs trained different things")
    if (parts.get("rig") or {}).get("cut_short"):
        notes.append(f"rig: {len(runs)} runs of {rig['rounds'] * len(MODES)}, then the time was up")
    return {"figures": figures_of(parts), "problems": problems, "notes": notes}, sizes


def print_table(result: Mapping[str, Any]) -> None:
    print(f"{result['gpu'] or 'rehearsal on the CPU'}, {result['machine']}")
    for name, figure in result["figures"].items():
        values = figure if isinstance(figure, dict) else {"": figure}
        print(f"{name:<48}{', '.join(f'{key} {told(value)}' for key, value in values.items())}")


def told(value: Any) -> str:
    """A figure in few digits, with its spread."""
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.4g} ({value['min']:.4g} to {value['max']:.4g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plot(result: Mapping[str, Any], path: Path) -> bool:
    """GB/s by size, if it was measured; False without matplotlib."""
    if not any(name.startswith("upload ") for name in result["figures"]):
        return True
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[float, float]]] = {}
    for name, figure in result["figures"].items():
        if name.startswith("upload "):
            client_and_arm, _, size = name.removeprefix("upload ").rpartition(", ")
            lines.setdefault(client_and_arm, []).append((float(size.split()[0]), figure["gbps"]["median"]))
    drawing, axes = pyplot.subplots(figsize=(8, 4))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xscale="symlog", xlabel="MiB", ylabel="GB/s", title=f"device_put, {result['gpu'] or 'rehearsal'}")
    axes.legend(fontsize="small")
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU backend with tiny sizes")
    parser.add_argument("--budget-s", type=float, default=420.0, help="be done after so many seconds")
    parser.add_argument("--only", default=",".join(LIMITS_S), help="parts, with commas (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--given", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(LIMITS_S):
        parser.error(f"--only {', '.join(sorted(unknown))}: want some of {', '.join(LIMITS_S)}")
    args.until = time.monotonic() + args.budget_s
    if args.part:
        given = json.loads(args.given)
        Path(given["result"]).write_text(json.dumps(PARTS[args.part](given)))
        return 0
    nothing = {"gpu": None, "machine": machine(), "figures": {}, "targets": []}
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = "; build it: python setup.py build_ext --inplace" if "shmstage._native" in missing else ""
        print(json.dumps({**nothing, "reason": f"missing: {', '.join(missing)}{hint}"}))
        return 2
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        probe, error = run_part("probe", {"cpu": args.cpu}, min(90.0, args.budget_s), work)
        if probe is None or (probe["platform"] != "gpu" and not args.cpu):
            reason = error or f"JAX computes on {probe['platform'] if probe else '?'} here"
            print(json.dumps({**nothing, "reason": f"no GPU: {reason}; --cpu rehearses without one"}))
            return 0
        found, sizes = measure(args, work)
    gpu = None if args.cpu else probe["kind"]
    result = {
        "gpu": gpu, **({"reason": "--cpu: a rehearsal"} if args.cpu else {}), "machine": {**machine(), **probe},
        "budget_s": args.budget_s, **found, "targets": targets_of(found["figures"], sizes),
    }  # fmt: skip
    path = keep("gpu_upload", result, args.results)
    try:
        if not plot(result, path.with_suffix(".svg")):
            result["notes"].append("no plot: matplotlib is missing")
    except Exception:
        result["notes"].append(f"no plot: {traceback.format_exc(limit=1)}")
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
        print_targets(result["targets"])
        print("\n".join([*result["notes"], *result["problems"]]))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
