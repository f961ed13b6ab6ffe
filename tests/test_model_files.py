"""Which model, tokenizer and template are taken, and the sentence when one cannot be.

Must not know: the hub (test_hub.py), processes.
"""

import io
import json
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from container.model_files import Located, ModelFiles, ModelFilesError, fetch, locate
from container.settings import Settings

MODEL = {
    "config.json": '{"model_type": "llama"}',
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
}


def make(folder: Path, files: dict[str, str] | None = None, /, **more: str) -> Path:
    """A folder with small files of these names; more by keyword, `_` for `.`."""
    for name, content in {**(MODEL if files is None else files), **more}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def without(*names: str) -> dict[str, str]:
    return {name: content for name, content in MODEL.items() if name not in names}


def pack(archive: Path, files: dict[str, str]) -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content.encode()))
    return archive


class Machine:
    """A machine with the two platform folders somewhere else."""

    def __init__(self, root: Path) -> None:
        self.opt = root / "opt-ml-model"
        self.repository = root / "repository"
        self.scratch = root / "scratch"
        self.elsewhere = root / "elsewhere"
        self.scratch.mkdir()
        self.phases: list[str] = []

    def locate(self, **settings: object) -> Located:
        return locate(Settings(**settings), (self.opt, self.repository))  # type: ignore[arg-type]

    def fetch(self, **settings: object) -> ModelFiles:
        return fetch(
            Settings(**settings),  # type: ignore[arg-type]
            self.locate(**settings),
            scratch=self.scratch,
            report=self.phases.append,
        )

    def refusal(self, **settings: object) -> str:
        with pytest.raises(ModelFilesError) as caught:
            self.fetch(**settings)
        message = str(caught.value)
        assert "\n" not in message
        return message


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    # A working directory full of things that must not be found.
    decoys = make(tmp_path / "working-directory", chat_template_jinja="decoy")
    make(decoys, {"chat_template.jinja": "decoy"})
    monkeypatch.chdir(decoys)
    return Machine(tmp_path)


# Which model


def test_sagemaker_folder_comes_before_repository(machine: Machine) -> None:
    make(machine.opt)
    make(machine.repository)
    files = machine.fetch()
    assert files.model_dir == machine.opt
    assert files.model_id == str(machine.opt)
    assert (files.revision, files.is_from_hub) == (None, False)


def test_repository_is_taken_where_sagemaker_put_nothing(machine: Machine) -> None:
    machine.opt.mkdir()
    make(machine.repository)
    assert machine.fetch().model_dir == machine.repository


def test_a_folder_given_comes_first(machine: Machine) -> None:
    make(machine.opt)
    make(machine.elsewhere)
    assert machine.fetch(model_id=str(machine.elsewhere)).model_dir == machine.elsewhere


def test_a_local_model_comes_before_a_hub_id_and_the_log_says_so(machine: Machine) -> None:
    make(machine.opt)
    located = machine.locate(model_id="org/model")
    assert located.folder == machine.opt
    assert any("org/model is ignored" in remark for remark in located.remarks)


def test_a_hub_id_is_taken_where_nothing_is_local(machine: Machine) -> None:
    make(machine.opt, {"code/inference.py": ""})
    located = machine.locate(model_id="org/model")
    assert located.hub_id == "org/model"
    assert any("holds no model" in remark for remark in located.remarks)


def test_a_model_one_folder_down_is_found(machine: Machine) -> None:
    make(machine.opt / "my-model")
    make(machine.opt / "code", {"inference.py": ""})
    make(machine.opt / ".cache")
    assert machine.fetch().model_dir == machine.opt / "my-model"


def test_two_models_one_folder_down_are_a_question(machine: Machine) -> None:
    make(machine.opt / "a")
    make(machine.opt / "b")
    message = machine.refusal()
    assert "a, b" in message
    assert f"--model-id {machine.opt / 'a'}" in message


