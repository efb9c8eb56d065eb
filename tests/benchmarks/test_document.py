"""One command makes all that the page on performance shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cli


def test_document_compares_simulates_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ran = cli.main, []
    monkeypatch.setattr(cli, "main", lambda arguments: ran.append(list(arguments)) or int(arguments[0] == "compare"))
    assert run(["document", "--quick", "--keep", str(tmp_path / "figures")]) == 1
    assert [arguments[0] for arguments in ran] == ["compare", "scale", "plot"]
    for arguments in ran:
        cli._parser().parse_args(arguments)
    assert (tmp_path / "figures").is_dir()
    text = cli.DOCUMENT.read_text()
    for plot in ("ranks", "sizes", "nodes"):
        assert f"plots/{plot}.svg" in text
        assert (cli.PLOTS / f"{plot}.svg").exists()
