"""gateway.yaml: what is accepted, what is refused, and what is said about it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.config import Config, ConfigError, load


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "listen: {port: 9000, host: 127.0.0.1}\nreplicas: [{url: 'http://a:1'}]\n")
    config = load(path, {"listen": {"port": 7000}})
    assert (config.listen.host, config.listen.port) == ("127.0.0.1", 7000)
    assert config.replicas[0].url == "http://a:1"


def test_environment_variables_fill_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "auth: {client_keys: ['${WARMGATE_TEST_KEY}']}\n")
    with pytest.raises(ConfigError, match="WARMGATE_TEST_KEY"):
        load(path, {})
    monkeypatch.setenv("WARMGATE_TEST_KEY", "sk-secret")
    config = load(path, {})
    assert config.auth.client_keys[0].get_secret_value() == "sk-secret"
    assert "sk-secret" not in repr(config)
    assert "sk-secret" not in config.model_dump_json()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("listen: {prot: 1}", "listen.prot"),
        ("listen: {port: 99999}", "listen.port"),
        ("- a", "mapping"),
        ("listen: [", "not valid YAML"),
        ("prefixes: {block_bytes: 512, max_block_bytes: 256}", "max_block_bytes"),
        ("replicas: [{url: 'http://a:1'}, {url: 'http://a:1/'}]", "twice"),
        ("timeouts: {head_s: 0}", "timeouts.head_s"),
        ('replicas: [{url: "http://a:1", api_key: "sk-1\\n"}]', "without line ends"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(write(tmp_path, text), {})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load(tmp_path / "none.yaml", {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "no replicas"),
        ("replicas: [{url: 'ftp://a'}]", "http://"),
        ("replicas: [{url: 'http://a:1'}]\nrouting: {policy: nope}", "unknown policy 'nope'"),
        ("replicas: [{url: 'http://a:1', hardware: abacus}]", "abacus"),
        ("replicas: [{url: 'http://a:1'}]\nmodel: gpt-0", "gpt-0"),
    ],
)
def test_check_refuses_what_serve_could_not_use(tmp_path: Path, text: str, complaint: str) -> None:
    result = CliRunner().invoke(main, ["check", "-c", str(write(tmp_path, text))])
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_check_accepts_a_good_file(tmp_path: Path) -> None:
    path = write(tmp_path, "replicas: [{url: 'http://a:1', hardware: l4, model_shape: llama-3.1-8b}]\n")
    result = CliRunner().invoke(main, ["check", "-c", str(path)])
    assert result.exit_code == 0
    assert "valid" in result.stdout


def test_defaults_keep_the_admin_port_local() -> None:
    assert Config().admin.host == "127.0.0.1"
