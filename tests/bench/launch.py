"""Measures how long a launch takes: call to the last rank's first line, and call to return, beside other launchers.

``python tests/bench/launch.py [--ranks 2,4,8] [--repeat 5] [--only ours,torchrun] [--json FILE] [--markdown] [--quick]``

All launchers take turns within one run, so that what disturbs the machine disturbs all of them alike.
The peers come with ``pip install -e '.[bench]'``; who is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from air_magic import processes  # noqa: E402 - the line above makes it importable in a script
from tests.bench.peers import LAUNCHERS, missing  # noqa: E402 - ditto

BODIES = {
    "hello": "user code that prints a line, without torch",
    "imports": "user code that imports torch and prints a line",
    "gloo": "user code that imports torch, makes a gloo group, passes a barrier and prints a line",
    "step": "user code that takes the first optimizer step of a small DDP model and prints a line",
}
DEADLINE = 300.0
"""Seconds after which one measurement is given up."""

Times = dict[tuple[str, str, int, str], dict[str, list[float]]]
"""By launcher, body, ranks and call (first, later): each kind of time, one per round."""


def main() -> int:
    """Measures, prints, writes; 1 if a launcher failed."""
    asked = _arguments()
    load = os.getloadavg()[0]
    absent = [name for name in asked.only if missing(LAUNCHERS[name])]
    for name in absent:
        print(f"{LAUNCHERS[name].title} is not installed: left out (pip install -e '.[bench]')", file=sys.stderr)
    names = [name for name in asked.only if name not in absent]
    bodies = [body for body in BODIES if not (asked.quick and body in ("imports", "step"))]
    times: Times = defaultdict(lambda: defaultdict(list))
    failures: list[str] = []
    result: dict[str, Any] = {}
    subprocess.run([sys.executable, "-c", "import torch"], check=True)  # files into the page cache
    for turn in range(asked.repeat):
        for ranks in asked.ranks:
            for body in bodies:
                for name in names:
                    if body not in LAUNCHERS[name].bodies:
                        continue
                    print(f"round {turn + 1}/{asked.repeat}: {ranks} ranks, {body}, {name}", file=sys.stderr)
                    try:
                        _add(times, (name, body, ranks), _measured(name, body, ranks))
                    except RuntimeError as error:
                        failures.append(f"{name}, {body}, {ranks} ranks: {error}")
        result = _about(turn + 1, load) | {
            "results": [_entry(key, kinds) for key, kinds in times.items()],
            "cold_budget": _budget(times, asked.ranks),
            "absent": absent,
            "failures": failures,
        }
        if asked.json:  # after every round: a long run may not come to its end
            Path(asked.json).write_text(json.dumps(result, indent=1) + "\n")
    print(_markdown(result, asked.ranks) if asked.markdown else _plain(result))
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_numbers, default=[2, 4, 8], help="numbers of ranks")
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--only", type=_names, default=list(LAUNCHERS), help=f"of {', '.join(LAUNCHERS)}")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--markdown", action="store_true", help="print the README's tables")
    parser.add_argument("--quick", action="store_true", help="one round, fewer bodies: to see that it works")
    asked = parser.parse_args()
    if asked.quick:
        asked.repeat = 1
    return asked


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _names(text: str) -> list[str]:
    words = text.split(",")
    if unknown := set(words) - LAUNCHERS.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: give some of {', '.join(LAUNCHERS)}")
    return words


def _measured(name: str, body: str, ranks: int) -> dict[str, Any]:
    """One measurement in a process of its own; RuntimeError with the end of its output if it fails."""
    calls = 2 if LAUNCHERS[name].again else 1
    with tempfile.TemporaryDirectory(prefix="air_magic-bench-") as folder:
        log = Path(folder, "log")
        environment = os.environ | {
            "AIR_MAGIC_RUNS": f"{folder}/runs",
            "AIR_MAGIC_WARM": "0",  # fresh interpreters, as the peers start them; the warm one says otherwise itself
            "IPYTHONDIR": f"{folder}/ipython",
            "PYTHONPATH": str(ROOT),
        }
        argv = [sys.executable, "-m", "tests.bench.peers", name, body, str(ranks), str(calls), folder]
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                cwd=folder,  # torchrunx writes logs into it
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                code = "no end"
            except KeyboardInterrupt:
                os.killpg(process.pid, signal.SIGINT)
                raise
            if code == "no end":
                for left in [*processes.descendants(process.pid), processes.read(process.pid)]:
                    processes.kill(left)
                process.wait()
        if code != 0:
            raise RuntimeError(f"{code}\n{log.read_text(errors='replace')[-2000:]}")
        return json.loads(Path(folder, "measured.json").read_text())


def _add(times: Times, key: tuple[str, str, int], measured: dict[str, Any]) -> None:
    for number, call in enumerate(measured["calls"]):
        kinds = times[(*key, "later" if number else "first")]
        for kind, seconds in call.items():
            kinds[kind].append(seconds)
        kinds["ready_after"].append(measured["ready_after"])


def _entry(key: tuple[str, str, int, str], kinds: dict[str, list[float]]) -> dict[str, Any]:
    name, body, ranks, call = key
    figures = {
        kind: {
            "median": round(statistics.median(all_of_it), 4),
            "min": round(min(all_of_it), 4),
            "all": [round(seconds, 4) for seconds in all_of_it],
        }
        for kind, all_of_it in kinds.items()
    }
    return {"launcher": name, "body": body, "ranks": ranks, "call": call} | figures


def _budget(times: Times, numbers: list[int]) -> dict[str, dict[str, float]]:
    """Our cold start as a multiple of N interpreters that import torch at once: the median of the rounds' ratios."""
    ratios: dict[str, dict[str, float]] = {}
    for ranks in numbers:
        floor = times.get(("floor", "imports", ranks, "first"), {}).get("line", [])
        for call in ("first", "later"):
            ours = times.get(("ours", "imports", ranks, call), {}).get("line", [])
            if floor and len(ours) == len(floor):
                pairs = [mine / least for mine, least in zip(ours, floor, strict=True)]
                ratios.setdefault(str(ranks), {})[call] = round(statistics.median(pairs), 3)
    return ratios


