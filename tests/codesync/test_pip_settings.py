"""The machine's package index: pip's settings reach uv unless uv has settings of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_actors.codesync.pip_settings import read


def configured(place: Path, text: str, **variables: str) -> tuple[dict[str, str], list[str]]:
    (place / ".config" / "pip").mkdir(parents=True, exist_ok=True)
    (place / ".config" / "pip" / "pip.conf").write_text(text)
    environ = {"HOME": str(place), "XDG_CONFIG_DIRS": str(place / "none"), **variables}
    found = read(environ, str(place / "prefix"))
    return dict(found.pip), found.for_uv(environ)


def test_pip_conf_becomes_options_of_uv(tmp_path):
    text = "[global]\nindex-url = https://a/simple\nextra-index-url =\n  https://b/simple\n  https://c/simple\n"
    text += "trusted-host = a\ntimeout = 3\n[install]\nfind-links = /w\n"
    found, options = configured(tmp_path, text)
    assert found["index-url"] == "https://a/simple"
    assert "timeout" not in found
    assert options == [
        "--index-url", "https://a/simple", "--extra-index-url", "https://b/simple", "--extra-index-url",
        "https://c/simple", "--find-links", "/w", "--allow-insecure-host", "a", "--index-strategy", "unsafe-best-match",
    ]  # fmt: skip


def test_variable_overrides_pip_conf(tmp_path):
    _, options = configured(tmp_path, "[global]\nindex-url = https://a\n", PIP_INDEX_URL="https://b", PIP_NO_INDEX="1")
    assert options == ["--index-url", "https://b", "--no-index"]


@pytest.mark.parametrize("variable", ["UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_FIND_LINKS", "UV_OFFLINE"])
def test_settings_of_uv_win(tmp_path, variable):
    assert configured(tmp_path, "[global]\nindex-url = https://a\n", **{variable: "1"})[1] == []


def test_uv_toml_wins(tmp_path):
    (tmp_path / ".config" / "uv").mkdir(parents=True)
    (tmp_path / ".config" / "uv" / "uv.toml").write_text('index-url = "https://u"')
    assert configured(tmp_path, "[global]\nindex-url = https://a\n")[1] == []


def test_file_of_the_interpreter_is_named_to_pip(tmp_path):
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "pip.conf").write_text("[global]\nindex-url = https://p\n")
    found = read({"HOME": str(tmp_path)}, str(tmp_path / "prefix"))
    assert found.pip["index-url"] == "https://p"
    assert found.for_pip({}) == {"PIP_CONFIG_FILE": str(tmp_path / "prefix" / "pip.conf")}
    assert found.for_pip({"PIP_CONFIG_FILE": "/mine"}) == {}


def test_malformed_file_counts_as_empty(tmp_path):
    assert configured(tmp_path, "no section\n")[1] == []
