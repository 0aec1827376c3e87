"""Which build this is can be seen from outside."""

from importlib.util import find_spec

from click.testing import CliRunner

from gateway.cli import main
from gateway.version import VERSION, compiled


def test_the_command_says_whether_it_is_compiled() -> None:
    spec = find_spec("gateway.proxy.exchange")
    assert spec is not None
    assert spec.origin is not None
    assert compiled() is not spec.origin.endswith(".py")
    expected = f"{VERSION} (compiled)" if compiled() else VERSION
    assert CliRunner().invoke(main, ["--version"]).output == f"warmgate, version {expected}\n"
