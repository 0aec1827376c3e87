"""An explanation (see `gateway.admin.explain`) as tables and sentences for a terminal."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_TERMS = {
    "ttft": "\nTTFT",
    "prefill_work": "prefill\nwork",
    "tied": "those\ntied",
    "queue": "queue\nbehind",
    "eviction": "\neviction",
    "decode_delay": "decode\ndelay",
    "batch": "\nbatch",
    "memory": "\nmemory",
    "memory_wait": "memory\nwait",
}
_TOLD = (
    ("status", "status", "{}"),
    ("outcome", "outcome", "{}"),
    ("error", "error", "{}"),
    ("attempts", "attempts", "{}"),
    ("duration_ms", "duration", "{:,.1f} ms"),
    ("completion_tokens", "completion tokens", "{:,}"),
    ("prefill_replica", "prompt computed on", "{}"),
    ("prefill_ms", "prefill there", "{:,.1f} ms"),
    ("hand_off_ms", "hand-off to first token", "{:,.1f} ms"),
)
_MOST_NAMES = 6
_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "title_justify": "left",
    "title_style": "bold",
    "padding": 0,
}


def plain(text: object) -> str:
    """Return a text without anything that a terminal would obey: names and paths come from outside."""
    return "".join(character if character.isprintable() else "\ufffd" for character in str(text))


def tables(explanation: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield what is to be printed.

    Args:
        explanation: of a request that is known, of a rehearsal, or of a log line.
    """
    yield _headline(explanation)
    attempts = explanation["attempts"]
    for number, attempt in enumerate(attempts, 1):
        yield Text()
        yield from _attempt(attempt, number, len(attempts))
    refused = explanation.get("refused")
    if refused is not None:
        yield _sentence("Refused", f"{refused['status'] or ''} {refused['message']}".strip())
    record = explanation.get("record")
    if record is not None:
        if not attempts:
            yield from _from_log(record)
        yield Text()
        yield _happened(record, attempts[-1] if attempts else None)
    if explanation.get("replicas_now"):
        yield Text()
        yield _replicas_now(explanation["replicas_now"])


def _headline(explanation: Mapping[str, Any]) -> Text:
    record = explanation.get("record")
    text = Text()
    if record is None:
        text.append("Rehearsal", "bold")
        text.append(f"  POST {plain(explanation['path'])}: where it would go now; nothing was sent")
    else:
        text.append(f"Request {plain(explanation['id'])}", "bold")
        text.append(f"  {plain(record['method'])} {plain(record['path'])}")
    details = [explanation.get("received_at"), explanation.get("state")]
    if explanation.get("worker") is not None:
        details.append(f"worker {explanation['worker']}")
    if any(details):
        text.append("\n" + ", ".join(plain(detail) for detail in details if detail), "dim")
    return text


def _attempt(attempt: Mapping[str, Any], number: int, of: int) -> Iterator[RenderableType]:
    title = f"Attempt {number} of {of}: " if of > 1 else ""
    text = Text(f"{title}to {plain(attempt['replica'])}", "bold")
    text.append(f"  {plain(attempt['url'])}", "dim")
    yield text
    yield _sentence("Why", attempt["why"])
    facts = [f"policy {attempt['policy']}", f"model {attempt['model'] or 'any'}"]
    if attempt["fallback_to_load"]:
        facts[0] += " (fallback: predictions have been too wrong)"
    facts.append(f"prompt {attempt['prompt_tokens']:,} tokens, {attempt['expected_cached_tokens']:,} of them cached")
    facts.append(f"answer about {attempt['expected_output_tokens']:,}")
    if attempt["latency_targets"]:
        facts.append(f"latency targets: {attempt['latency_targets']}")
    yield Text("; ".join(map(plain, facts)))
    yield _sentence("Reason", attempt["reason"])
    if attempt["failure"]:
        yield _sentence("Then", f"it failed there ({attempt['failure']}), and another attempt was made", "red")
    yield _loads(attempt)
    if any(one["cost"] for one in attempt["candidates"]):
        yield _costs(attempt)
    if attempt["candidates_not_shown"]:
        yield Text(f"and {attempt['candidates_not_shown']:,} candidates more, which cost more or could not cost less")
    hand_off = attempt["hand_off"]
    if hand_off is not None and "prefill_replica" not in hand_off:
        yield _sentence("No hand-off", hand_off["reason"])
    elif hand_off is not None:
        yield _sentence(
            "Hand-off" if hand_off["taken"] else "No hand-off, while they save too little for prefill replicas to wait",
            f"prompt on {hand_off['prefill_replica']} ({_seconds(hand_off['prefill_s'])}), "
            f"{hand_off['lacking_tokens']:,.0f} tokens of KV to {hand_off['decode_replica']} "
            f"({_seconds(hand_off['transfer_s'])}); {_seconds(hand_off['cost_s'])} in all, against "
            f"{_seconds(hand_off['whole_cost_s'])} with all of it on {hand_off['whole_replica']}",
        )
    if attempt["left_out"]:
        yield _left_out(attempt["left_out"])