def _about(repeat: int, load: float) -> dict[str, Any]:
    packages = ("torch", "accelerate", "torchrunx", "ipyparallel")
    installed = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "load_before": load,
        },
        "versions": {"python": platform.python_version()}
        | {name: installed[name] for name in packages if name in installed},
        "command": " ".join(["python", "tests/bench/launch.py", *sys.argv[1:]]),
        "repeat": repeat,
    }


def _plain(result: dict[str, Any]) -> str:
    lines = [_headline(result)]
    for body, text in BODIES.items():
        entries = [entry for entry in result["results"] if entry["body"] == body]
        if not entries:
            continue
        lines += ["", f"{text}; seconds, median (least)"]
        lines.append(f"{'':<30}{'N':>3}  {'call':<6}{'first line':>18}{'return':>18}{'visible':>18}{'ready after':>18}")
        for entry in sorted(entries, key=lambda entry: entry["ranks"]):
            figures = "".join(f"{_figure(entry, kind):>18}" for kind in ("line", "return", "visible", "ready_after"))
            lines.append(f"{LAUNCHERS[entry['launcher']].title:<30}{entry['ranks']:>3}  {entry['call']:<6}{figures}")
    lines += ["", *_notes(result)]
    return "\n".join(lines)


def _figure(entry: dict[str, Any], kind: str) -> str:
    return f"{entry[kind]['median']:.2f} ({entry[kind]['min']:.2f})" if kind in entry else ""


def _markdown(result: dict[str, Any], numbers: list[int]) -> str:
    lines = [f"{_headline(result)}  ", f"`{result['command']}`"]
    by_key = {(e["launcher"], e["body"], e["ranks"], e["call"]): e for e in result["results"]}
    for body, text in BODIES.items():
        names = [name for name in LAUNCHERS if any(key[:2] == (name, body) for key in by_key)]
        if not names:
            continue
        lines += [
            "",
            f"{text[0].upper()}{text[1:]}; call → first line of the last rank / call → return, in seconds:",
            "",
        ]
        lines.append(" | ".join(["| launcher", *(f"N = {ranks}" for ranks in numbers)]) + " |")
        lines.append("|---" + "|--:" * len(numbers) + "|")
        for name in names:
            calls = ("first", "later") if LAUNCHERS[name].again else ("first",)
            for call in calls:
                found = [by_key.get((name, body, ranks, call)) for ranks in numbers]
                cells = [f"{e['line']['median']:.2f} / {e['return']['median']:.2f}" if e else "–" for e in found]
                title = LAUNCHERS[name].title + (f", {call} call" if len(calls) > 1 else "")
                lines.append(" | ".join([f"| {title}", *cells]) + " |")
    lines += ["", *(f"- {note}" for note in _notes(result))]
    return "\n".join(lines)


def _headline(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    return (
        f"{result['date']}, {machine['cores']} cores, {machine['memory_gib']} GiB, CPU ranks, {versions}; "
        f"medians of {result['repeat']}, all launchers in turn"
    )


def _notes(result: dict[str, Any]) -> list[str]:
    measured = {entry["launcher"] for entry in result["results"]}
    notes = [f"{launcher.title}: {launcher.note}." for name, launcher in LAUNCHERS.items() if name in measured]
    for ranks, ratios in result["cold_budget"].items():
        told = ", ".join(f"{call} call {ratio:.2f}" for call, ratio in ratios.items())
        notes.append(
            f"N = {ranks}, air_magic's cold first line as a multiple of N interpreters importing torch: {told}."
        )
    return notes + [f"FAILED {failure}" for failure in result["failures"]]


if __name__ == "__main__":
    sys.exit(main())
