"""`warmgate explain`: why a request went where it did, or where one would go."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping
from typing import IO, Any
from urllib.parse import quote

import click

_TIMEOUT_S = 10.0


@click.command()
@click.argument("request_id", required=False)
@click.option(
    "--admin",
    "admin_url",
    metavar="URL",
    default="http://127.0.0.1:8001",
    show_default=True,
    envvar="WARMGATE_ADMIN_URL",
    show_envvar=True,
    help="The gateway's admin port.",
)
@click.option("--key", envvar="WARMGATE_ADMIN_KEY", show_envvar=True, help="The key of the admin port (`admin.key`).")
@click.option("--log", type=click.File("rb"), metavar="FILE", help="Look in this request log instead; - is stdin.")
@click.option("--body", type=click.File("rb"), metavar="FILE", help="Ask where this request would go now; - is stdin.")
@click.option("--path", default="/v1/chat/completions", show_default=True, help="Path of the request with --body.")
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME:VALUE", help="Header of it; repeat.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain(
    request_id: str | None,
    admin_url: str,
    key: str | None,
    log: IO[bytes] | None,
    body: IO[bytes] | None,
    path: str,
    headers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say why the request with REQUEST_ID (x-request-id) went where it did, and what became of it.

    With --body, say where a request would go now. It is not sent, and the gateway stays as it is. With --log, take what
    the request log says instead of asking a running gateway.
    """
    if (request_id is None) == (body is None):
        raise click.UsageError("give either a REQUEST_ID or --body FILE")
    if log is not None and request_id is None:
        raise click.UsageError("--log needs a REQUEST_ID")
    if log is not None:
        explanation = from_log(log, str(request_id))
    elif body is not None:
        query = f"/admin/rehearsal?path={quote(path, safe='/')}"
        explanation = asyncio.run(_asked(admin_url, key, query, body.read(), _pairs(headers)))
    else:
        query = f"/admin/decisions?id={quote(str(request_id), safe='')}"
        explanation = asyncio.run(_asked(admin_url, key, query, None, {}))
        if not explanation["found"]:
            raise click.ClickException(_unknown(str(request_id), explanation))
    _print(explanation, as_json)
    if "refused" in explanation:
        sys.exit(1)


def from_log(lines: Iterable[bytes], request_id: str) -> dict[str, Any]:
    """Return the explanation of a request from its log line, the last one if the id was used again.

    Args:
        lines: of the log; those that are no JSON objects are passed over.
        request_id: which.

    Raises:
        click.ClickException: it is not there.
    """
    wanted, found = request_id.encode("utf-8", "replace"), None
    for line in lines:
        # Most lines are of other requests: only those that may be it are read.
        if wanted in line or b"\\" in line:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("event") == "request" and record.get("id") == request_id:
                found = record
    if found is None:
        raise click.ClickException(f"there is no request {request_id} in this log")
    return {"found": True, "id": request_id, "worker": found.get("worker"), "attempts": [], "record": found}


async def _asked(
    admin_url: str, key: str | None, query: str, body: bytes | None, headers: Mapping[str, str]
) -> dict[str, Any]:
    """Ask the admin port.

    Raises:
        click.ClickException: it does not answer, or not as it should; the message says why.
    """
    import aiohttp

    sent = {**headers, **({"Authorization": f"Bearer {key}"} if key else {})}
    method = "GET" if body is None else "POST"
    url = admin_url.rstrip("/") + query
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session,
            session.request(method, url, data=body, headers=sent) as response,
        ):
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        why = str(error) or f"no answer within {_TIMEOUT_S:g} s"
        raise click.ClickException(f"the admin port {admin_url} cannot be reached: {why}") from error
    if status == 401:
        hint = "the key is not right" if key else "it wants a key: --key, or WARMGATE_ADMIN_KEY"
        raise click.ClickException(f"the admin port {admin_url} refuses: {hint}")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not ({"found", "attempts"} & answer.keys()):
        raise click.ClickException(
            f"{admin_url} answers with status {status} and no explanation: is it the admin port of a gateway that has "
            "`warmgate explain`?"
        )
    return answer


def _unknown(request_id: str, answer: Mapping[str, Any]) -> str:
    if not answer["capacity"]:
        return f"request {request_id} is not known: this gateway keeps no decisions (logging.decisions is 0)"
    kept = (
        f"the last {answer['capacity']:,} requests are kept (logging.decisions of each worker), now {answer['kept']:,}"
    )
    age_s = answer["oldest_age_s"]
    if age_s is not None:
        kept += f", the oldest ended {age_s:,.0f} s ago"
    per_s = answer.get("per_s")
    if per_s is not None:
        kept += f"; of those that went well up to {per_s:,.0f} a second (logging.decisions_per_s)"
    return f"request {request_id} is not known: {kept}; a restart forgets them. The request log may have it: --log FILE"


def _pairs(headers: Iterable[str]) -> dict[str, str]:
    pairs = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter(f"{header!r} is not NAME:VALUE", param_hint="--header")
        pairs[name.strip()] = value.strip()
    return pairs


def _print(explanation: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(explanation, indent=2))
        return
    from rich.console import Console

    from gateway.explain_tables import tables

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for part in tables(explanation):
        console.print(part)
