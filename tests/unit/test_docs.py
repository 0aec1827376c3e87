"""The documents say what the code does."""

from pathlib import Path

from gateway.proxy.failures import TABLE, Action

ROOT = Path(__file__).parents[2]


def failure_rows() -> list[str]:
    rows = [
        "| phase | cause | first choice | if that is not possible | gateway's answer | for the replica |",
        "|---|---|---|---|---|---|",
    ]
    for (phase, cause), rule in TABLE.items():
        actions = (rule.action, rule.otherwise)
        answer = f"{rule.status} `{rule.code}`" if {Action.ANSWER, Action.BREAK_STREAM} & set(actions) else ""
        otherwise = "" if rule.otherwise is rule.action else rule.otherwise
        rows.append(f"| {phase} | {cause} | {rule.action} | {otherwise} | {answer} | {rule.verdict} |")
    return rows


def test_the_failure_table_is_documented_as_it_is() -> None:
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table == failure_rows()


def test_the_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "    make run " in text
    assert "    make test " in text