@pytest.mark.parametrize("prefix", ["", "my-model/", "./"])
def test_an_archive_left_over_is_unpacked_elsewhere(machine: Machine, prefix: str) -> None:
    archive = pack(machine.opt / "model.tar.gz", {prefix + k: v for k, v in MODEL.items()})
    files = machine.fetch()
    assert files.model_dir.is_relative_to(machine.scratch)
    assert (files.model_dir / "model.safetensors").read_text() == "weights"
    assert files.model_id == str(archive)
    assert [path.name for path in machine.opt.iterdir()] == ["model.tar.gz"]


def test_an_archive_may_be_given(machine: Machine) -> None:
    archive = pack(machine.elsewhere / "mine.tgz", MODEL)
    assert machine.fetch(model_id=str(archive)).model_dir.is_relative_to(machine.scratch)


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_an_archive_that_leaves_its_folder_is_refused_or_kept_inside(
    machine: Machine, name: str
) -> None:
    pack(machine.opt / "model.tar.gz", {**MODEL, name: "x"})
    with suppress(ModelFilesError):
        machine.fetch()
    assert not (machine.scratch / "outside").exists()
    assert not Path("/outside").exists()


def test_a_broken_archive_is_refused(machine: Machine) -> None:
    archive = pack(machine.opt / "model.tar.gz", {**MODEL, "model.safetensors": "w" * 99999})
    archive.write_bytes(archive.read_bytes()[:-60])
    assert "cannot be unpacked" in machine.refusal()


def test_nothing_at_all(machine: Machine) -> None:
    message = machine.refusal()
    for part in (str(machine.opt), str(machine.repository), "--model-id", "HF_MODEL_ID"):
        assert part in message


# What is incomplete


def test_a_path_that_does_not_exist(machine: Machine) -> None:
    for path in ("/no/such/folder", "./nothing", "~no-such-user/x"):
        message = machine.refusal(model_id=path)
        assert path in message
        assert "--model-id" in message


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({"README.md": ""}, ["config.json is missing"]),
        (without("model.safetensors"), ["weights are missing", "model.safetensors"]),
        ({**without("model.safetensors"), "model.gguf": "x"}, ["model.gguf", "cannot be loaded"]),
        (without("tokenizer.json"), ["tokenizer is missing", "--tokenizer-config-path"]),
        (
            {**without("model.safetensors"), "pytorch_model.bin": "x"},
            ["pytorch_model.bin", "--trust-remote-code"],
        ),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": "x"}, ["adapter", "merge"]),
        ({**MODEL, "config.json": "{"}, ["config.json", "JSON"]),
        ({**MODEL, "config.json": "[]"}, ["config.json", "JSON object"]),
        ({**MODEL, "config.json": "{}"}, ["config.json", "model_type"]),
        ({**MODEL, "model.safetensors": ""}, ["model.safetensors", "empty"]),
        (
            {**MODEL, "model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
            ["Git LFS", "git lfs pull"],
        ),
        (
            {**without("model.safetensors"), "model.safetensors.index.json": "{}"},
            ["model.safetensors.index.json", "weight_map"],
        ),
    ],
)
def test_what_is_missing_is_named_with_its_place_and_a_remedy(
    machine: Machine, files: dict[str, str], parts: list[str]
) -> None:
    make(machine.elsewhere, files)
    message = machine.refusal(model_id=str(machine.elsewhere))
    assert str(machine.elsewhere) in message
    for part in parts:
        assert part in message


def index(*shards: str) -> str:
    return json.dumps({"weight_map": {f"layer.{i}": name for i, name in enumerate(shards)}})


def test_a_missing_shard_is_named(machine: Machine) -> None:
    sharded = {
        **without("model.safetensors"),
        "model.safetensors.index.json": index("s1.safetensors", "s2.safetensors"),
        "s1.safetensors": "x",
    }
    make(machine.opt, sharded)
    message = machine.refusal()
    assert message.startswith("s2.safetensors of 2 weight files is missing")
    assert str(machine.opt) in message
    make(machine.opt, {"s2.safetensors": "x"})
    assert machine.fetch().model_dir == machine.opt


def test_an_incomplete_model_is_not_replaced_by_one_from_the_hub(machine: Machine) -> None:
    make(machine.opt, {**without("model.safetensors"), "model.safetensors.index.json": index("s1")})
    assert "s1" in machine.refusal(model_id="org/model")
    make(machine.repository, {"adapter_config.json": "{}"})
    (machine.opt / "model.safetensors.index.json").unlink()
    assert "adapter" in machine.refusal(model_id="org/model")


