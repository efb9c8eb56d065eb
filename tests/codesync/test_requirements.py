"""Requirements lists and files: what reaches the nodes, and what cannot."""

from __future__ import annotations

import pytest

from rlinf_actors.codesync.requirements import Requirements, of_file, of_list
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError

PATH = "cluster.node_groups[0].env_configs[0].requirements"


def from_files(files: dict[str, str], name: str = "/p/requirements.txt") -> Requirements:
    def read(path: str) -> str:
        if path not in files:
            raise ConfigError("cannot be read: No such file or directory", path=path)
        return files[path]

    return of_file(name, read, PATH)


def test_list_is_taken_as_it_is():
    lines = (
        "numpy>=2",
        "torch==2.5.1 ; python_version < '3.13'",
        "--extra-index-url https://x/simple",
        "/wheels/a.whl",
    )
    assert of_list(lines, PATH).lines == lines
    assert not of_list([], PATH)


@pytest.mark.parametrize("line", ["numpy\r-e ./x", "numpy\x0b--no-index", "numpy\u2028-r /x", "numpy\n-e ."])
def test_entry_is_one_line_as_pip_counts_lines(line):
    with pytest.raises(ConfigError, match="it must be a requirement"):
        of_list([line], PATH)


def test_file_loses_comments_and_keeps_continued_lines():
    text = "# all\nnumpy  # for arrays\n\na==1 \\\n  --hash=sha256:00\nb @ https://x/b.whl#sha256=1\n"
    assert from_files({"/p/requirements.txt": text}).lines == (
        "numpy", "a==1    --hash=sha256:00", "b @ https://x/b.whl#sha256=1"
    )  # fmt: skip


def test_included_files_and_constraints_are_sent_along():
    files = {
        "/p/requirements.txt": "-r more/base.txt\n-c limits.txt\nc",
        "/p/more/base.txt": "a\n--requirement ../b.txt",
        "/p/b.txt": "b",
        "/p/limits.txt": "numpy<3",
    }
    assert from_files(files) == Requirements(("a", "b", "c"), ("numpy<3",))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("-e .", "publish"), ("--editable ./x", "publish"), ("./local", "directory of the driver"),
        ("../x", "directory of the driver"), (".", "directory of the driver"), ("~/x", "directory of the driver"),
        ("pkg @ file:./x", "directory of the driver"), ("--find-links w/../../x", None), ("-f ./w", "absolute"),
        ("--target /etc", "cannot be sent"), ("--log /x", "cannot be sent"), ("-t/etc", "cannot be sent"),
        ("--config-settings x=y", "cannot be sent"), ("a" * 3000, "too long"), ("a\0b", "too long"),
    ],
)  # fmt: skip
def test_line_that_nodes_cannot_use_is_refused_by_its_place(line, text):
    if text is None:
        assert of_list([line], PATH)
        return
    with pytest.raises(ConfigError, match=text) as raised:
        of_list([line], PATH)
    assert raised.value.path == f"{PATH}[0]"
    if "\0" not in line:
        with pytest.raises(ConfigError, match=r"requirements\.txt, entry 1"):
            from_files({"/p/requirements.txt": line})


@pytest.mark.parametrize("given", ["", "# comment", "a\nb", 3, None, "-r other.txt", "-c x"])
def test_entry_that_is_no_requirement_is_refused(given):
    with pytest.raises(ConfigError):
        of_list([given], PATH)


def test_file_that_includes_itself_or_is_missing_is_refused():
    with pytest.raises(ConfigError, match="perhaps by itself"):
        from_files({"/p/requirements.txt": "-r requirements.txt"})
    with pytest.raises(ConfigError, match="cannot be read"):
        from_files({})


class TestConfiguration:
    def config(self, requirements: object) -> ClusterConfig:
        group = {"label": "g", "node_ranks": 0, "env_configs": [{"node_ranks": 0, "requirements": requirements}]}
        return ClusterConfig.from_any({"num_nodes": 1, "node_groups": [group]})

    def test_list_or_file_of_the_driver(self, tmp_path, monkeypatch):
        (tmp_path / "needs.txt").write_text("numpy\n")
        monkeypatch.chdir(tmp_path)
        for given in (["numpy"], "needs.txt", str(tmp_path / "needs.txt")):
            assert self.config(given).node_groups[0].env_configs[0].requirements == Requirements(("numpy",))

    @pytest.mark.parametrize("given", [3, {"a": 1}, "", ["-e ."], "missing.txt"])
    def test_fault_has_its_path(self, given):
        with pytest.raises(ConfigError) as raised:
            self.config(given)
        assert raised.value.path.startswith(PATH)