def _loads(attempt: Mapping[str, Any]) -> Table:
    candidates = attempt["candidates"]
    seconds = candidates[0]["prefill_ahead_s"] is not None
    predicted = candidates[0]["predicted_ttft_s"] is not None
    table = Table(title="Candidates at that moment", **_STYLE)
    table.add_column("\nreplica", overflow="fold")
    columns = ["cached\ntokens", "uncached\ntokens", "in\nflight", "\ndecodes", "KV use,\nplanned"]
    columns.append("ahead\nms" if seconds else "ahead\ntokens")
    for column in [*columns, *(["prefill\nms", "TTFT\nms"] if predicted else [])]:
        table.add_column(column, justify="right")
    for one in candidates:
        table.add_row(
            _mark(one),
            f"{one['matched_tokens']:,.0f}",
            f"{one['uncached_tokens']:,.0f}",
            str(one["in_flight"]),
            str(one["running_decodes"]),
            f"{_share(one['kv_use'])}, {_share(one['kv_committed'])}" + (", full" if one["cache_full"] else ""),
            _ms(one["prefill_ahead_s"]) if seconds else f"{one['prefill_tokens_ahead']:,.0f}",
            *([_ms(one["own_prefill_s"]), _ms(one["predicted_ttft_s"])] if predicted else []),
            style="bold" if one["chosen"] else "",
        )
    return table


def _costs(attempt: Mapping[str, Any]) -> Table:
    candidates = attempt["candidates"]
    names = [name for name in _TERMS if any(one["cost"]["terms"].get(name) for one in candidates)]
    unit = candidates[0]["cost"]["unit"]
    table = Table(title=f"Cost{', seconds' if unit == 's' else ''}: the least wins", **_STYLE)
    table.add_column("\nreplica", overflow="fold")
    for name in names:
        table.add_column(_TERMS[name], justify="right")
    table.add_column("\ncost", justify="right")
    for one in candidates:
        terms = one["cost"]["terms"]
        total = one["cost"]["total"]
        table.add_row(
            _mark(one),
            *(f"{terms[name]:.4f}" if name in terms else "" for name in names),
            f"{total:.4f}" if unit == "s" else f"{total:,.0f}",
            style="bold" if one["chosen"] else "",
        )
    return table


def _left_out(left_out: Iterable[Mapping[str, str]]) -> Table:
    table = Table(title="Left out", **_STYLE)
    table.add_column("why", min_width=30)
    table.add_column("replicas")
    _group(table, left_out)
    return table


def _replicas_now(replicas: Iterable[Mapping[str, str]]) -> Table:
    table = Table(title="Replicas as they are now", **_STYLE)
    table.add_column("state", min_width=30)
    table.add_column("replicas")
    _group(table, ({**replica, "why": replica["why"] or "can take requests"} for replica in replicas))
    return table


def _group(table: Table, replicas: Iterable[Mapping[str, str]]) -> None:
    groups: dict[str, list[str]] = {}
    for replica in replicas:
        groups.setdefault(replica["why"], []).append(plain(replica["replica"]))
    for why, names in groups.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        table.add_row(plain(why), ", ".join(names[:_MOST_NAMES]) + more)


def _from_log(record: Mapping[str, Any]) -> Iterator[RenderableType]:
    """A log line has the decision about the last attempt, without the other candidates."""
    yield Text()
    if "replica" not in record:
        yield _sentence("Why", "it went to no replica")
        return
    yield _sentence("To", record["replica"])
    yield _sentence("Reason", f"{record['reason']} ({record['policy']})")
    terms = Table(title="What was weighed", **_STYLE)
    terms.add_column("term", min_width=16)
    terms.add_column("value", justify="right")
    for name, value in record["terms"].items():
        terms.add_row(plain(name), f"{value:,.5g}" if abs(value) < 1000 else f"{value:,.0f}")
    yield terms


def _happened(record: Mapping[str, Any], attempt: Mapping[str, Any] | None) -> Table:
    table = Table(title="What happened", show_header=False, **_STYLE)
    table.add_column("", min_width=20)
    table.add_column("")
    for key, name, form in _TOLD:
        if record.get(key) is not None:
            table.add_row(name, plain(form.format(record[key])))
    predicted, observed = record.get("predicted_ttft_ms"), record.get("ttft_ms")
    if predicted is not None:
        words = f"predicted {predicted:,.1f} ms, observed "
        words += f"{observed:,.1f} ms" if observed is not None else "nothing (no first token was seen)"
        if observed:
            words += f" ({100.0 * (predicted - observed) / observed:+.0f} %)"
        table.add_row("TTFT", words)
    expected, cached = record.get("expected_cached_tokens"), record.get("cached_tokens")
    if expected is not None:
        reported = f"reported {cached:,}" if cached is not None else "the engine did not report"
        table.add_row("cached tokens", f"expected {expected:,}, {reported}")
    if record.get("prompt_tokens") is not None:
        estimate = f" (estimated {attempt['prompt_tokens']:,})" if attempt is not None else ""
        table.add_row("prompt tokens", f"{record['prompt_tokens']:,}{estimate}")
    return table


def _sentence(name: str, text: object, style: str = "") -> Text:
    sentence = Text(f"{name}: ", "bold")
    sentence.append(plain(text), style)
    return sentence


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f} s" if abs(value) >= 1.0 else f"{1000.0 * value:,.1f} ms"


def _mark(candidate: Mapping[str, Any]) -> str:
    return f"{'>' if candidate['chosen'] else ' '} {plain(candidate['replica'])}"


def _ms(seconds: float) -> str:
    return f"{1000.0 * seconds:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100.0 * value:.0f}%"
