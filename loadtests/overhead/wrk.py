"""The closed loop driven by wrk, which costs the machine less than our own generator."""

import asyncio
import re
import time
from pathlib import Path

import orjson

from loadtests.overhead.job import Job, Outcome
from loadtests.overhead.process_tree import ProcessTree
from loadtests.overhead.prompts import ACTIVE_CONVERSATIONS, TURNS, VARIANTS, Requests
from loadtests.stack.ports import LOOPBACK

_RESULT = re.compile(rb"^RESULT (\{.*\})$", re.MULTILINE)

# Must number the requests as Requests.request does.
_SCRIPT = """
local parts, number, active, turns, variants = {}, 0, 0, 0, 0
local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end
function init(args)
  local directory = args[1]
  number, active, turns, variants = tonumber(args[2]), tonumber(args[3]), tonumber(args[4]), tonumber(args[5])
  for variant = 0, variants - 1 do
    parts[variant] = {}
    for turn = 0, turns - 1 do
      local name = directory .. "/" .. variant .. "-" .. turn
      parts[variant][turn] = {read(name .. ".lead"), read(name .. ".rest")}
    end
  end
end
function request()
  local slot = number % active
  local step = math.floor(number / active) + slot
  local conversation = math.floor(step / turns) * active + slot
  local part = parts[conversation % variants][step % turns]
  number = number + 1
  return part[1] .. string.format("%012d", conversation) .. part[2]
end
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('\\nRESULT {"requests":%d,"us":%d,"p50_us":%d,"p99_us":%d,',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99)))
  io.write(string.format('"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d}\\n',
    errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
"""


class WrkError(RuntimeError):
    """wrk failed; the message has its output."""


def write_requests(requests: Requests, directory: Path) -> Path:
    """Write the script and the constant parts of all requests; returns the script's path."""
    for variant, turns in enumerate(requests.turns):
        for turn, (lead, rest) in enumerate(turns):
            (directory / f"{variant}-{turn}.lead").write_bytes(lead)
            (directory / f"{variant}-{turn}.rest").write_bytes(rest)
    script = directory / "conversations.lua"
    script.write_text(_SCRIPT, encoding="utf-8")
    return script


async def _wrk(job: Job, directory: Path, script: Path, seconds: float, first_request: int) -> dict[str, int]:
    arguments = [str(directory), str(first_request), str(ACTIVE_CONVERSATIONS), str(TURNS), str(VARIANTS)]
    process = await asyncio.create_subprocess_exec(
        *("wrk", "-t1", f"-c{job.connections}", f"-d{max(round(seconds), 1)}s", "--timeout", "10s", "-s", str(script)),
        *(f"http://{LOOPBACK}:{job.port}/", "--", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = _RESULT.search(output)
    if process.returncode or found is None:
        raise WrkError(f"wrk exited with status {process.returncode}:\n{output.decode(errors='replace')}")
    result: dict[str, int] = orjson.loads(found[1])
    return result


async def closed_loop(job: Job, directory: Path) -> Outcome:
    """Drive a closed loop with wrk: one run to warm up, one that is measured from end to end.

    wrk knows whole seconds only; windows are rounded.

    Args:
        job: a closed loop.
        directory: an empty one, for wrk's files.

    Raises:
        WrkError: wrk failed.
        ProcessGoneError: a watched process ended.
    """
    requests = Requests(job.size_bytes, f"{LOOPBACK}:{job.port}")
    script = await asyncio.to_thread(write_requests, requests, directory)
    trees = {name: ProcessTree(pid) for name, pid in job.watched.items()}
    warmup = await _wrk(job, directory, script, job.warmup_s, job.first_request)
    # Requests that wrk had under way at the end of the first run are not sent again.
    next_request = job.first_request + warmup["requests"] + job.connections
    before = {name: tree.cpu_s() for name, tree in trees.items()}
    started_s = time.perf_counter()
    result = await _wrk(job, directory, script, job.seconds, next_request)
    elapsed_s = time.perf_counter() - started_s
    cpu_s = {name: tree.cpu_s() - before[name] for name, tree in trees.items()}
    kinds = ("connect", "read", "write", "status", "timeout")
    errors = {kind: warmup[kind] + result[kind] for kind in kinds}
    return Outcome(
        window_s=result["us"] / 1e6 or elapsed_s,
        completed=result["requests"],
        total=warmup["requests"] + result["requests"],
        cpu_s=cpu_s,
        p50_ms=result["p50_us"] / 1000,
        p99_ms=result["p99_us"] / 1000,
        errors={kind: count for kind, count in errors.items() if count},
    )
