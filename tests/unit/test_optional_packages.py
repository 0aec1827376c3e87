"""The gateway and the simulated replica start without what only KV events need."""

import subprocess
import sys

_WITHOUT = """
import sys
for name in ("zmq", "msgspec", "tokenizers", "jinja2"):
    sys.modules[name] = None
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", _WITHOUT + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gateway_and_replica_are_imported_without_them() -> None:
    run("import gateway.app, gateway.serve, gateway.cli, gateway.workers.worker, loadtests.replica.__main__")


def test_switching_kv_events_on_without_them_says_what_to_install() -> None:
    code = """
from gateway.app import validate
from gateway.config import Config
try:
    validate(Config.model_validate({"replicas": [{"url": "http://h:1"}], "kv_events": {"enabled": True}}))
except ValueError as error:
    print(error)
"""
    assert "install warmgate[kv-events]" in run(code)