def test_pickled_weights_are_taken_when_trusted(machine: Machine) -> None:
    make(machine.opt, {**without("model.safetensors"), "pytorch_model.bin": "x"})
    assert machine.fetch(trust_remote_code=True).model_dir == machine.opt


def test_weights_of_another_name_are_taken_where_the_config_names_them(machine: Machine) -> None:
    config = '{"model_type": "llama", "transformers_weights": "own.safetensors"}'
    make(machine.opt, {**without("model.safetensors"), "config.json": config})
    make(machine.opt, {"own.safetensors": "x"})
    assert machine.fetch().model_dir == machine.opt


# Which tokenizer and template


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_local_model_brings_its_own_tokenizer_whatever_the_revision(
    machine: Machine, revision: str | None
) -> None:
    make(machine.opt)
    files = machine.fetch(revision=revision)
    assert (files.tokenizer_dir, files.tokenizer_config_path) == (None, None)
    assert (files.revision, files.is_from_hub, files.chat_template) == (None, False, None)
    remarks = machine.locate(revision=revision).remarks
    assert bool(remarks) == (revision is not None)


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_config_given_replaces_the_models_and_nothing_else(
    machine: Machine, revision: str | None
) -> None:
    make(machine.opt)
    given = make(machine.elsewhere) / "tokenizer_config.json"
    files = machine.fetch(revision=revision, tokenizer_config_path=str(given))
    assert (files.tokenizer_dir, files.tokenizer_config_path) == (None, given)


def test_a_folder_given_replaces_the_tokenizer(machine: Machine) -> None:
    make(machine.opt)
    make(machine.elsewhere)
    files = machine.fetch(tokenizer_config_path=str(machine.elsewhere))
    assert (files.tokenizer_dir, files.tokenizer_config_path) == (machine.elsewhere, None)


def test_a_model_without_tokenizer_takes_the_one_beside_the_config_given(machine: Machine) -> None:
    make(machine.opt, without("tokenizer.json", "tokenizer_config.json"))
    given = make(machine.elsewhere) / "tokenizer_config.json"
    files = machine.fetch(tokenizer_config_path=str(given))
    assert (files.tokenizer_dir, files.tokenizer_config_path) == (machine.elsewhere, given)


def test_a_relative_path_given_is_the_shells_or_else_in_the_models_folder(
    machine: Machine,
) -> None:
    make(machine.opt, {**MODEL, "other/config.json": "{}"})
    files = machine.fetch(tokenizer_config_path="other/config.json")
    assert files.tokenizer_config_path == machine.opt / "other/config.json"
    files = machine.fetch(tokenizer_config_path="tokenizer_config.json")
    assert files.tokenizer_config_path == Path.cwd() / "tokenizer_config.json"


@pytest.mark.parametrize("model_id", [None, "org/model"])
def test_a_config_given_that_is_not_there_is_told_at_once(
    machine: Machine, model_id: str | None
) -> None:
    if model_id is None:
        make(machine.opt)
    with pytest.raises(ModelFilesError, match="--tokenizer-config-path /no/such does not exist"):
        machine.locate(model_id=model_id, tokenizer_config_path="/no/such")


def test_a_template_may_be_a_file_or_itself(machine: Machine) -> None:
    make(machine.opt)
    path = make(machine.elsewhere, {"mine.jinja": "x"}) / "mine.jinja"
    assert machine.fetch(chat_template=str(path)).chat_template == str(path)
    assert machine.fetch(chat_template="{{ messages }}").chat_template == "{{ messages }}"
    assert "--chat-template" in machine.refusal(chat_template="missing.jinja")


def test_links_into_another_folder_are_followed(machine: Machine) -> None:
    make(machine.elsewhere)
    machine.opt.mkdir()
    for path in machine.elsewhere.iterdir():
        (machine.opt / path.name).symlink_to(path)
    assert machine.fetch().model_dir == machine.opt
